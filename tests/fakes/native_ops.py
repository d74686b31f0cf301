"""Calls single native ops on numpy arrays, for tests and benchmarks: one op, one program, one step.

Matrices are copied to rows that start at 64-byte borders, as the executor lays them out.
"""

import ctypes
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sayfa import _native

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2}


def aligned(num_rows: int, width: int, *, pad: float = np.nan) -> Floats:
    """Make a float32 view [num_rows, width] whose rows start at 64-byte borders; what lies between rows is `pad`."""
    stride = (width + 15) // 16 * 16
    raw = np.full(num_rows * stride + 16, pad, np.float32)
    start = (-raw.ctypes.data // 4) % 16
    return raw[start : start + num_rows * stride].reshape(num_rows, stride)[:, :width]


def matrix(values: NDArray[np.floating]) -> Floats:
    """Copy [rows, width] into aligned rows."""
    out = aligned(*values.shape)
    out[:] = values
    return out


def mat(view: Floats) -> tuple[int, int, int]:
    """Describe a matrix to the library: address, stride in floats, width."""
    return view.ctypes.data, view.strides[0] // 4 if len(view) else view.shape[1], view.shape[1]


def step(
    *,
    num_tokens: int = 0,
    positions: Ints | None = None,
    slots: Ints | None = None,
    query_start: Ints | None = None,
    context_len: Ints | None = None,
    page_table: Ints | None = None,
    logit_rows: Ints | None = None,
    page_size: int = 16,
) -> tuple[list[Ints], tuple[int, ...]]:
    """Gather the arrays of one step; what an op does not read may be left out. Returns arrays and sizes for `run`."""
    num_tokens = num_tokens or (0 if positions is None else len(positions))
    zeros = np.zeros(num_tokens, np.int32)
    table = np.zeros((1, 1), np.int32) if page_table is None else np.ascontiguousarray(page_table, np.int32)
    starts = np.array([0, num_tokens], np.int32) if query_start is None else query_start
    arrays = [
        zeros,
        zeros if positions is None else positions,
        zeros if slots is None else slots,
        starts,
        np.array([num_tokens], np.int32) if context_len is None else context_len,
        table,
        np.zeros(0, np.int32) if logit_rows is None else logit_rows,
    ]
    arrays = [np.ascontiguousarray(array, np.int32) for array in arrays]
    return arrays, (num_tokens, len(starts) - 1, table.shape[1], len(arrays[6]), page_size)


def run(program: _native.Program, arrays: list[Ints], sizes: tuple[int, ...]) -> None:
    """Run a program on one step."""
    program.run(*[array.ctypes.data for array in arrays], *sizes)


def program(isa: str = "", threads: int = 1) -> _native.Program:
    """Make an empty program on a pool of its own."""
    return _native.Program(_native.Pool(threads), isa)


COUNTER_INTS = 1024 * 16
"""The finish counters at the start of attention's partial results: a line of 64 bytes each."""


@dataclass
class Layer:
    """One layer's pages and the way its sequences use them. Pages are poisoned; each sequence's are in random order."""

    kv_heads: int
    head_dim: int
    page_size: int
    kv_type: str
    lengths: list[int]
    seed: int = 0
    pages: _native.Pages = field(init=False)
    tables: Ints = field(init=False)

    def __post_init__(self) -> None:
        per_sequence = [-(-length // self.page_size) for length in self.lengths]
        order = np.random.default_rng(self.seed).permutation(sum(per_sequence)) + 1
        self.tables = np.zeros((len(self.lengths), max(per_sequence, default=1)), np.int32)
        for s, count in enumerate(per_sequence):
            self.tables[s, :count], order = order[:count], order[count:]
        stride = program().kv_page_bytes(self.shape(0))
        self.pages = _native.Pages(1, sum(per_sequence) + 1, stride)
        self.page_bytes = stride
        self.poison()

    def poison(self) -> None:
        """Fill all pages with bytes that are NaN in every type (int8: the scales are)."""
        self.bytes()[:] = 0xFF

    def share(self, child: int, parent: int, num_tokens: int) -> None:
        """Let a sequence read the first whole pages of another, up to `num_tokens`."""
        pages = num_tokens // self.page_size
        self.tables[child, :pages] = self.tables[parent, :pages]

    def bytes(self) -> NDArray[np.uint8]:
        """All page bytes."""
        buffer = (ctypes.c_uint8 * self.pages.bytes).from_address(self.pages.address)
        return np.frombuffer(buffer, np.uint8)

    def shape(self, page_bytes: int | None = None) -> tuple[int, int, int, int, int, int]:
        """Describe the layer to the library."""
        stride = self.page_bytes if page_bytes is None else page_bytes
        return 0, stride, self.kv_heads, self.head_dim, self.page_size, KV_TYPES[self.kv_type]

    def slots(self, sequence: int, positions: Ints) -> Ints:
        """Where the tokens of a sequence go."""
        pages = self.tables[sequence, positions // self.page_size]
        return (pages * self.page_size + positions % self.page_size).astype(np.int32)


@dataclass
class Sequences:
    """Random queries, keys and values of some sequences, for all positions: [length, heads * head_dim] each."""

    query: list[Floats]
    key: list[Floats]
    value: list[Floats]

    @staticmethod
    def random(layer: Layer, num_heads: int, seed: int, *, peak: float = 1.0) -> "Sequences":
        """Draw normal numbers; `peak` multiplies the queries, so that softmax gets sharper."""
        rng = np.random.default_rng(seed)

        def draw(heads: int) -> list[Floats]:
            return [rng.standard_normal((n, heads * layer.head_dim)).astype(np.float32) for n in layer.lengths]

        query = [q * np.float32(peak) for q in draw(num_heads)]
        return Sequences(query, draw(layer.kv_heads), draw(layer.kv_heads))


class AttentionStep:
    """KvWrite then Attention of one layer, called with any mixture of chunks."""

    def __init__(
        self, layer: Layer, num_heads: int, *, isa: str = "", threads: int = 1, window: int = 0, split: bool = True
    ) -> None:
        self.layer, self.num_heads, self.window = layer, num_heads, window
        self.scale = layer.head_dim**-0.5
        self._isa = isa
        self._pool = _native.Pool(threads)
        self._partials = None if split else _native.Block(64)  # too small to split anything

    def __call__(self, data: Sequences, chunks: list[tuple[int, int, int]]) -> list[Floats]:
        """Run chunks (sequence, first position, end position) in one step; returns each chunk's output rows."""
        layer = self.layer
        query, key, value = (_rows(source, chunks) for source in (data.query, data.key, data.value))
        out = aligned(len(query), query.shape[1])
        calls = _native.Program(self._pool, self._isa)
        calls.add_kv_write(mat(key), mat(value), layer.shape())
        if self._partials is None:
            need = calls.attention_partials_bytes(layer.shape(), self.num_heads, self.scale, self.window)
            self._partials = _native.Block(max(need, 64))
        calls.add_attention(
            mat(query), mat(out), layer.shape(), self.num_heads, self.scale, self.window,
            max(1, len(query)), max(1, len(chunks)), self._partials,
        )  # fmt: skip
        calls.set_pages(layer.pages)
        arrays, sizes = self._step(chunks)
        run(calls, arrays, sizes)
        return [out[start:end].copy() for start, end in pairwise(arrays[3])]

    def write(self, data: Sequences, chunks: list[tuple[int, int, int]]) -> None:
        """Write keys and values of the chunks, without attending."""
        key, value = _rows(data.key, chunks), _rows(data.value, chunks)
        calls = _native.Program(self._pool, self._isa)
        calls.add_kv_write(mat(key), mat(value), self.layer.shape())
        calls.set_pages(self.layer.pages)
        run(calls, *self._step(chunks))

    def open_counters(self) -> int:
        """How many finish counters of split work are not back at zero."""
        block = self._partials
        if block is None or block.bytes <= 64:
            return 0
        return int(np.count_nonzero(self._partial_ints()[:COUNTER_INTS]))

    def notes_blocks(self) -> bool:
        """Whether results of single blocks were ever noted: of split or of shared work."""
        return bool(self._partial_ints()[COUNTER_INTS:].any())

    def _partial_ints(self) -> Ints:
        assert self._partials is not None
        ints = (ctypes.c_int32 * (self._partials.bytes // 4)).from_address(self._partials.address)
        return np.frombuffer(ints, np.int32)

    def _step(self, chunks: list[tuple[int, int, int]]) -> tuple[list[Ints], tuple[int, ...]]:
        layer, none = self.layer, np.zeros(0, np.int32)
        spans = [np.arange(first, end, dtype=np.int32) for _, first, end in chunks]
        slots = [layer.slots(chunk[0], span) for chunk, span in zip(chunks, spans, strict=True)]
        return step(
            positions=np.concatenate([none, *spans]),
            slots=np.concatenate([none, *slots]),
            query_start=np.cumsum([0] + [len(span) for span in spans]).astype(np.int32),
            context_len=np.array([end for _, _, end in chunks], np.int32),
            page_table=np.array([layer.tables[s] for s, _, _ in chunks], np.int32) if chunks else None,
            page_size=layer.page_size,
        )


def _rows(source: list[Floats], chunks: list[tuple[int, int, int]]) -> Floats:
    return matrix(np.concatenate([source[0][:0], *(source[s][first:end] for s, first, end in chunks)]))


def same_bits(got: Floats, want: Floats, what: str) -> None:
    """Fail unless the numbers have the same bits."""
    different = np.argwhere(got.view(np.uint32) != want.view(np.uint32))
    assert len(different) == 0, (
        f"{what}: {len(different)} numbers differ, first at row {different[0][0]}, column {different[0][1]}: "
        f"{got[tuple(different[0])]} and {want[tuple(different[0])]}"
    )
