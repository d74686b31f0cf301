"""Tiny models made in code: random ones of each family, and the successor model that emits a fixed table of tokens.

`make_tiny` uses transformers (the oracle of the laws); `make_successor` only numpy and safetensors, in well under a
second. Both write a folder in Hugging Face format with a tokenizer.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, USER, END = "<|begin|>", "<|end|>", "<|user|>", "<|turn_end|>"
SPECIALS = [BOS, EOS, USER, END]
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}<|turn_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)
FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma3")

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def make_tiny(family: str, folder: Path, seed: int = 0, **shape: Any) -> Path:
    """Write a random model of a family; `shape` overrides config fields. Weights are large enough to disagree
    loudly.
    """
    import torch
    import transformers

    maker, special = _family(transformers, family)
    fields = {**_SHAPE, **special, **shape}
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(maker(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.15 if parameter.dim() > 1 else 0.3))
            if parameter.dim() == 1 and "norm" in name and family != "gemma3":
                parameter.add_(1.0)
    model.save_pretrained(folder)
    write_tokenizer(folder, _byte_vocabulary())
    return folder


def _family(transformers: Any, family: str) -> tuple[Any, dict[str, Any]]:
    match family:
        case "llama":
            return transformers.LlamaConfig, {}
        case "llama3":
            rope = {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }  # fmt: skip
            return transformers.LlamaConfig, {"rope_parameters": rope, "tie_word_embeddings": True}
        case "mistral":
            return transformers.MistralConfig, {"sliding_window": 24}
        case "qwen2":
            return transformers.Qwen2Config, {"tie_word_embeddings": True}
        case "qwen2-window":
            return transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
        case "qwen3":
            return transformers.Qwen3Config, {}
        case "gemma3":
            special = {
                "sliding_window": 24, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
            }  # fmt: skip
            return transformers.Gemma3TextConfig, special
    raise ValueError(f"no tiny model of the family {family!r}; known: {', '.join(FAMILIES)}")


# --------------------------------------------------------------------------------------------------- successor model


def make_successor(
    folder: Path, following: dict[int, int], vocab_size: int = 288, *, max_context: int = 512, default: int = 257
) -> Path:
    """Write a llama whose greedy text is a table: after token t comes `following[t]`, or `default` where t is not
    named.

    Attention and MLP outputs are zero, the embedding is a diagonal, and row j of the head is the sum of the embeddings
    of the tokens that j follows. So logits depend on the last token alone, and the wanted one leads by a wide margin.
    """
    hidden = -(-vocab_size // 32) * 32
    embedding = np.zeros((vocab_size, hidden), np.float32)
    np.fill_diagonal(embedding, 1.0)
    head = np.zeros((vocab_size, hidden), np.float32)
    for token in range(vocab_size):
        head[following.get(token, default)] += embedding[token]
    num_heads, head_dim, inner = 2, 16, 32
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    layer = {
        "input_layernorm": np.ones(hidden), "post_attention_layernorm": np.ones(hidden),
        "self_attn.q_proj": rng.normal(size=(num_heads * head_dim, hidden)),
        "self_attn.k_proj": rng.normal(size=(num_heads * head_dim, hidden)),
        "self_attn.v_proj": rng.normal(size=(num_heads * head_dim, hidden)),
        "self_attn.o_proj": np.zeros((hidden, num_heads * head_dim)),
        "mlp.gate_proj": rng.normal(size=(inner, hidden)), "mlp.up_proj": rng.normal(size=(inner, hidden)),
        "mlp.down_proj": np.zeros((hidden, inner)),
    }  # fmt: skip
    tensors |= {f"model.layers.0.{name}.weight": value.astype(np.float32) for name, value in layer.items()}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads, "head_dim": head_dim, "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float32",
        "bos_token_id": 256, "eos_token_id": 257, "hidden_act": "silu",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_successor_text(folder: Path, pieces: list[bytes], *, max_context: int = 512) -> Path:
    """Write a successor model that answers any prompt with `pieces`, one token each, then its end token.

    Each piece is a token of its own even where it is a part of a character; a piece may come once only, because the
    table knows nothing but the last token. Ids: 0–255 bytes, 256–259 specials, 260… the pieces.
    """
    if len(set(pieces)) != len(pieces) or any(len(piece) < 2 for piece in pieces):
        raise ValueError("pieces must be distinct and longer than a byte: single bytes are tokens of the prompt")
    first = 256 + len(SPECIALS)
    following = {first + index: first + index + 1 for index in range(len(pieces))}
    following[first + len(pieces) - 1] = 257
    vocab_size = -(-(first + len(pieces)) // 32) * 32
    make_successor(folder, following, vocab_size, max_context=max_context, default=first)
    write_tokenizer(folder, _byte_vocabulary() | {_visible(piece): first + i for i, piece in enumerate(pieces)})
    return folder


# --------------------------------------------------------------------------------------------------- tokenizer


def write_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE without merges, specials, a chat template."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE, "model_max_length": 512, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 259], "bos_token_id": 256}))


def _byte_vocabulary() -> dict[str, int]:
    vocabulary = {_visible(bytes([byte])): byte for byte in range(256)}
    return vocabulary | {text: 256 + index for index, text in enumerate(SPECIALS)}


def _visible(data: bytes) -> str:
    """GPT-2's spelling of bytes as printable characters, which byte-level vocabularies use."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return "".join(table[byte] for byte in data)
