"""Reads a JSON file of a model folder within bounds. Called by the model loader and by `text`; knows no keys.

A model's files come from strangers: the size is checked before reading, the depth after parsing, and what comes back is
an object or an error that names the file.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from sayfa.base.errors import ModelError
from sayfa.base.faults import fault

MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 64


def read_json_object(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object; raise ModelError if the file is absent, too large, too deep, damaged or no object."""
    name = Path(path).name
    try:
        fault("load.json")
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{name}: cannot be read ({error.strerror}).") from None
    return parse_json_object(data, name, max_bytes)


def parse_json_object(data: bytes, name: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parse the bytes of a JSON object; raises as `read_json_object` does."""
    if len(data) > max_bytes:
        raise ModelError(f"{name}: has more than {max_bytes} bytes, which no such file needs.")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise ModelError(f"{name}: is nested deeper than {MAX_JSON_DEPTH} levels.") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ModelError(f"{name}: is not valid JSON.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{name}: holds no JSON object.")
    if json_depth(value) > MAX_JSON_DEPTH:
        raise ModelError(f"{name}: is nested deeper than {MAX_JSON_DEPTH} levels.")
    return value


def json_depth(value: Any) -> int:
    """Count the levels of lists and objects, without recursion."""
    level, depth = [value], 0
    while level := [child for child in level if isinstance(child, (dict, list, tuple))]:
        depth += 1
        level = [grand for child in level for grand in (child.values() if isinstance(child, dict) else child)]
    return depth
