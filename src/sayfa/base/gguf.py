"""Reads the header of a GGUF file: metadata and the table of tensors, each number checked before it is believed.

Called by the model loader (weights) and by `text.tokenizer` (vocabulary, chat template). Standard library only, so the
API process can use it. It must not know what a key means to a model, nor how a block is dequantized.

The file is a stranger's: each count, length and offset is compared with the bytes that are left, in Python integers,
before anything is allocated or walked. Strings and arrays of the metadata are only walked over; an array becomes a
`GgufArray` that decodes itself when it is asked, so the engine process never pays for a vocabulary it does not use.

    magic "GGUF" | version u32 | tensors u64 | keys u64 | key, type, value … | name, dims, type, offset … | pad | data

Source: the GGUF specification, versions 2 and 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import math
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from sayfa.base.errors import WeightFileError
from sayfa.base.faults import fault
from sayfa.base.mapped_file import MappedFile, check_disjoint

# Type name -> (values in a block, bytes of a block). The only types that the reader lets pass.
BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip

# The numbers that stand for types in a file. Those without a block size above are known only to be refused by name.
_TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 1_024
MAX_STRING_BYTES = 1 << 20
MAX_ARRAY_ITEMS = 4_000_000
# Walking an array of strings costs about 0.1 us an item; this bounds the walk over a whole file to about a second.
MAX_ARRAY_ITEMS_IN_FILE = 8_000_000
MAX_DIM = 1 << 40
DEFAULT_ALIGNMENT = 32

_BOOL = 7
_STRING = 8
_ARRAY = 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<B"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GgufTensor(NamedTuple):
    """One tensor's place. `shape` has rows first (ggml's dimensions reversed); `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class GgufArray:
    """A metadata array that was walked but not decoded. Values are scalars, or strings; `len()` is free."""

    def __init__(self, reader: "_Reader", field: str, item_type: int, span: tuple[int, int, int]) -> None:
        self._reader = reader
        self._field = field
        self._item_type = item_type
        self._count, self._start, self._end = span

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"GgufArray({self._field}, {self._count} items)"

    def to_list(self) -> list[Any]:
        """Decode all items. Raises WeightFileError on a string that is no UTF-8 and on a bool other than 0 and 1."""
        data = bytes(self._reader.view[self._start : self._end])
        if self._item_type != _STRING:
            values = list(struct.unpack(f"<{self._count}{_SCALARS[self._item_type].format[-1]}", data))
            if self._item_type == _BOOL:
                return [self._reader.bool_of(value, self._field) for value in values]
            return values
        out, pos, length_at = [], 0, _U64.unpack_from
        try:
            for _ in range(self._count):
                end = pos + 8 + length_at(data, pos)[0]
                out.append(data[pos + 8 : end].decode())
                pos = end
        except UnicodeDecodeError:
            raise self._reader.error(self._field, f"item {len(out)} is not valid UTF-8") from None
        return out


class GgufFile:
    """An open GGUF file: metadata, and tensors by name. `mmap` shows the whole file, read-only."""

    def __init__(self, file: MappedFile, metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> None:
        self.name = file.name
        self.metadata = metadata
        self.tensors = tensors
        self.mmap = file.view
        self._file = file

    def strings(self, key: str) -> list[str]:
        """Decode the array of strings under `key`; raises WeightFileError when it is absent or something else."""
        return self._list(key, str)

    def numbers(self, key: str) -> list[Any]:
        """Decode the array of numbers under `key`; raises WeightFileError when it is absent or something else."""
        return self._list(key, (int, float))

    def _list(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        value = self.metadata.get(key)
        if not isinstance(value, GgufArray):
            raise WeightFileError(self.name, key, "is missing" if value is None else "is not an array")
        items = value.to_list()
        if items and not isinstance(items[0], kind):
            raise WeightFileError(self.name, key, f"holds items of type {type(items[0]).__name__}")
        return items

    def data(self, tensor: GgufTensor) -> memoryview:
        """Give the raw bytes of a tensor, read-only and not copied."""
        return self._file.data(tensor.name, tensor.offset, tensor.num_bytes)

    def close(self) -> None:
        """Close the descriptor; views of the map stay good, `data` does not."""
        self._file.close()


class _Reader:
    """A position in the map, and the checks at each step forward."""

    def __init__(self, name: str, view: memoryview) -> None:
        self.name = name
        self.view = view
        self.size = len(view)
        self.pos = 0
        self.array_items = 0

    def error(self, field: str, problem: str) -> WeightFileError:
        return WeightFileError(self.name, field, problem)

    def need(self, num_bytes: int, field: str) -> int:
        """Move over `num_bytes` and give where they start; raise if they are not there."""
        start = self.pos
        if num_bytes > self.size - start:
            raise self.error(field, f"needs {num_bytes} bytes at {start}, but the file has {self.size - start} left")
        self.pos = start + num_bytes
        return start

    def u32(self, field: str) -> int:
        return int(_U32.unpack_from(self.view, self.need(4, field))[0])

    def u64(self, field: str) -> int:
        return int(_U64.unpack_from(self.view, self.need(8, field))[0])

    def count(self, field: str, limit: int, item_bytes: int) -> int:
        """Read a count of things that take at least `item_bytes` each; raise if they cannot all be in the file."""
        count = self.u64(field)
        if count > limit:
            raise self.error(field, f"is {count}, but at most {limit} are allowed")
        if count * item_bytes > self.size - self.pos:
            raise self.error(field, f"is {count}, which is more than fits into the {self.size - self.pos} bytes left")
        return count

    def string(self, field: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.u64(field)
        if length > limit:
            raise self.error(field, f"is a string of {length} bytes, but at most {limit} are allowed")
        start = self.need(length, field)
        try:
            return str(self.view[start : self.pos], "utf-8")
        except UnicodeDecodeError:
            raise self.error(field, "is not valid UTF-8") from None

    def bool_of(self, value: int, field: str) -> bool:
        if value > 1:
            raise self.error(field, f"is a bool with the value {value}; only 0 and 1 exist")
        return value == 1

    def value(self, field: str, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string(field)
        if type_id == _ARRAY:
            return self.array(field)
        scalar = _SCALARS.get(type_id)
        if scalar is None:
            raise self.error(field, f"has the unknown value type {type_id}")
        value = scalar.unpack_from(self.view, self.need(scalar.size, field))[0]
        return self.bool_of(value, field) if type_id == _BOOL else value

    def array(self, field: str) -> GgufArray:
        item_type = self.u32(field)
        if item_type != _STRING and item_type not in _SCALARS:
            kind = "arrays of arrays are not supported" if item_type == _ARRAY else f"unknown item type {item_type}"
            raise self.error(field, kind)
        item_bytes = 8 if item_type == _STRING else _SCALARS[item_type].size
        count = self.count(field, MAX_ARRAY_ITEMS, item_bytes)
        self.array_items += count
        if self.array_items > MAX_ARRAY_ITEMS_IN_FILE:
            raise self.error(field, f"the arrays of the file hold more than {MAX_ARRAY_ITEMS_IN_FILE} items together")
        start = self.pos
        if item_type == _STRING:
            self.walk_strings(field, count)
        else:
            self.need(count * item_bytes, field)
        return GgufArray(self, field, item_type, (count, start, self.pos))

    def walk_strings(self, field: str, count: int) -> None:
        """Move over `count` strings. The loop is bare because a vocabulary has up to millions of them."""
        view, pos, last = self.view, self.pos, self.size - 8
        length_at, limit = _U64.unpack_from, MAX_STRING_BYTES
        for index in range(count):
            if pos > last:
                raise self.error(field, f"item {index} of {count} begins past the end of the file")
            length = length_at(view, pos)[0]
            if length > limit:
                raise self.error(field, f"item {index} is a string of {length} bytes; at most {limit} are allowed")
            pos += 8 + length
        if pos > self.size:
            raise self.error(field, "its last item ends past the end of the file")
        self.pos = pos


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open, map and check a GGUF file. Raises WeightFileError naming the file (without its folder) and the field."""
    file = MappedFile(path, min_bytes=24)
    fault("load.header")
    reader = _Reader(file.name, file.view)
    num_tensors, num_keys = _read_start(reader)
    metadata = dict(_read_metadata(reader, num_keys))
    return GgufFile(file, metadata, _read_tensors(reader, num_tensors, _alignment(reader, metadata)))


def _read_start(reader: _Reader) -> tuple[int, int]:
    if bytes(reader.view[:4]) != b"GGUF":
        raise reader.error("magic", "is not 'GGUF'; this is no GGUF file")
    reader.pos = 4
    version = reader.u32("version")
    if version not in (2, 3):
        if version & 0xFFFF == 0:
            raise reader.error("version", "the file is big-endian; convert it to little-endian")
        raise reader.error("version", f"is {version}; versions 2 and 3 are supported, convert the model again")
    # A tensor's entry has at least 32 bytes, a key at least 14.
    num_tensors = reader.count("tensor_count", MAX_TENSORS, 32)
    return num_tensors, reader.count("metadata_kv_count", MAX_KEYS, 14)


def _read_metadata(reader: _Reader, num_keys: int) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for index in range(num_keys):
        key = reader.string(f"key {index}", MAX_NAME_BYTES)
        if not key:
            raise reader.error(f"key {index}", "is empty")
        if key in seen:
            raise reader.error(key, "appears twice")
        seen.add(key)
        yield key, reader.value(key, reader.u32(key))


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 65_536 or alignment & (alignment - 1):
        raise reader.error("general.alignment", f"is {alignment!r}, but must be a power of two within 8..65536")
    return alignment


def _read_tensors(reader: _Reader, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    entries = [_read_tensor(reader, index, alignment) for index in range(num_tensors)]
    start = -(-reader.pos // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        tensor = entry._replace(offset=start + entry.offset)
        if tensor.name in tensors:
            raise reader.error(tensor.name, "appears twice in the tensor table")
        if tensor.offset + tensor.num_bytes > reader.size:
            left = max(0, reader.size - tensor.offset)
            raise reader.error(tensor.name, f"needs {tensor.num_bytes} bytes, but {left} are left; the file is cut off")
        tensors[tensor.name] = tensor
    check_disjoint(((t.offset, t.offset + t.num_bytes, t.name) for t in tensors.values()), reader.error)
    _check_dense(reader, start, tensors, alignment)
    return tensors


def _check_dense(reader: _Reader, start: int, tensors: dict[str, GgufTensor], alignment: int) -> None:
    """Raise if bytes of the data belong to no tensor: a damaged type or shape would else give other weights in silence.

    Writers lay tensors end to end, padded to the alignment, and the format's own reader asks for the same.
    """
    end, before = start, "the tensor table"
    for tensor in sorted(tensors.values(), key=lambda item: item.offset):
        if tensor.offset - end >= alignment:
            raise reader.error(before, f"is followed by {tensor.offset - end} bytes that belong to no tensor")
        end, before = tensor.offset + tensor.num_bytes, tensor.name
    if tensors and reader.size - end >= alignment:
        raise reader.error(before, f"is the last tensor, but {reader.size - end} bytes follow; the file is damaged")


def _read_tensor(reader: _Reader, index: int, alignment: int) -> GgufTensor:
    name = reader.string(f"tensor {index}", MAX_NAME_BYTES)
    if not name:
        raise reader.error(f"tensor {index}", "has an empty name")
    num_dims = reader.u32(name)
    if not 1 <= num_dims <= 4:
        raise reader.error(name, f"has {num_dims} dimensions; 1 to 4 are possible")
    dims = [reader.u64(name) for _ in range(num_dims)]
    if not all(1 <= dim <= MAX_DIM for dim in dims):
        raise reader.error(name, f"has the shape {dims[::-1]}; each dimension lies in 1..2^40")
    type_name = _type_name(reader, name, reader.u32(name))
    block, block_bytes = BLOCK_SIZES[type_name]
    if dims[0] % block:
        raise reader.error(name, f"has rows of {dims[0]} values, but {type_name} stores them in blocks of {block}")
    num_bytes = math.prod(dims) // block * block_bytes
    if num_bytes > reader.size:
        raise reader.error(name, f"has the shape {dims[::-1]}, which is {num_bytes} bytes, more than the whole file")
    offset = reader.u64(name)
    if offset % alignment:
        raise reader.error(name, f"begins at {offset}, which is no multiple of the alignment {alignment}")
    return GgufTensor(name, tuple(reversed(dims)), type_name, offset, num_bytes)


def _type_name(reader: _Reader, tensor: str, type_id: int) -> str:
    type_name = _TYPE_NAMES.get(type_id, f"number {type_id}")
    if type_name not in BLOCK_SIZES:
        raise reader.error(tensor, f"has the type {type_name}, which is not supported; known: {', '.join(BLOCK_SIZES)}")
    return type_name
