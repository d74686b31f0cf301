"""What a model is, once loaded: a flat list of ops over buffers. Models describe it, executors run it.

Layers (`nn.layers`) lay the ops down once at load through `ProgramBuilder`; a step binds a batch and runs the list. The
*reference* executor does it op by op in plain torch (oracle and fall-back), the *native* one in one call. Executors
may fuse neighbours and choose their own buffer and page layouts; they may not change what an op means.

All activations are float32, one row per token (`rows == "tokens"`, T rows) or per wanted logits row
(`rows == "logits"`, L rows). The K/V pages belong to the executor; a program only says how many layers, heads and dims
they need.

RmsNorm, HeadNorm, Rope and Add may write the buffer that they read; a program in which another op does is not run
natively, since its workers would read what others have overwritten.

Shapes in the docstrings: T tokens, L logit rows, H hidden, K input and N output features, D head dim.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sayfa.base.errors import ModelError

RowSpace = Literal["tokens", "logits"]


@dataclass(frozen=True, eq=False)
class Buffer:
    """A float32 activation matrix [rows, width] that lives within a step."""

    index: int
    name: str
    width: int
    rows: RowSpace = "tokens"


@dataclass(frozen=True)
class View:
    """Columns [start, start + width) of a buffer."""

    buffer: Buffer
    start: int
    width: int


@dataclass(frozen=True, eq=False)
class WeightPiece:
    """One matrix [rows, columns] as its file holds it: raw bytes and a type name ("F32", "BF16", "Q4_1", ...).

    `data` is a one-dimensional uint8 view, usually of a memory map; block types run along the columns.
    """

    name: str
    rows: int
    columns: int
    type: str
    data: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix [N, K] made of pieces stacked along N (for example q, k and v); types may differ between pieces."""

    pieces: tuple[WeightPiece, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def columns(self) -> int:
        return self.pieces[0].columns

    @property
    def num_bytes(self) -> int:
        return sum(piece.data.nbytes for piece in self.pieces)


Vector = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RopeTable:
    """cos and sin [positions, rotary_dim / 2], float32, shared by all layers that turn alike."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    style: Literal["half", "adjacent"]


# --------------------------------------------------------------------------------------------------- ops


@dataclass(frozen=True, eq=False)
class Embed:
    """out[t] = table[token_ids[t]] * scale. table [V, H]."""

    table: Weight
    out: Buffer
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight. x, out [rows, H]; weight [H]."""

    x: Buffer
    weight: Vector
    eps: float
    out: Buffer


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RmsNorm in place over each head of a view: x [T, num_heads * D], weight [D] (Qwen3, Gemma 3)."""

    x: View
    num_heads: int
    weight: Vector
    eps: float


@dataclass(frozen=True, eq=False)
class Linear:
    """out = x @ weight.T + bias, or out += the same if `add`. x [rows, K], weight [N, K], bias [N], out [rows, N]."""

    x: Buffer
    weight: Weight
    out: Buffer
    bias: Vector | None = None
    add: bool = False


@dataclass(frozen=True, eq=False)
class Rope:
    """Turn each head of a view in place by its token's position; dims above rotary_dim stay. x [T, num_heads * D]."""

    x: View
    num_heads: int
    table: RopeTable


@dataclass(frozen=True, eq=False)
class KvWrite:
    """Write K and V of each token to its slot in the layer's pages. key, value [T, num_kv_heads * D]."""

    key: View
    value: View
    layer: int


@dataclass(frozen=True, eq=False)
class Attention:
    """Causal attention of each token over its sequence's pages, itself included (after KvWrite of the same layer).

    query [T, num_heads * D], out [T, num_heads * D]; query head h reads KV head h // (num_heads / num_kv_heads).
    window: 0 = all earlier positions, else only the last `window` ones, itself included.
    """

    query: View
    out: Buffer
    layer: int
    num_heads: int
    scale: float
    window: int = 0


@dataclass(frozen=True, eq=False)
class ActMul:
    """out = act(gate) * up, with gate = x[:, :F] and up = x[:, F:]. x [T, 2F], out [T, F]."""

    x: Buffer
    out: Buffer
    act: Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, eq=False)
class Add:
    """x += y. Both [rows, H]."""

    x: Buffer
    y: Buffer


@dataclass(frozen=True, eq=False)
class Gather:
    """out[l] = x[logit_rows[l]]: keep the rows that want logits. x [T, H] → out [L, H]."""

    x: Buffer
    out: Buffer


Op = Embed | RmsNorm | HeadNorm | Linear | Rope | KvWrite | Attention | ActMul | Add | Gather


def check_row_spaces(op: Op) -> None:
    """Raise ModelError unless each operand has rows of the space that the op runs over, as its shapes above tell."""
    given: dict[str, Buffer] = {}
    for part in fields(op):
        operand = getattr(op, part.name)
        if isinstance(operand, (Buffer, View)):
            given[part.name] = operand.buffer if isinstance(operand, View) else operand
    match op:
        case RmsNorm() | Linear() | Add():
            needed = dict.fromkeys(given, op.x.rows)
        case Gather():
            needed = {"x": "tokens", "out": "logits"}
        case _:
            needed = dict.fromkeys(given, "tokens")
    if any(buffer.rows != needed[name] for name, buffer in given.items()):
        are = ", ".join(f"{name} is {buffer.name} [{buffer.rows}]" for name, buffer in given.items())
        raise ModelError(
            f"{type(op).__name__} cannot run over rows of these spaces: {are}; it needs "
            f"{', '.join(f'{name} [{space}]' for name, space in needed.items())} (Gather leads from tokens to logits)"
        )


@dataclass(frozen=True)
class KvSpec:
    """What the pages must hold: per layer, K and V of num_kv_heads × head_dim for each token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def check_attention(op: Attention, kv: KvSpec) -> None:
    """Raise ModelError unless the query heads share the KV heads evenly: executors divide by what they have here."""
    if min(op.num_heads, kv.num_kv_heads, kv.head_dim) < 1 or op.num_heads % kv.num_kv_heads:
        raise ModelError(
            f"{op.num_heads} query heads cannot share {kv.num_kv_heads} KV heads of {kv.head_dim} dims evenly; give "
            "each KV head the same number of query heads, 1 or more"
        )
    if op.window < 0:
        raise ModelError(f"the window of attention in layer {op.layer} is {op.window}; give 0 (no window) or a length")


@dataclass(frozen=True, eq=False)
class Program:
    """A whole model as ops in order; `logits` [L, V] is the result.

    Raises ModelError where row spaces meet that do not fit (an op would read or write beyond a buffer's end), and where
    heads do not.
    """

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    kv: KvSpec
    logits: Buffer

    def __post_init__(self) -> None:
        for op in self.ops:
            check_row_spaces(op)
            if isinstance(op, Attention):
                check_attention(op, self.kv)
        if self.logits.rows != "logits":
            raise ModelError(f"the logits are {self.logits.name} [{self.logits.rows}]; Gather the rows that want them")


@dataclass
class ProgramBuilder:
    """Collects buffers and ops while the layers of a model lay themselves down."""

    kv: KvSpec
    ops: list[Op] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    def buffer(self, name: str, width: int, rows: RowSpace = "tokens") -> Buffer:
        """Make a new buffer; executors share memory between buffers whose lives do not overlap."""
        made = Buffer(len(self.buffers), name, width, rows)
        self.buffers.append(made)
        return made

    def add(self, op: Op) -> None:
        """Append an op."""
        self.ops.append(op)

    def finish(self, logits: Buffer) -> Program:
        """Close the list; `logits` is the buffer that the sampler reads."""
        return Program(tuple(self.ops), tuple(self.buffers), self.kv, logits)


# --------------------------------------------------------------------------------------------------- a step's input


@dataclass(frozen=True, eq=False)
class InputBatch:
    """The flat ragged batch of one step: T tokens of S rows lie end to end, no padding, no phases.

    token_ids, positions [T] int32; slots [T] int32: page * page_size + offset where the token's K/V goes;
    query_start [S + 1] int32: row s has tokens [query_start[s], query_start[s + 1]);
    context_len [S] int32: positions of row s that exist after this step (its last token's position + 1);
    page_table [S, P] int32, C-contiguous, unused entries 0; logit_rows [L] int32: token indices that need logits.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    query_start: NDArray[np.int32]
    context_len: NDArray[np.int32]
    page_table: NDArray[np.int32]
    logit_rows: NDArray[np.int32]
