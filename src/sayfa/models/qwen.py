"""Qwen 2, 2.5 and 3: Llama's skeleton with two additions that the checkpoint's facts switch on.

Qwen 2 (2024) has biases on q, k and v (`attention_bias`); Qwen 3 (2025) has none and norms each head of q and k instead
(`qk_norm`). Both are read by `Weights.attention`; sliding windows, where a checkpoint uses them, stand in `windows`.
"""

from sayfa.base.errors import ModelError
from sayfa.base.model_config import ModelConfig
from sayfa.models import llama
from sayfa.models.weights import Weights
from sayfa.nn.program.program import Program


def build(config: ModelConfig, weights: Weights, num_positions: int) -> Program:
    """Describe the model. Raises ModelError if the facts lack what makes it a Qwen."""
    if config.architecture == "qwen3" and not config.qk_norm:
        raise ModelError(f"{config.name}: a qwen3 checkpoint must have norms on the heads of q and k")
    return llama.build(config, weights, num_positions)
