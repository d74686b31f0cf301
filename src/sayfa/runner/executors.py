"""Choose what runs a program: the native executor where it can, else the reference, never in silence.

Called by `engine.build` and `llm`. Neither executor is imported before it is chosen, so a process that runs natively
never loads torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sayfa.base.errors import ConfigError, ModelError
from sayfa.base.registry import Registry
from sayfa.models.formats.dequant import dequantize
from sayfa.nn.program.executor import Executor
from sayfa.nn.program.program import Program
from sayfa.runner.draw import draw
from sayfa.runner.prepare import Prepare
from sayfa.runner.request_table import RequestTable
from sayfa.runner.sampler import Draw

EXECUTORS = Registry(
    "sayfa.executors",
    {
        "native": "sayfa.nn.program.native:NativeExecutor",
        "reference": "sayfa.nn.program.reference:ReferenceExecutor",
    },
)
_NATIVE_WHY_NOT = Registry("sayfa.native", {"why_not": "sayfa.nn.program.native:why_not"})
_NATIVE_DRAW = Registry("sayfa.native", {"draw": "sayfa.runner.native_draw:NativeDraw"})
_NATIVE_PREPARE = Registry("sayfa.native", {"prepare": "sayfa.runner.native_prepare:NativePrepare"})


@dataclass(frozen=True)
class StepLimits:
    """Bounds of one step and of the pages: tokens, logit rows, tokens in a page, and how pages keep K and V.

    kv_type: "auto" (bfloat16 natively, float32 in the reference), "float32", "bfloat16" or "int8".
    """

    max_tokens: int
    max_rows: int
    page_size: int
    kv_type: str = "auto"


@dataclass(frozen=True)
class Chosen:
    """The executor, what goes with it, and why it is not native (empty if it is).

    make_prepare: makes the twin of `runner.prepare` for a table; None stands for `runner.prepare` itself.
    """

    executor: Executor
    draw: Draw
    why_not_native: str
    make_prepare: Callable[[RequestTable], Prepare] | None = None


def make_executor(
    program: Program,
    limits: StepLimits,
    *,
    kind: str = "auto",
    threads: int = 1,
    isa: str | None = None,
    dtype: str = "auto",
) -> Chosen:
    """Build the executor for `kind`: "native", "reference", or "auto" (native unless a reason speaks against it).

    isa, dtype: handed to the native executor. Raises ModelError if "native" is demanded and cannot be, with the reason.
    """
    if kind not in ("auto", "native", "reference"):
        raise ConfigError(f"executor {kind!r} is not known; choose auto, native or reference")
    reason = "the reference executor was asked for" if kind == "reference" else _why_not_native(program)
    if not reason:
        return _native(program, limits, threads=threads, isa=isa, dtype=dtype)
    if kind == "native":
        raise ModelError(f"the native executor cannot run this model: {reason}; use --executor auto or reference")
    kv_type = "float32" if limits.kv_type == "auto" else limits.kv_type
    executor = EXECUTORS.get("reference")(
        program,
        dequantize=dequantize,
        max_tokens=limits.max_tokens,
        max_rows=limits.max_rows,
        page_size=limits.page_size,
        kv_type=kv_type,
    )
    return Chosen(executor, draw, reason)


def _why_not_native(program: Program) -> str:
    """A sentence, or the empty string if the native executor can run this program."""
    try:
        why_not: Any = _NATIVE_WHY_NOT.get("why_not")
    except ConfigError as error:
        return f"the native library is not installed ({error})"
    return why_not(program) or ""


def _native(program: Program, limits: StepLimits, **options: Any) -> Chosen:
    kv_type = "bfloat16" if limits.kv_type == "auto" else limits.kv_type
    executor = EXECUTORS.get("native")(
        program,
        max_tokens=limits.max_tokens,
        max_rows=limits.max_rows,
        page_size=limits.page_size,
        kv_type=kv_type,
        **options,
    )
    return Chosen(executor, _NATIVE_DRAW.get("draw")(executor), "", _NATIVE_PREPARE.get("prepare"))
