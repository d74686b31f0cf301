"""The table of model families, and the two verbs on a checkpoint: describe it as a program, and identify its content.

A family is one file with `build(config, weights, num_positions) -> Program`; others may add theirs under the entry-
point group `sayfa.models`.
"""

import hashlib
from pathlib import Path

import msgspec

from sayfa.base.errors import ConfigError, ModelError
from sayfa.base.model_config import ModelConfig
from sayfa.base.registry import Registry
from sayfa.models.formats.source import TensorSource
from sayfa.models.weights import Weights
from sayfa.nn.program.program import Program

MODELS = Registry(
    "sayfa.models",
    {
        "gemma3": "sayfa.models.gemma:build",
        "llama": "sayfa.models.llama:build",
        "mistral": "sayfa.models.llama:build",
        "qwen2": "sayfa.models.qwen:build",
        "qwen3": "sayfa.models.qwen:build",
    },
)

_SAMPLE_BYTES = 4096


def load_program(
    path: str | Path, config: ModelConfig, source: TensorSource, *, num_positions: int | None = None
) -> Program:
    """Describe the checkpoint as a program whose weights are views of `source`.

    num_positions: longest context that will be served (the size of the rotary tables); the model's own maximum if None.
    Raises ModelError if tensors are missing, left over, or of another shape than the facts say.
    """
    try:
        build = MODELS.get(config.architecture)
    except ConfigError as error:
        raise ModelError(f"{Path(path).name}: {error}") from error
    weights = Weights(source, config)
    program: Program = build(config, weights, min(num_positions or config.max_context, config.max_context))
    weights.check_all_read()
    return program


def content_digest(source: TensorSource, config: ModelConfig) -> str:
    """Identify a checkpoint by content, in hex: the facts, each tensor's name, shape, type and size, and samples of its
    bytes.

    The first, middle and last 4 KiB of each tensor are hashed, not all of it: gigabytes would delay every start by
    seconds. Two checkpoints that differ only between the samples of every tensor would be taken for one; training or
    quantizing anew changes bytes everywhere, so this does not happen by itself.
    """
    digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(config, digest="", name="")))
    for name in sorted(source.names()):
        shape, kind = source.info(name)
        data = source.read(name)
        digest.update(msgspec.json.encode([name, shape, kind, data.nbytes]))
        middle = max(0, data.nbytes // 2 - _SAMPLE_BYTES // 2)
        for start in (0, middle, max(0, data.nbytes - _SAMPLE_BYTES)):
            digest.update(data[start : start + _SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
