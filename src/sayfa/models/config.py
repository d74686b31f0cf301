"""Where a model lies → its facts. Reads config.json of a folder or the metadata of a GGUF file; builds nothing.

Called by `engine.build` and `llm`. The two dialects stand in `config_hf` and `config_gguf`.
"""

from pathlib import Path

from sayfa.base.errors import ModelError
from sayfa.base.gguf import read_gguf
from sayfa.base.json_file import read_json_object
from sayfa.base.model_config import ModelConfig
from sayfa.models.config_gguf import config_from_gguf
from sayfa.models.config_hf import config_from_hf
from sayfa.models.facts import Facts

MAX_CONFIG_BYTES = 4 << 20


def read_config(path: str | Path) -> ModelConfig:
    """Read the facts of a .gguf file or of a folder in Hugging Face format.

    Raises ModelError naming the first fact that is missing, out of range, or of a kind that is not served.
    """
    place = Path(path)
    if place.is_dir():
        config = config_from_hf(Facts(place.name, read_json_object(place / "config.json", MAX_CONFIG_BYTES)))
    elif place.is_file() and place.suffix == ".gguf":
        config = config_from_gguf(read_gguf(place), place.stem)
    elif place.exists():
        raise ModelError(f"{place.name} is neither a .gguf file nor a folder in Hugging Face format")
    else:
        raise ModelError(f"there is no model at {place.name!r}")
    config.check()
    return config
