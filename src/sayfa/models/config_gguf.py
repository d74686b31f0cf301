"""Metadata of a GGUF file → ModelConfig. Called by `models.config` only.

A GGUF file differs from a Hugging Face folder in four ways that matter here: Llama's q and k are stored for rotary
pairs of neighbours ("adjacent"), Gemma's norms already hold their plus one, a tied head is simply absent, and Llama 3's
rope scaling may come as a tensor of divisors.
"""

import logging
import math

import numpy as np

from sayfa.base.gguf import GgufArray, GgufFile
from sayfa.base.model_config import ModelConfig, RopeConfig
from sayfa.models.facts import CONTEXT, COUNT, EPS, FACTOR, SIZE, THETA, WINDOW, Facts

log = logging.getLogger(__name__)

_ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")
_ROPE_TYPES = ("none", "linear")
_GEMMA_PERIOD = 6
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = 62


def config_from_gguf(file: GgufFile, stem: str) -> ModelConfig:
    """Translate the metadata. Raises ModelError."""
    general = Facts(stem, file.metadata)
    architecture = general.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise general.error("general.architecture", f"is {architecture!r}; known architectures: {known}")
    facts = Facts(stem, file.metadata, architecture + ".")
    facts.refuse_if("expert_count", "mixtures of experts are not served")
    facts.refuse_if("attn_logit_softcapping", "soft caps are not served")
    facts.refuse_if("final_logit_softcapping", "soft caps are not served")
    if not facts.flag("attention.causal", True):
        raise facts.error("attention.causal", "is False: a model whose tokens see what follows them is not served")
    num_layers = facts.integer("block_count", COUNT)
    num_heads = _one_for_all(facts, "attention.head_count", None)
    hidden = facts.integer("embedding_length", SIZE)
    head_dim = facts.integer("attention.key_length", COUNT, hidden // num_heads)
    if facts.integer("attention.value_length", COUNT, head_dim) != head_dim:
        raise facts.error("attention.value_length", f"differs from key_length ({head_dim}); they must be equal")
    is_gemma = architecture == "gemma3"
    windows = _windows(facts, architecture, num_layers)
    ropes, rope_of_layer = _ropes(file, facts, architecture, head_dim, windows)
    query_scalar = hidden // num_heads if is_gemma and num_layers == _GEMMA_27B_LAYERS else head_dim
    return ModelConfig(
        architecture=architecture,
        name=general.text("general.name", stem),
        vocab_size=_vocab_size(file, facts),
        hidden_size=hidden,
        intermediate_size=_one_for_all(facts, "feed_forward_length", None),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_one_for_all(facts, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context=facts.integer("context_length", CONTEXT),
        norm_eps=facts.number("attention.layer_norm_rms_epsilon", EPS),
        activation="gelu_tanh" if is_gemma else "silu",
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        post_norms=is_gemma,
        norm_plus_one=False,
        embedding_scale=float(np.float32(math.sqrt(hidden))) if is_gemma else 1.0,
        attention_scale=facts.number("attention.scale", (1e-6, 100.0), 1.0 / math.sqrt(query_scalar)),
        windows=windows,
        ropes=ropes,
        rope_of_layer=rope_of_layer,
    )


def _vocab_size(file: GgufFile, facts: Facts) -> int:
    """Rows of the embedding: the vocabulary's own length may be shorter than the padded table, and is slow to read."""
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise facts.error("vocab_size", "cannot be known: the file has no matrix token_embd.weight")
    return table.shape[0]


def _one_for_all(facts: Facts, field: str, default: int | None) -> int:
    """A count that some files give once and some per layer; layers of different shape are refused."""
    value = facts.raw(field)
    if isinstance(value, GgufArray):
        items = set(value.to_list())
        if len(items) != 1:
            raise facts.error(field, f"differs between layers ({sorted(items)[:4]}); such models are not served")
        return Facts(facts.model, {field: items.pop()}).integer(field, SIZE)
    return facts.integer(field, SIZE) if default is None else facts.integer(field, SIZE, default)


def _windows(facts: Facts, architecture: str, num_layers: int) -> list[int]:
    """Sliding window of each layer, 0 where a layer sees everything.

    Only Gemma's is used. transformers and llama.cpp do not read the key for llama, qwen2 and qwen3, and the converters
    do not write it: a Mistral's file is a llama without a window there, also where its folder has one. (transformers
    makes a Mistral of a file whose name is just "mistral", but then takes q and k in the wrong order.)
    """
    field = "attention.sliding_window"
    if architecture != "gemma3":
        if facts.has(field) and facts.raw(field) != 0:
            log.warning(
                "%s: %s.%s is %d, but other readers of such files use no window, so none is used; with one, serve the "
                "folder that the file was made from", facts.model, architecture, field, facts.integer(field, WINDOW),
            )  # fmt: skip
        return [0] * num_layers
    window = facts.integer(field, WINDOW)
    pattern = facts.raw("attention.sliding_window_pattern")
    if isinstance(pattern, GgufArray):
        local = [bool(item) for item in pattern.to_list()]
        if len(local) != num_layers:
            raise facts.error("attention.sliding_window_pattern", f"has {len(local)} entries for {num_layers} layers")
    else:
        period = facts.integer("attention.sliding_window_pattern", COUNT, _GEMMA_PERIOD)
        local = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return [window if is_local else 0 for is_local in local]


def _ropes(
    file: GgufFile, facts: Facts, architecture: str, head_dim: int, windows: list[int]
) -> tuple[list[RopeConfig], list[int]]:
    kind = facts.text("rope.scaling.type", "linear")  # llama.cpp, too: a factor alone divides
    if kind not in _ROPE_TYPES:
        raise facts.error("rope.scaling.type", f"is {kind!r}; known rope scalings: {', '.join(_ROPE_TYPES)}")
    factor = facts.number("rope.scaling.factor", FACTOR, facts.number("rope.scale_linear", FACTOR, 1.0))
    rotary_dim = facts.integer("rope.dimension_count", COUNT, head_dim)
    main = RopeConfig(
        theta=facts.number("rope.freq_base", THETA, 10_000.0),
        rotary_dim=rotary_dim,
        style="adjacent" if architecture == "llama" else "half",
        scaling="linear" if kind == "linear" and factor != 1.0 else "none",
        factor=factor if kind == "linear" else 1.0,
        frequencies=_rope_divisors(file, facts, rotary_dim),
    )
    if architecture != "gemma3":
        return [main], [0] * len(windows)
    theta = facts.number("rope.freq_base_swa", THETA, _GEMMA_LOCAL_THETA)
    return [main, RopeConfig(theta=theta, rotary_dim=rotary_dim)], [1 if window else 0 for window in windows]


def _rope_divisors(file: GgufFile, facts: Facts, rotary_dim: int) -> list[float] | None:
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.type_name != "F32" or tensor.shape != (rotary_dim // 2,):
        raise facts.error("rope_freqs.weight", f"must be {rotary_dim // 2} numbers of type F32")
    divisors = np.frombuffer(file.data(tensor), np.float32)
    if not np.isfinite(divisors).all() or (divisors <= 0).any():
        raise facts.error("rope_freqs.weight", "holds divisors that are not positive numbers")
    return [float(divisor) for divisor in divisors]
