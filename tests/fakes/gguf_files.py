"""Writes a Hugging Face folder's tiny model as a GGUF file, by the public rules of that conversion. Needs the `gguf`
package.

What the conversion changes: names; Llama's q and k rows are reordered for rotary pairs of neighbours; Gemma's norms get
their plus one; Llama 3's rope scaling becomes a tensor of divisors.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from sayfa.base.model_config import RopeConfig
from sayfa.nn.layers.rotary import inverse_frequencies

_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_PLAIN_NORM = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def convert(folder: Path, target: Path) -> Path:
    """Write `target` with float32 tensors from the folder's config.json and model.safetensors."""
    config = json.loads((folder / "config.json").read_text())
    kind = {"gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(target, kind)
    _write_facts(writer, config, kind)
    for name, value in load_file(folder / "model.safetensors").items():
        value = np.asarray(value, np.float32)
        if kind == "llama" and "q_proj" in name:
            value = _neighbours(value, config["num_attention_heads"])
        if kind == "llama" and "k_proj" in name:
            value = _neighbours(value, config["num_key_value_heads"])
        if kind == "gemma3" and "norm" in name:
            value = value + np.float32(1)
        writer.add_tensor(_name(name, kind), value)
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(rope, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _write_facts(writer: Any, config: dict[str, Any], kind: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))
    writer.add_value_length(config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"] if kind == "gemma3" else rope["rope_theta"])
    if kind == "gemma3":
        writer.add_sliding_window(config["sliding_window"])


def _name(name: str, kind: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }  # fmt: skip
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    stem, ending = rest.rsplit(".", 1)
    table = _LAYER | (_GEMMA_NORMS if kind == "gemma3" else _PLAIN_NORM)
    return f"blk.{layer}.{table[stem]}.{ending}"


def _neighbours(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder each head's rows from (i, i + d/2) pairs to (2i, 2i + 1) pairs."""
    split = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def _divisors(rope: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    scaled = RopeConfig(
        theta=rope["rope_theta"], rotary_dim=head_dim, scaling="llama3", factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"], high_freq_factor=rope["high_freq_factor"],
        original_context=rope["original_max_position_embeddings"],
    )  # fmt: skip
    plain = RopeConfig(theta=rope["rope_theta"], rotary_dim=head_dim)
    return inverse_frequencies(plain) / inverse_frequencies(scaled)
