"""Inner composition root: settings → model facts → weights → program → executor → pages → runner, scheduler, engine.

Called by `engine.__main__`, `llm` and tests. The only file of the engine that unpacks the settings; each part gets the
numbers it uses. Each phase is timed and told to `progress` as it goes on.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sayfa.base.clock import Clock, SystemClock
from sayfa.base.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions
from sayfa.base.errors import ConfigError, ModelError
from sayfa.base.faults import fault
from sayfa.base.host import free_memory_bytes, usable_cores
from sayfa.base.log import logger
from sayfa.base.messages import EngineInfo, MemoryPlan
from sayfa.base.model_config import ModelConfig
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.sizing import pages_budget_bytes, pages_for, plan_memory
from sayfa.base.step import NewRow, ScheduledRow, SchedulerOutput
from sayfa.core.kv_cache import KvCache
from sayfa.core.limits import Limits
from sayfa.core.page_pool import PagePool
from sayfa.core.policy import FairPolicy, Policy, PriorityPolicy, StaticPolicy
from sayfa.core.scheduler import Scheduler
from sayfa.engine.engine import Engine
from sayfa.models import content_digest, load_program
from sayfa.models.config import read_config
from sayfa.models.formats.source import TensorSource, open_weights
from sayfa.nn.program.executor import Executor
from sayfa.nn.program.program import Program
from sayfa.runner.executors import Chosen, StepLimits, make_executor
from sayfa.runner.model_runner import ModelRunner
from sayfa.runner.request_table import RequestTable

log = logger("engine")

DEFAULT_MAX_MODEL_LEN = 8192
WARM_UP_TOKENS = 8
MAX_SCORED = 64
"""Prompt positions scored in one step: each holds a row of logits, which are megabytes with a large vocabulary."""

Progress = Callable[[str, float], None]


@dataclass
class Phases:
    """Phases of the start in order, with seconds; each is told to `progress` when it begins and when it ends."""

    clock: Clock
    progress: Progress
    seconds: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.progress(name, 0.0)
        begun = self.clock.monotonic()
        try:
            yield
        except MemoryError:
            raise ModelError(
                f"there is not enough memory to load this model (in the phase {name!r}); lower "
                "--max-num-batched-tokens or --max-num-seqs, take a smaller model, or free memory"
            ) from None
        self.seconds.append((name, self.clock.monotonic() - begun))
        self.progress(name, 1.0)


def build_engine(
    config: EngineConfig,
    progress: Progress = lambda phase, done: None,
    clock: Clock | None = None,
    before: list[tuple[str, float]] | None = None,
) -> Engine:
    """Load the model and return an engine that is ready to step. `config.model.model` is a path.

    before: phases that are already over (imports). Raises ConfigError or ModelError with a sentence for the operator.
    """
    clock = clock or SystemClock()
    phases = Phases(clock, progress, list(before or []))
    threads = config.parallel.threads or usable_cores()
    with phases.phase("read"):
        fault("load.config")
        model = read_config(config.model.model)
        max_model_len = choose_max_model_len(config.model, model)
        source = open_weights(config.model.model)
        fault("load.program")
        program = load_program(config.model.model, model, source, num_positions=max_model_len)
        digest = model.digest or content_digest(source, model)
    with phases.phase("pack"):
        fault("load.pack")
        chosen = _choose_executor(config, program, threads)
    with phases.phase("pages"):
        fault("load.pages")
        memory, max_model_len = size_pages(config, chosen.executor, max_model_len)
        chosen.executor.allocate_pages(memory.num_pages)
    table = RequestTable(config.scheduler.max_num_seqs, max_model_len, config.cache.block_size, model.vocab_size)
    runner = ModelRunner(chosen.executor, table, chosen.draw, clock, chosen.make_prepare)
    with phases.phase("warm-up"):
        fault("load.warm_up")
        warm_up(runner, min(WARM_UP_TOKENS, max_model_len - 1, config.cache.block_size))
    log_executor(chosen)
    info = EngineInfo(
        model=model.name,
        architecture=model.architecture,
        dtype=_main_type(source),
        kv_dtype=_kv_type(config.cache.kv_cache_dtype, chosen),
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_queued_requests=config.scheduler.max_num_queued_reqs,
        max_queued_tokens=config.scheduler.max_num_queued_tokens,
        prefix_caching=config.cache.enable_prefix_caching,
        memory=memory,
        threads=threads,
        isa=str(getattr(chosen.executor, "isa", "none")),
        ops=_op_notes(chosen),
        phases=phases.seconds,
        pid=os.getpid(),
    )
    scheduler = make_scheduler(config.scheduler, config.cache, memory.num_pages, max_model_len, digest)
    seeds = random.Random(config.model.seed)
    return Engine(scheduler, runner, info, clock, seeds, idle_work=chosen.executor.populate_pages())


def _choose_executor(config: EngineConfig, program: Program, threads: int) -> Chosen:
    """Hand the executor the numbers it uses."""
    return make_executor(
        program,
        StepLimits(
            max_tokens=config.scheduler.max_num_batched_tokens,
            max_rows=config.scheduler.max_num_seqs + MAX_SCORED,
            page_size=config.cache.block_size,
            kv_type=config.cache.kv_cache_dtype,
        ),
        kind=config.parallel.executor,
        threads=threads,
        isa=None if config.parallel.isa == "auto" else config.parallel.isa,
        dtype=config.model.dtype,
    )


def choose_max_model_len(options: ModelOptions, model: ModelConfig) -> int:
    """Return the longest sequence to serve. Raises ConfigError if more is asked for than the model was made for."""
    if options.max_model_len is None:
        return min(model.max_context, DEFAULT_MAX_MODEL_LEN)
    if options.max_model_len > model.max_context:
        raise ConfigError(
            f"--max-model-len is {options.max_model_len}, but {model.name} was made for {model.max_context} tokens; "
            "lower it"
        )
    return options.max_model_len


def size_pages(config: EngineConfig, executor: Executor, max_model_len: int) -> tuple[MemoryPlan, int]:
    """Decide how many pages there are; return the plan and the longest sequence that it can hold.

    A pool that is too small for one sequence of full length is an error if the length was asked for; otherwise the
    length is lowered, and the log says so.
    """
    page_size = config.cache.block_size
    asked, free = config.cache.kv_cache_memory, free_memory_bytes()
    budget = asked
    if budget is None:
        budget = pages_budget_bytes(free, config.cache.kv_cache_memory_share, executor.buffers_bytes)
    plan = plan_memory(
        weights_bytes=executor.weights_bytes,
        buffers_bytes=executor.buffers_bytes,
        bytes_per_page=executor.bytes_per_page,
        page_size=page_size,
        pages_bytes=budget,
        most_tokens=config.scheduler.max_num_seqs * pages_for(max_model_len, page_size) * page_size,
    )
    if asked is not None:
        _tell_of_pages(asked, free, plan)
    fits = (plan.num_pages - 1) * page_size
    if fits >= max_model_len:
        return plan, max_model_len
    if config.model.max_model_len is not None:
        raise ModelError(
            f"the memory for pages ({plan.pages_bytes >> 20} MiB) holds {fits} tokens, fewer than one sequence of "
            f"--max-model-len {max_model_len}; lower that, or raise --kv-cache-memory"
        )
    log.warning("memory for pages holds %d tokens; --max-model-len is lowered from %d to that", fits, max_model_len)
    return plan, fits


def _tell_of_pages(asked: int, free: int, plan: MemoryPlan) -> None:
    """Say what the operator's own number does not show: that it cannot be had, or is more than can ever be used."""
    if plan.pages_bytes + plan.buffers_bytes + plan.margin_bytes > free:
        log.warning(
            "--kv-cache-memory: pages of %d MiB, buffers and a margin are more than the %d MiB that are free now; as "
            "pages are used, the system may end the engine or swap. Lower it, or free memory",
            plan.pages_bytes >> 20, free >> 20,
        )  # fmt: skip
    if plan.pages_bytes < asked - 2 * plan.bytes_per_page:
        log.info(
            "--kv-cache-memory: %d MiB of pages are taken, which is all that --max-num-seqs sequences of "
            "--max-model-len can use", plan.pages_bytes >> 20,
        )  # fmt: skip


def warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """Compute one real step on page 1 before anybody is served. Raises ModelError if it gives no usable numbers."""
    row = NewRow(
        row=0, tokens=[0] * num_tokens, num_prompt=num_tokens, params=SamplingParams(temperature=0.0), seed=0, pages=[1]
    )
    result = runner.execute(SchedulerOutput(step=0, new=[row], rows=[ScheduledRow(0, 0, num_tokens, 1, True)]))
    runner.execute(SchedulerOutput(step=0, forget=[0]))
    if result.rows[0].error is not None:
        raise ModelError(f"the model's first step failed ({result.rows[0].error}); its weights may be damaged")


def make_scheduler(
    options: SchedulerOptions, cache: CacheOptions, num_pages: int, max_model_len: int, digest: str
) -> Scheduler:
    """Build the deciding wing. digest: content identity of the model, part of every page's hash."""
    limits = Limits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_queued_requests=options.max_num_queued_reqs,
        max_queued_tokens=options.max_num_queued_tokens,
        max_scored=MAX_SCORED,
        share_queue=options.scheduling_policy == "fair",
    )
    pool = PagePool(num_pages)
    pages = KvCache(pool, cache.block_size, model_digest=digest, caching=cache.enable_prefix_caching)
    return Scheduler(limits, _policy(options), pages)


def _policy(options: SchedulerOptions) -> Policy:
    match options.scheduling_policy:
        case "static":
            return StaticPolicy(options.max_num_seqs)
        case "fcfs":
            return PriorityPolicy(class_lead=0)
        case "priority":
            return PriorityPolicy()
        case "fair":
            return FairPolicy()


def _main_type(source: TensorSource) -> str:
    """Return the type that most bytes of the weights have."""
    sizes: Counter[str] = Counter()
    for name in source.names():
        sizes[source.info(name)[1]] += source.read(name).nbytes
    return sizes.most_common(1)[0][0]


def _kv_type(wanted: str, chosen: Chosen) -> str:
    """Return how pages keep K and V; "auto" is what `runner.executors` makes of it."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if chosen.executor.name == "native" else "float32"


def _op_notes(chosen: Chosen) -> dict[str, str]:
    """Say for each op kind that it is native, or why it is not."""
    notes = chosen.executor.op_notes()
    return dict.fromkeys(notes, chosen.why_not_native) if chosen.why_not_native else notes


def log_executor(chosen: Chosen) -> None:
    """Say it once and clearly if the fast path is not taken, and why."""
    if chosen.executor.name != "native":
        log.warning("the reference executor runs this model, many times slower than native: %s", chosen.why_not_native)
