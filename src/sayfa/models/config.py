"""Where a model lies → its facts. Reads config.json of a folder or the metadata of a GGUF file; builds nothing.

Called by `engine.build` and `llm`. The two dialects stand in `config_hf` and `config_gguf`.
"""

import json
from pathlib import Path
from typing import Any

from sayfa.base.errors import ModelError
from sayfa.base.gguf import read_gguf
from sayfa.base.model_config import ModelConfig
from sayfa.models.config_gguf import config_from_gguf
from sayfa.models.config_hf import config_from_hf
from sayfa.models.facts import Facts

MAX_CONFIG_BYTES = 4 << 20
MAX_JSON_DEPTH = 64


def read_config(path: str | Path) -> ModelConfig:
    """Read the facts of a .gguf file or of a folder in Hugging Face format.

    Raises ModelError naming the first fact that is missing, out of range, or of a kind that is not served.
    """
    place = Path(path)
    if place.is_dir():
        config = config_from_hf(Facts(place.name, read_json(place / "config.json")))
    elif place.is_file() and place.suffix == ".gguf":
        config = config_from_gguf(read_gguf(place), place.stem)
    elif place.exists():
        raise ModelError(f"{place.name} is neither a .gguf file nor a folder in Hugging Face format")
    else:
        raise ModelError(f"there is no model at {place.name!r}")
    config.check()
    return config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of bounded size and depth. Raises ModelError."""
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ModelError(f"{path.name} has {size} bytes; at most {MAX_CONFIG_BYTES} are read")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read from the model folder: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path.name} is not UTF-8 text") from error
    if _depth(text) > MAX_JSON_DEPTH:
        raise ModelError(f"{path.name} nests deeper than {MAX_JSON_DEPTH} levels")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} must hold a JSON object")
    return value


def _depth(text: str) -> int:
    """Deepest nesting of brackets outside strings; counted before parsing, because the parser recurses."""
    deepest = depth = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest
