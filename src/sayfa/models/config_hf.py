"""config.json of a Hugging Face folder → ModelConfig. Called by `models.config` only.

Both spellings of the rope facts are read: `rope_theta` + `rope_scaling` (files before 2026) and `rope_parameters`.
Where a fact has two places, the one that transformers reads counts. What a file asks for and we do not serve, and what
it states where transformers does not read it, is refused by name; nothing is ignored that would change an answer.
"""

import math
from typing import Any, Literal

import numpy as np

from sayfa.base.model_config import ModelConfig, RopeConfig
from sayfa.models.facts import CONTEXT, COUNT, EPS, FACTOR, SIZE, THETA, WINDOW, Facts
from sayfa.models.formats.safetensors import WHOLE_NAME

_ARCHITECTURES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3",
    "gemma3": "gemma3", "gemma3_text": "gemma3",
}  # fmt: skip
_ROPE_TYPES = ("default", "linear", "llama3")
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# The text part of a larger Gemma 3 is stored as what differs from these.
_GEMMA_TEXT_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131_072,
}  # fmt: skip
# What transformers takes where a folder leaves out `sliding_window` or `max_window_layers`.
_WINDOW_LEFT_OUT, _FIRST_LEFT_OUT = 4096, 28
_LAYER_KINDS = ("full_attention", "sliding_attention")
_ORIGINAL = "original_max_position_embeddings"
_NOT_SERVED = "models of this kind are not served"


def config_from_hf(facts: Facts) -> ModelConfig:
    """Translate the facts. Raises ModelError."""
    model_type = facts.text("model_type")
    if model_type not in _ARCHITECTURES:
        raise facts.error("model_type", f"is {model_type!r}; known architectures: {', '.join(sorted(_ARCHITECTURES))}")
    architecture = _ARCHITECTURES[model_type]
    _check_purpose(facts)
    dtype = facts.raw("dtype") or facts.raw("torch_dtype")
    tie = facts.flag("tie_word_embeddings", architecture == "gemma3")  # of a larger model the outer flag counts
    _check_served(facts)
    facts.refuse_if("transformers_weights", f"only {WHOLE_NAME} or the files of its index are read; give that name")
    if model_type == "gemma3":
        if not facts.has("text_config"):
            raise facts.error("text_config", "is missing, but gemma3 needs it; text alone has the type gemma3_text")
        facts = facts.part("text_config").with_defaults(facts.model, _GEMMA_TEXT_DEFAULTS)
        _check_served(facts)
        dtype = dtype or facts.raw("dtype") or facts.raw("torch_dtype")
    num_heads = facts.integer("num_attention_heads", COUNT)
    hidden = facts.integer("hidden_size", SIZE)
    head_dim = facts.integer("head_dim", COUNT, hidden // num_heads)
    windows = _windows(facts, architecture)
    ropes, rope_of_layer = _ropes(facts, architecture, head_dim, windows)
    is_gemma = architecture == "gemma3"
    query_scalar = facts.number("query_pre_attn_scalar", (1e-3, 1e6), 256) if is_gemma else head_dim
    return ModelConfig(
        architecture=architecture,
        name=facts.model,
        vocab_size=facts.integer("vocab_size", (1, 4_000_000)),
        hidden_size=hidden,
        intermediate_size=facts.integer("intermediate_size", SIZE),
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=facts.integer("num_key_value_heads", COUNT, num_heads),
        head_dim=head_dim,
        max_context=facts.integer("max_position_embeddings", CONTEXT),
        norm_eps=facts.number("rms_norm_eps", EPS, 1e-6),
        activation=_activation(facts, is_gemma),
        tie_embeddings=tie,
        attention_bias=_attention_bias(facts, architecture),
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=is_gemma,
        norm_plus_one=is_gemma,
        embedding_scale=_embedding_scale(hidden, dtype) if is_gemma else 1.0,
        attention_scale=1.0 / math.sqrt(query_scalar),
        windows=windows,
        ropes=ropes,
        rope_of_layer=rope_of_layer,
    )


def _check_purpose(facts: Facts) -> None:
    """A classifier or an embedding model of a known family is still no language model."""
    names = facts.raw("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise facts.error("architectures", "must be a list of strings")
    if names and not any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in names):
        raise facts.error("architectures", f"is {names}; only language models (…ForCausalLM) are served")


def _check_served(facts: Facts) -> None:
    for field in ("quantization_config", "mlp_bias", "num_local_experts", "num_experts", "attn_logit_softcapping",
                  "final_logit_softcapping", "use_bidirectional_attention"):  # fmt: skip
        facts.refuse_if(field, _NOT_SERVED)
    if not facts.raw("is_causal") and (facts.has("is_causal") or facts.states_null("is_causal")):
        raise facts.error("is_causal", f"is {facts.raw('is_causal')}: {_NOT_SERVED}")


def _attention_bias(facts: Facts, architecture: str) -> bool:
    """Whether q, k and v have biases: always in Qwen 2 and never in Mistral, whatever the file states."""
    stated = facts.flag("attention_bias", False)
    if stated and architecture == "mistral":
        raise facts.error("attention_bias", f"is True, but {architecture} has no biases; remove the field")
    return stated or architecture == "qwen2"


def _activation(facts: Facts, is_gemma: bool) -> Literal["silu", "gelu_tanh"]:
    field, default = ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    name = facts.text(field, default)
    if is_gemma and not facts.has(field) and facts.text("hidden_act", name) != name:
        stated = facts.text("hidden_act")
        raise facts.error("hidden_act", f"is {stated!r}, but gemma3 reads `hidden_activation`; name it so or remove it")
    if name not in _ACTIVATIONS:
        raise facts.error(field, f"is {name!r}; known activations: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _embedding_scale(hidden: int, dtype: Any) -> float:
    """sqrt(H) in the precision of the checkpoint's own type: a bfloat16 model was trained with the rounded factor."""
    scale = np.float32(math.sqrt(hidden))
    if dtype == "bfloat16":
        bits = int(scale.view(np.uint32))
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to nearest, ties to even
        return float(np.uint32(rounded).view(np.float32))
    return float(scale)


def _windows(facts: Facts, architecture: str) -> list[int]:
    """Sliding window of each layer, 0 where a layer sees everything."""
    num_layers = facts.integer("num_hidden_layers", COUNT)
    kinds = facts.raw("layer_types")
    if architecture == "llama":
        if kinds is not None and kinds != ["full_attention"] * num_layers:
            raise facts.error("layer_types", "holds other than full_attention, but llama has none; remove the field")
        return [0] * num_layers
    window = _window(facts, architecture)
    if kinds is None:
        kinds = _default_kinds(facts, architecture, num_layers, window)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise facts.error("layer_types", f"must be a list with one entry for each of {num_layers} layers")
    unknown = [kind for kind in kinds if kind not in _LAYER_KINDS]
    if unknown:
        raise facts.error("layer_types", f"holds {unknown[0]!r}; known: full_attention, sliding_attention")
    if window == 0 and "sliding_attention" in kinds:
        off = "sliding_window is null" if facts.states_null("sliding_window") else "use_sliding_window is not true"
        raise facts.error("layer_types", f"holds 'sliding_attention', but {off}; give the window or full_attention")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _window(facts: Facts, architecture: str) -> int:
    """The window of the layers that slide, 0 for none: for transformers only null means that, not a key left out."""
    switched_off = architecture in ("qwen2", "qwen3") and not facts.flag("use_sliding_window", False)
    if switched_off or facts.states_null("sliding_window"):
        return 0
    return facts.integer("sliding_window", WINDOW, _WINDOW_LEFT_OUT)


def _default_kinds(facts: Facts, architecture: str, num_layers: int, window: int) -> list[str]:
    if architecture == "gemma3":
        period = facts.integer("sliding_window_pattern", COUNT, 6)
        unread = facts.integer("_sliding_window_pattern", COUNT, period)
        if unread != period and not facts.has("sliding_window_pattern"):
            problem = f"is {unread}, but transformers does not read it; name it `sliding_window_pattern` or remove it"
            raise facts.error("_sliding_window_pattern", problem)
        return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    if window == 0:
        return ["full_attention"] * num_layers
    first = 0 if architecture == "mistral" else facts.integer("max_window_layers", (0, 1_000_000), _FIRST_LEFT_OUT)
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]


def _ropes(facts: Facts, architecture: str, head_dim: int, windows: list[int]) -> tuple[list[RopeConfig], list[int]]:
    _refuse_partial(facts)
    if architecture != "gemma3":
        part = facts.part("rope_scaling" if facts.raw("rope_scaling") else "rope_parameters")
        for kind in _LAYER_KINDS:
            part.refuse_if(kind, "only gemma3 has a rope for each kind of layer; give one for all")
        theta = facts.number("rope_theta", THETA, 10_000.0)
        return [_rope(part, head_dim, theta, facts if facts.has(_ORIGINAL) else part)], [0] * len(windows)
    full, local = _gemma_ropes(facts)
    whole = _rope(full, head_dim, facts.number("rope_theta", THETA, 1_000_000.0), full)
    nearby = _rope(local, head_dim, facts.number("rope_local_base_freq", THETA, 10_000.0), local)
    return [whole, nearby], [1 if window else 0 for window in windows]


def _gemma_ropes(facts: Facts) -> tuple[Facts, Facts]:
    """Rope facts of full layers, over which those of the older `rope_scaling` lie, and of sliding layers."""
    new, scaling = facts.part("rope_parameters"), facts.part("rope_scaling")
    for field in new.stated():
        if field not in _LAYER_KINDS:
            raise new.error(field, "is not read for gemma3; put it into `full_attention` or `sliding_attention`")
    if scaling.has("type") and not scaling.has("rope_type"):
        raise scaling.error("type", f"is {scaling.text('type')!r}, but gemma3 reads `rope_type`; name it so")
    full = new.part("full_attention")
    if facts.has("rope_scaling"):
        full = scaling.with_defaults(scaling.model, full.stated())
    return full, new.part("sliding_attention")


def _rope(part: Facts, head_dim: int, theta: float, original_at: Facts) -> RopeConfig:
    """One rope from its part of the file; `theta` is the base that stands at the older place."""
    _refuse_partial(part)
    field = "rope_type" if part.has("rope_type") else "type"
    kind = part.text(field, "default")
    if kind not in _ROPE_TYPES:
        raise part.error(field, f"is {kind!r}; known rope scalings: {', '.join(_ROPE_TYPES)}")
    theta = part.number("rope_theta", THETA, theta)
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=head_dim)
    factor = part.number("factor", FACTOR)
    if kind == "linear":
        return RopeConfig(theta=theta, rotary_dim=head_dim, scaling="linear", factor=factor)
    low, high = part.number("low_freq_factor", FACTOR), part.number("high_freq_factor", FACTOR)
    if high < low:
        raise part.error("high_freq_factor", f"is {high}; it must not lie below low_freq_factor, which is {low}")
    return RopeConfig(
        theta=theta, rotary_dim=head_dim, scaling="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high,
        original_context=original_at.integer(_ORIGINAL, CONTEXT),
    )  # fmt: skip


def _refuse_partial(facts: Facts) -> None:
    """transformers leaves the fact unread in these families, or fails at it where the rope is scaled."""
    partial = facts.number("partial_rotary_factor", (0, 1), 1.0)
    if partial != 1:
        raise facts.error(
            "partial_rotary_factor", f"is {partial}, but models of this kind turn whole heads; remove the field"
        )
