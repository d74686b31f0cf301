"""The tensors of safetensors files as a `TensorSource`, each header checked before it is believed.

Called by `formats.source`. Reads one file, or the shards that an index names; must not know models.

    header length u64 | header: JSON {name: {dtype, shape, data_offsets: [start, end]}} | data, without holes

Source: https://github.com/huggingface/safetensors (format); its own checks are made here, and the bounds of our own.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from sayfa.base.errors import ModelError, WeightFileError
from sayfa.base.faults import fault
from sayfa.base.json_file import json_depth, read_json_object
from sayfa.base.mapped_file import MappedFile
from sayfa.base.quoting import quoted

MAX_HEADER_BYTES = 100 << 20
MAX_HEADER_DEPTH = 8
MAX_TENSORS = 65_536
MAX_NAME_CHARS = 1_024
MAX_DIMS = 8
MAX_DIM = 1 << 40
WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class _Tensor(NamedTuple):
    file: MappedFile
    type_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsSource:
    """One or several open safetensors files that belong together."""

    def __init__(self, paths: list[Path]) -> None:
        self._tensors: dict[str, _Tensor] = {}
        for path in paths:
            for name, tensor in _read_header(path).items():
                if name in self._tensors:
                    other = self._tensors[name].file.name
                    raise WeightFileError(path.name, name, f"is in {other} too; take the file that is left over away")
                self._tensors[name] = tensor

    def names(self) -> list[str]:
        return list(self._tensors)

    def info(self, name: str) -> tuple[tuple[int, ...], str]:
        tensor = self._tensors[name]
        return tensor.shape, tensor.type_name

    def read(self, name: str) -> NDArray[np.uint8]:
        tensor = self._tensors[name]
        return np.frombuffer(tensor.file.data(name, tensor.start, tensor.num_bytes), np.uint8)

    def file_of(self, name: str) -> str:
        """Name the file that holds a tensor."""
        return self._tensors[name].file.name


def open_sharded(folder: Path, check: Callable[[Path], None]) -> SafetensorsSource:
    """Open the files that the folder's index names, each after `check` of its path.

    Raises ModelError for names that lead elsewhere, and what `check` raises.
    """
    weight_map = read_json_object(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX_NAME}: has no `weight_map`; the index is damaged.")
    files: dict[str, Path] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{INDEX_NAME}: {quoted(tensor, 100)} lies in {quoted(file, 100)}, which is no file name of this "
                "folder."
            )
        if file not in files:
            files[file] = folder / file
    for path in files.values():
        check(path)
    source = SafetensorsSource([files[name] for name in sorted(files)])
    known = set(source.names())
    for tensor, file in weight_map.items():
        if tensor not in known or source.file_of(tensor) != file:
            raise ModelError(
                f"{file}: lacks the tensor {quoted(tensor, 100)} that {INDEX_NAME} promises; is the folder complete?"
            )
    return source


def _read_header(path: Path) -> dict[str, _Tensor]:
    file = MappedFile(path, min_bytes=8)
    fault("load.safetensors_header")
    length = int.from_bytes(file.view[:8], "little")
    if length > MAX_HEADER_BYTES or length > file.size - 8:
        raise WeightFileError(file.name, "header length", f"is {length}, but {file.size - 8} bytes follow")
    header = _parse(file, bytes(file.view[8 : 8 + length]))
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise WeightFileError(file.name, "header", f"lists {len(header)} tensors; at most {MAX_TENSORS} are allowed")
    tensors = {name: _read_entry(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start != end:
            raise WeightFileError(file.name, name, "overlaps its neighbour, or leaves a hole before it")
        end += tensor.num_bytes
    if end != file.size:
        raise WeightFileError(file.name, "data", f"ends at {end}, but the file has {file.size} bytes")
    return tensors


def _parse(file: MappedFile, data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise WeightFileError(file.name, "header", "has the same name twice")
        return made

    try:
        header = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise WeightFileError(file.name, "header", "is not valid JSON") from None
    if not isinstance(header, dict) or json_depth(header) > MAX_HEADER_DEPTH:
        raise WeightFileError(file.name, "header", "is no JSON object, or nested too deep")
    return header


def _read_entry(file: MappedFile, name: str, entry: Any, data_start: int) -> _Tensor:
    def wrong(problem: str) -> WeightFileError:
        return WeightFileError(file.name, f"{name:.100}", problem)

    if not name or len(name) > MAX_NAME_CHARS:
        raise wrong(f"has a name of {len(name)} characters; 1 to {MAX_NAME_CHARS} are possible")
    if not isinstance(entry, dict):
        raise wrong("has an entry that is no object")
    type_name, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    item_bytes = _ITEM_BYTES.get(type_name) if isinstance(type_name, str) else None
    if item_bytes is None:
        raise wrong(f"has the type {quoted(type_name, 60)}, which is not supported; known: {', '.join(_ITEM_BYTES)}")
    if not _are_counts(shape, MAX_DIM) or len(shape) > MAX_DIMS or 0 in shape:
        raise wrong(f"has the shape {quoted(shape, 100)}; up to {MAX_DIMS} dimensions of 1..2^40 are possible")
    if not _are_counts(offsets, file.size - data_start) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"has the offsets {quoted(offsets, 100)}, which are not inside the file")
    start, end = offsets
    if math.prod(shape) * item_bytes != end - start:
        raise wrong(
            f"has {end - start} bytes, but its shape {shape} of {type_name} needs {math.prod(shape) * item_bytes}"
        )
    return _Tensor(file, str(type_name), tuple(shape), data_start + start, end - start)


def _are_counts(value: Any, limit: int) -> TypeGuard[list[int]]:
    """Tell whether this is a list of whole numbers within 0..limit (a bool is no number here)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= limit for item in value)
