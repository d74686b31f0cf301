"""Packs a program's weights into panels at load, straight from the file's map. Called by `native` only.

A map's pages are given back to the system as soon as they are packed, so the process never holds a model twice.
"""

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sayfa.base.errors import ModelError
from sayfa.base.gguf import BLOCK_SIZES
from sayfa.nn.program.native_library import library
from sayfa.nn.program.program import Linear, Weight, WeightPiece

# Numbers shared with csrc/types.h.
TENSOR_TYPES = {
    name: number
    for number, name in enumerate(
        ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
    )
}
FLOAT_PANELS = {"auto": -1, "bfloat16": 7, "float32": 8}


class PackedWeights:
    """The packed weights of a program: planned while it is lowered, then packed into one block."""

    def __init__(self, floats: int) -> None:
        self._floats = floats
        self._planned: dict[int, tuple[Weight, Any]] = {}
        self._by_op: dict[int, Any] = {}
        self.num_bytes = 0

    def can_pair(self, weight: Weight) -> bool:
        """Whether the weight is two pieces (gate, up) whose panels may alternate."""
        if len(weight.pieces) != 2:
            return False
        return bool(library.can_pair(*(_piece_tuple(piece) for piece in weight.pieces), self._floats))

    def formats(self, op: Linear, paired: bool) -> int:
        """Plan the op's weight; the bits of its panel formats."""
        key = id(op.weight) * 2 + paired
        if key not in self._planned:
            for piece in op.weight.pieces:
                check_piece(piece)
                check_widths("Linear", piece.columns, op.weight.columns)
            tuples = [_piece_tuple(piece) for piece in op.weight.pieces]
            self._planned[key] = (op.weight, library.Weight(tuples, op.weight.columns, self._floats, paired))
        self._by_op[id(op)] = self._planned[key][1]
        return int(self._planned[key][1].formats)

    def packed(self, op: Linear) -> Any:
        """The packed weight of an op."""
        return self._by_op[id(op)]

    def pack(self, pool: Any, isa: str) -> None:
        """Pack all planned weights into one block, giving each file part back to the system when it has been read."""
        self.num_bytes = sum(int(packed.bytes) for _, packed in self._planned.values())
        block = library.Block(self.num_bytes)
        offset = 0
        for weight, packed in self._planned.values():
            packed.pack(pool, isa, block, offset)
            offset += int(packed.bytes)
            for piece in weight.pieces:
                _give_back(piece.data)


def check_widths(what: str, given: int, needed: int) -> None:
    """Raise ModelError unless both counts of columns agree."""
    if given != needed:
        raise ModelError(f"{what}: {given} columns meet {needed}")


def check_piece(piece: WeightPiece) -> None:
    """Raise ModelError unless the piece has as many bytes as its shape and type need."""
    values, num_bytes = BLOCK_SIZES[piece.type]
    needed = piece.rows * piece.columns // values * num_bytes
    if piece.columns % values:
        raise ModelError(f"{piece.name}: {piece.columns} columns are no whole number of {piece.type} blocks")
    data = piece.data
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous or data.size != needed:
        shape = f"{piece.rows} x {piece.columns} {piece.type}"
        raise ModelError(f"{piece.name}: {data.size} bytes are given, but {shape} need {needed}")


def _piece_tuple(piece: WeightPiece) -> tuple[int, int, int]:
    return int(piece.data.ctypes.data), TENSOR_TYPES[piece.type], piece.rows


def _owners(data: Any) -> Iterator[Any]:
    while data is not None:
        yield data
        data = data.obj if isinstance(data, memoryview) else getattr(data, "base", None)


def _give_back(data: NDArray[np.uint8]) -> None:
    """Tell the system that the mapped pages under `data` are not needed now; the file still has them.

    Only for arrays that look into a file's map: dropping other memory would lose it.
    """
    mapped = next((owner for owner in _owners(data) if isinstance(owner, mmap.mmap)), None)
    if mapped is None or not hasattr(mapped, "madvise"):
        return
    start = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + data.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_DONTNEED, first, length)
