"""Facts read from a checkpoint, not choices. Filled by `models.config` from config.json or GGUF keys.

Used by models, runner, engine and sizing. All ranges are checked when the record is made (`check`), before anything is
built from it.
"""

from typing import Literal

import msgspec

from sayfa.base.errors import ModelError


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base, how many of the head's dims turn, pairing style, and the scaling rule.

    style: "half" pairs dim i with i + d/2 (Hugging Face); "adjacent" pairs 2i with 2i + 1 (Llama-family GGUF files).
    scaling: "none", "linear" (factor) or "llama3" (factor, low_freq_factor, high_freq_factor, original_context).
    frequencies: per-pair divisors that a GGUF file may carry in place of "llama3" (rope_freqs.weight), or None.
    """

    theta: float = 10000.0
    rotary_dim: int
    style: Literal["half", "adjacent"] = "half"
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    frequencies: list[float] | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only language model.

    architecture: our registry name ("llama", "mistral", "qwen2", "qwen3", "gemma3").
    windows: sliding window per layer in tokens, 0 = full attention; len == num_layers.
    ropes: rotary settings by use; `rope_of_layer[i]` is an index into it.
    attention_scale: factor on q·k (1/sqrt(head_dim) unless the model says otherwise).
    digest: content identity of the weights (hex), part of every page's hash.
    """

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tie_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_plus_one: bool = False
    """Gemma in Hugging Face form: norm weights are stored minus one."""
    embedding_scale: float = 1.0
    attention_scale: float
    windows: list[int]
    ropes: list[RopeConfig]
    rope_of_layer: list[int]
    digest: str = ""

    def check(self) -> None:
        """Raise ModelError naming the first fact that is out of range or does not fit the others."""
        for field, low, high in _RANGES:
            value = getattr(self, field)
            if not low <= value <= high:
                raise ModelError(f"{self.name}: {field} is {value}; it must lie in [{low}, {high}]")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.name}: num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if len(self.windows) != self.num_layers or len(self.rope_of_layer) != self.num_layers:
            raise ModelError(
                f"{self.name}: windows and rope_of_layer need one entry for each of {self.num_layers} layers"
            )
        for rope in self.ropes:
            if rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= self.head_dim:
                raise ModelError(f"{self.name}: rotary_dim {rope.rotary_dim} must be even and at most {self.head_dim}")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("vocab_size", 1, 4_000_000),
    ("hidden_size", 1, 65_536),
    ("intermediate_size", 1, 1_048_576),
    ("num_layers", 1, 1_024),
    ("num_heads", 1, 1_024),
    ("num_kv_heads", 1, 1_024),
    ("head_dim", 2, 1_024),
    ("max_context", 2, 100_000_000),
    ("norm_eps", 0.0, 1.0),
    ("attention_scale", 1e-6, 100.0),
)
