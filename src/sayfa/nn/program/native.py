"""The native executor: a whole step in one call of the library in csrc/. Chosen by `runner.executors`; never
loads torch.

Everything is checked by `Program`, here or in the library's own `check` before an address is handed over: beyond that
line a wrong shape would be a crash. Weights are packed once, straight from the memory map, whose pages are given back.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sayfa.base.errors import ModelError
from sayfa.nn.program.lowering import (
    JOIN_MAX_ROWS,
    Join,
    Lowered,
    Prepare,
    Product,
    RowGroup,
    lower,
    plan_arena,
    row_floats,
    why_not_parallel,
)
from sayfa.nn.program.native_library import isas, library, make_pool, missing_because
from sayfa.nn.program.native_sample import SampleCall
from sayfa.nn.program.native_weights import FLOAT_PANELS, TENSOR_TYPES, PackedWeights, check_piece, check_widths
from sayfa.nn.program.program import (
    ActMul,
    Add,
    Attention,
    Buffer,
    Embed,
    Gather,
    HeadNorm,
    InputBatch,
    KvWrite,
    Linear,
    Program,
    RmsNorm,
    Rope,
    Vector,
    View,
)

_ONLY_FLOAT32 = 1 << 8
_KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2}
_ACTS = {"silu": 0, "gelu_tanh": 1}
_EPILOGUE_ACT = {"silu": 2, "gelu_tanh": 3}
_PAGE_SIZES = (16, 32, 64)
_MAX_HEAD_DIM = 256
_MAX_INT32 = 2**31 - 1
_POPULATED_BYTES = 512 << 20  # all could be most of the machine's memory, which others may use until we do
_PIECE_BYTES = 2 << 20  # a huge page: 4 ms where the system takes memory from its host first


def why_not(program: Program) -> str | None:
    """A sentence saying why this program cannot run natively, or None if it can."""
    if library is None:
        return f"the native library is not there ({missing_because}); install a C++ compiler and Sayfa again"
    for op in program.ops:
        if isinstance(op, (Linear, Embed)):
            weight = op.weight if isinstance(op, Linear) else op.table
            for piece in weight.pieces:
                if piece.type not in TENSOR_TYPES:
                    return f"weight {piece.name} has type {piece.type}; native types are {', '.join(TENSOR_TYPES)}"
            if isinstance(op, Embed) and len(weight.pieces) != 1:
                return "the embedding table has more than one piece"
    if program.kv.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {program.kv.head_dim} is over the {_MAX_HEAD_DIM} that native attention holds in registers"
    return why_not_parallel(program)


class NativeExecutor:
    """Runs a program in the native library; see `executor.Executor` for the protocol.

    threads: workers, 0 for one per usable core. kv_type: "float32", "bfloat16" or "int8". isa: an instruction set of
    `isas()`, or None for the best. dtype: panels of float weights, "auto" (float32 stays, the 16-bit types become
    bfloat16), "bfloat16" or "float32". Raises ModelError if something cannot be run as asked.
    """

    name = "native"

    def __init__(
        self,
        program: Program,
        *,
        threads: int,
        max_tokens: int,
        max_rows: int,
        page_size: int,
        kv_type: str,
        isa: str | None = None,
        dtype: str = "auto",
    ) -> None:
        if reason := why_not(program):
            raise ModelError(reason)
        _check_choice("kv type", kv_type, _KV_TYPES)
        _check_choice("dtype", dtype, FLOAT_PANELS)
        self._isa = isa or isas()[0]
        if self._isa not in isas():
            raise ModelError(
                f"this processor cannot run the instruction set {isa!r}; choose one of {', '.join(isas())}"
            )
        if page_size not in _PAGE_SIZES:
            raise ModelError(f"page size {page_size} cannot be served natively; choose one of 16, 32, 64")
        self._program = program
        self._pool = make_pool(threads)
        self._native = library.Program(self._pool, self._isa)
        self._page = (page_size, _KV_TYPES[kv_type])
        self._page_bytes = 0
        self._pages: Any = None
        self._keep: list[Any] = []
        floats = FLOAT_PANELS[dtype]
        self._weights = PackedWeights(floats)
        lowered = lower(program, self._row_formats, self._weights.can_pair)
        self._weights.pack(self._pool, self._isa)
        rows = {"tokens": max_tokens, "logits": max_rows}
        self._arena_plan = plan_arena(program, lowered, rows, _prepared_bytes)
        self._arena = library.Block(self._arena_plan.size)
        self._partials = self._make_partials()
        self._rows = rows
        self._limit()
        for op in lowered:
            self._emit(op)
        self._logits: NDArray[np.float32] = self.view(program.logits)

    # ------------------------------------------------------------------------------------------- protocol

    def op_notes(self) -> dict[str, str]:
        """Every op kind of the program: all are native, or the executor would not exist."""
        return {type(op).__name__: "native" for op in self._program.ops}

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._isa

    @property
    def threads(self) -> int:
        """Workers of the pool, the calling thread included."""
        return int(self._pool.count)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the packed panels (embedding rows are read from the file's map and are not counted)."""
        return self._weights.num_bytes

    @property
    def buffers_bytes(self) -> int:
        """The arena of activations, at most; memory is touched as steps need it."""
        return int(self._arena.bytes) + (int(self._partials.bytes) if self._partials else 0)

    @property
    def bytes_per_page(self) -> int:
        """K and V of all layers for one page."""
        return self._page_bytes * self._program.kv.num_layers

    def allocate_pages(self, num_pages: int) -> None:
        """Make the pages, zeroed by the system when first touched. Raises ModelError if the memory is refused."""
        try:
            self._pages = library.Pages(self._program.kv.num_layers, num_pages, self._page_bytes)
        except MemoryError:
            total = num_pages * self.bytes_per_page / 2**20
            sentence = f"{num_pages} pages need {total:.0f} MiB, which the system refuses; lower --kv-cache-memory"
            raise ModelError(sentence) from None
        self._native.set_pages(self._pages)

    def populate_pages(self) -> Iterator[None]:
        """Ask for memory in the order in which an empty pool hands pages out; end early if the system has none."""
        num_layers = self._program.kv.num_layers
        step = max(1, _PIECE_BYTES // self._page_bytes)
        stop = min(self._pages.num_pages, _POPULATED_BYTES // self.bytes_per_page)
        for first in range(0, stop, step):
            for layer in range(num_layers):
                if not self._pages.populate(layer, first, min(step, stop - first)):
                    return
                yield

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in all layers, in order."""
        for source, destination in copies:
            self._pages.copy(source, destination)

    def poison_pages(self) -> None:
        """Fill all pages with NaN patterns, so that a test sees any read of a slot that was never written."""
        self._pages.fill(0xFF)

    def run(self, batch: InputBatch) -> NDArray[np.float32]:
        """Execute one step. Returns logits [L, V], valid until the next run.

        Raises ValueError, before anything is computed, if a number of the batch is out of range.
        """
        self._native.run(
            batch.token_ids, batch.positions, batch.slots, batch.query_start, batch.context_len, batch.page_table,
            batch.logit_rows,
        )  # fmt: skip
        return self._logits[: len(batch.logit_rows)]

    def time_ops(self, on: bool) -> None:
        """Measure each op of the following steps (costs well under a per cent)."""
        self._native.set_timing(on)

    def op_times(self) -> dict[str, float]:
        """Seconds by op kind in the last timed step."""
        times: dict[str, float] = {}
        for kind, nanoseconds in self._native.timings():
            times[kind] = times.get(kind, 0.0) + nanoseconds * 1e-9
        return times

    def view(self, buffer: Buffer) -> NDArray[np.float32]:
        """All rows of a buffer. Buffers share memory, so this is for the logits and for tests of single ops."""
        offset = self._arena_plan.buffers[buffer]
        view: NDArray[np.float32] = self._arena.rows(
            offset, self._rows[buffer.rows], buffer.width, row_floats(buffer.width)
        )
        return view

    # ------------------------------------------------------------------------------------------- sampling

    def sample_call(self, **columns: NDArray[Any]) -> SampleCall:
        """Make a draw for columns [R]: temperature, top_p, min_p float32, top_k int32, uniform float64, num_top int32.

        It runs on this executor's threads and instruction set. See `runner.draw` for the meaning.
        """
        return SampleCall(pool=self._pool, isa=self._isa, **columns)

    # ------------------------------------------------------------------------------------------- building

    def _row_formats(self, op: Linear, paired: bool) -> int:
        """Plan the op's weight; the bits of the forms in which its input rows are wanted."""
        return int(library.row_formats(self._isa, self._weights.formats(op, paired)))

    def _make_partials(self) -> Any:
        pages = self._pages_tuple(0, 0)
        if any(isinstance(op, (KvWrite, Attention)) for op in self._program.ops):
            self._page_bytes = int(self._native.kv_page_bytes(pages))
        attentions = [op for op in self._program.ops if isinstance(op, Attention)]
        if not attentions:
            return None
        needs = [self._native.attention_partials_bytes(pages, op.num_heads, op.scale, op.window) for op in attentions]
        return library.Block(max(needs)) if max(needs) else None

    def _limit(self) -> None:
        ops = self._program.ops
        tables = [op.table for op in ops if isinstance(op, Rope)]
        vocab = min((op.table.rows for op in ops if isinstance(op, Embed)), default=_MAX_INT32)
        positions = min((len(table.cos) for table in tables), default=_MAX_INT32)
        pageless = not any(isinstance(op, (KvWrite, Attention)) for op in ops)
        num_pages = _MAX_INT32 // self._page[0] if pageless else 0
        self._native.set_limits(self._rows["tokens"], self._rows["logits"], vocab, positions, num_pages, self._page[0])

    def _pages_tuple(self, layer: int, page_bytes: int) -> tuple[int, ...]:
        kv = self._program.kv
        return (layer, page_bytes, kv.num_kv_heads, kv.head_dim, *self._page)

    def _mat(self, what: Buffer | View) -> tuple[int, int, int]:
        """(address, floats from row to row, width)."""
        buffer = what if isinstance(what, Buffer) else what.buffer
        start, width = (0, buffer.width) if isinstance(what, Buffer) else (what.start, what.width)
        if start < 0 or start + width > buffer.width:
            raise ModelError(f"a view of {buffer.name} takes columns {start} to {start + width} of {buffer.width}")
        address = self._arena.address + self._arena_plan.buffers[buffer] + 4 * start
        return address, row_floats(buffer.width), width

    def _vector(self, vector: Vector, length: int, what: str) -> int:
        """Address of a float32 vector, which is kept alive."""
        if vector.size != length:
            raise ModelError(f"{what} has {vector.size} numbers, {length} are needed")
        kept = np.ascontiguousarray(vector, dtype=np.float32)
        self._keep.append(kept)
        return int(kept.ctypes.data)

    def _emit(self, op: Lowered) -> None:
        native = self._native
        match op:
            case Join():
                native.join_last(op.count, JOIN_MAX_ROWS)
            case Prepare():
                self._emit_prepare(op.group)
            case Product():
                self._emit_product(op)
            case Embed():
                self._emit_embed(op)
            case RmsNorm():
                check_widths("RmsNorm", op.x.width, op.out.width)
                weight = self._vector(op.weight, op.x.width, "an RmsNorm weight")
                native.add_rms_norm(self._mat(op.x), self._mat(op.out), weight, op.eps, _space(op.x))
            case HeadNorm():
                head_dim = op.x.width // op.num_heads
                check_widths("HeadNorm", op.x.width, op.num_heads * head_dim)
                weight = self._vector(op.weight, head_dim, "a HeadNorm weight")
                native.add_head_norm(self._mat(op.x), op.num_heads, head_dim, weight, op.eps)
            case Rope():
                self._emit_rope(op)
            case KvWrite():
                for part in (op.key, op.value):
                    check_widths("KvWrite", part.width, self._program.kv.num_kv_heads * self._program.kv.head_dim)
                pages = self._pages_tuple(self._layer(op.layer), self._page_bytes)
                native.add_kv_write(self._mat(op.key), self._mat(op.value), pages)
            case Attention():
                self._emit_attention(op)
            case ActMul():
                check_widths("ActMul", op.x.width, 2 * op.out.width)
                native.add_act_mul(self._mat(op.x), self._mat(op.out), _ACTS[op.act])
            case Add():
                check_widths("Add", op.x.width, op.y.width)
                native.add_add(self._mat(op.x), self._mat(op.y), _space(op.x))
            case Gather():
                check_widths("Gather", op.x.width, op.out.width)
                native.add_gather(self._mat(op.x), self._mat(op.out))

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self._program.kv.num_layers:
            raise ModelError(f"layer {layer} has no pages; the model has {self._program.kv.num_layers} layers")
        return layer

    def _emit_rope(self, op: Rope) -> None:
        head_dim = op.x.width // op.num_heads
        half = op.table.cos.shape[1]
        check_widths("Rope", op.x.width, op.num_heads * head_dim)
        if op.table.sin.shape != op.table.cos.shape or 2 * half > head_dim:
            raise ModelError(f"a rope table turns {2 * half} dims of heads that have {head_dim}")
        cos, sin = (self._vector(part, op.table.cos.size, "a rope table") for part in (op.table.cos, op.table.sin))
        adjacent = op.table.style == "adjacent"
        self._native.add_rope(self._mat(op.x), op.num_heads, head_dim, 2 * half, cos, sin, adjacent)

    def _emit_attention(self, op: Attention) -> None:
        kv = self._program.kv
        check_widths("Attention", op.query.width, op.num_heads * kv.head_dim)
        check_widths("Attention", op.out.width, op.query.width)
        pages = self._pages_tuple(self._layer(op.layer), self._page_bytes)
        self._native.add_attention(
            self._mat(op.query), self._mat(op.out), pages, op.num_heads, op.scale, op.window,
            self._rows["tokens"], self._rows["tokens"], self._partials,
        )  # fmt: skip

    def _emit_embed(self, op: Embed) -> None:
        piece = op.table.pieces[0]
        check_piece(piece)
        check_widths("Embed", piece.columns, op.out.width)
        self._keep.append(piece.data)
        self._native.add_embed(
            piece.data.ctypes.data, TENSOR_TYPES[piece.type], piece.rows, piece.columns, op.scale, self._mat(op.out)
        )

    def _norm(self, group: RowGroup) -> tuple[int, float]:
        if group.norm is None:
            return 0, 0.0
        return self._vector(group.norm.weight, group.x.width, "an RmsNorm weight"), group.norm.eps

    def _prepared(self, group: RowGroup) -> int:
        """Address of the group's prepared rows; 0: the product reads float32 rows as they are."""
        offset = self._arena_plan.prepared.get(id(group))
        return 0 if offset is None else int(self._arena.address) + offset

    def _emit_prepare(self, group: RowGroup) -> None:
        if prepared := self._prepared(group):
            self._native.add_prepare(
                self._mat(group.x), _space(group.x), self._norm(group), group.x.width, group.formats, prepared
            )

    def _emit_product(self, product: Product) -> None:
        op, group = product.op, product.group
        weight = self._weights.packed(op)
        check_widths("Linear", op.weight.columns, group.x.width)
        check_widths("Linear", weight.num_columns, product.out.width)
        epilogue = _EPILOGUE_ACT[product.act.act] if product.act else int(op.add)
        bias = 0 if op.bias is None else self._vector(op.bias, op.weight.rows, "a bias")
        self._native.add_linear(
            weight, self._mat(group.x), _space(group.x), self._norm(group), group.formats, self._prepared(group),
            self._mat(product.out), epilogue, bias,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------- checks


def _check_choice(what: str, value: str, known: Any) -> None:
    if value not in known:
        raise ModelError(f"{what} {value!r} is not known to the native executor; choose one of {', '.join(known)}")


def _space(buffer: Buffer) -> int:
    return 0 if buffer.rows == "tokens" else 1


def _prepared_bytes(group: RowGroup) -> int:
    if group.norm is None and group.formats == _ONLY_FLOAT32:
        return 0
    return int(library.prepared_bytes(group.x.width, group.formats))
