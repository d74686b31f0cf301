"""Small tokenizers of the kinds that exist, trained on a few lines, saved as Hugging Face folders or GGUF files."""

import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps",
    "İstanbul'da ılık bir akşam çok güzel bir gün öğrenciler geldi",
    "def f(x): return x ** 2  # code 123 4567 890",
    "naïve café — 東京 こんにちは 😀😀 👨‍👩‍👧 \n\n\t end of line",
    "system user assistant im start im end begin of text the the the",
]
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(size: int = 600) -> Tokenizer:
    """Train GPT-2's kind: bytes in a printable alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback(prefix: str = "first", size: int = 500) -> Tokenizer:
    """Train SentencePiece's kind: spaces as ▁, unknown characters as bytes. `prefix`: first, always, never, prepend."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if prefix == "never":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    elif prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps if prefix == "never" else [*steps, decoders.Strip(" ", 1, 0)])
    special = ["<unk>", *CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    return without_special_bytes(tokenizer)


def without_special_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """Make the byte tokens plain entries of the vocabulary; the trainer had to be told that they are special."""
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Put BOS before every text, as the post-processor of many models does."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save_folder(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write a model folder; `files` are further JSON files by name, `_json` in place of `.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | (config or {})))
    for name, content in files.items():
        (folder / name.replace("_json", ".json")).write_text(json.dumps(content))
    return folder


def gguf_bytes(
    metadata: dict[str, Any], tensors: list[tuple[str, list[int], int, int]] = (), data: bytes = b""
) -> bytes:
    """Write a GGUF file of version 3. tensors: name, dimensions as stored, type number, offset."""
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        out += [_string(key), _value(value)]
    for name, dims, type_id, offset in tensors:
        out.append(_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset))
    head = b"".join(out)
    return head + (b"\0" * (-len(head) % 32) + data if tensors else b"")


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if value >= 0 else struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    kind = type(value[0])
    number, fmt = {str: (8, ""), int: (5, "i"), float: (6, "f"), bool: (7, "B")}[kind]
    body = b"".join(map(_string, value)) if kind is str else struct.pack(f"<{len(value)}{fmt}", *value)
    return struct.pack("<IIQ", 9, number, len(value)) + body


def gguf_metadata(tokenizer: Tokenizer, model: str, **more: Any) -> dict[str, Any]:
    """Describe a trained tokenizer as a GGUF file does."""
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    control = {token["content"] for token in data["added_tokens"] if token["special"]}
    types = [3 if token in control else 6 if token.startswith("<0x") else 1 for token in tokens]
    named = {"bos": "<s>", "eos": "<|im_end|>"}
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{name}_token_id": vocab[text] for name, text in named.items()},
    }
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in data["model"]["merges"]]
    if model == "gpt2":
        metadata |= {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": merges}
    else:
        ranks = {merge.replace(" ", ""): rank for rank, merge in reversed(list(enumerate(merges)))}
        metadata["tokenizer.ggml.scores"] = [-float(ranks.get(token, 1e6)) for token in tokens]
    return metadata | {key.replace("__", "."): value for key, value in more.items()}
