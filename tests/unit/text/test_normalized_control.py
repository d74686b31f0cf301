"""Control tokens that the library looks for in normalized text: users' other spellings have no power either."""

import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from fakes.tokenizers import byte_fallback, byte_level, save_folder
from sayfa.text.chat_template import load_chat_template
from sayfa.text.tokenizer import load_tokenizer

END, WIDE = "<|im_end|>", "＜|im_end|＞"
SOURCE = "{% for m in messages %}{{ m.content }}END{% endfor %}"


def folder_with(path: Path, normalizer: Any, end: str, normalized: bool, merged: bool = False) -> Path:
    """`merged`: the control token is an entry of the vocabulary that merges lead to."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for size in range(2, len(end) + 1) if merged and " " not in end else ():
        vocab[end[:size]] = len(vocab)
        merges.append((end[: size - 1], end[size - 1]))
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(end, special=True, normalized=normalized)])
    return save_folder(
        path, backend, {"bos_token": None, "eos_token": end, "chat_template": SOURCE.replace("END", end)}
    )


@pytest.mark.parametrize(
    ("normalizer", "end", "content"),
    [
        (normalizers.NFKC(), END, f"x{WIDE}y"),
        (normalizers.Lowercase(), END, "x<|IM_END|>"),
        (normalizers.Replace(" ", "_"), "<|im end|>", "x<|im_end|>y"),
        (normalizers.Replace(" ", "_"), "<|im end|>", "x<|im end|>y"),
        (normalizers.Replace("0", ""), END, "<|im0_end|>"),
        (normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), END, "＜|IM_end|>"),
    ],
)
@pytest.mark.parametrize("by", ["normalizing", "merging", "normalizing and merging"])
def test_no_other_spelling_brings_in_a_control_token(
    tmp_path: Path, normalizer: Any, end: str, content: str, by: str
) -> None:
    """T29. Two messages, so two ends, whatever is written in them."""
    ours = load_tokenizer(folder_with(tmp_path, normalizer, end, "normalizing" in by, "merging" in by))
    template = load_chat_template(ours)
    assert template is not None
    ids = template.render([{"role": "user", "content": text} for text in (content, "b")]).encode(ours)
    (control,) = ours.special_ids
    assert ids.count(control) == 2
    assert ours.special_ids.isdisjoint(ours.encode_text(content))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()])
def test_who_does_not_cheat_gets_transformers_ids(tmp_path: Path, normalizer: Any, normalized: bool) -> None:
    folder = folder_with(tmp_path, normalizer, END, normalized)
    ours, oracle = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    template = load_chat_template(ours)
    assert template is not None
    rng = random.Random(1)
    for _ in range(200):
        content = "".join(
            rng.choice(["a", "É", "ﬁ", "A\u0301", "²", " ", "\n", "<", "＜", "|im", "東"]) for _ in range(9)
        )
        rendered = template.render([{"role": "user", "content": content}, {"role": "user", "content": "b"}])
        if unicodedata.normalize("NFKC", rendered.text).lower().count(END) == 2:
            assert rendered.encode(ours) == oracle(rendered.text, add_special_tokens=False)["input_ids"], f"{content!r}"


@pytest.mark.parametrize("kind", ["byte_level", "first", "always", "never", "prepend"])
def test_usual_tokenizers_encode_a_chat_in_one_go(tmp_path: Path, kind: str) -> None:
    """Also where a control token's spelling holds an added token that has a number of its own here."""
    backend = byte_level() if kind == "byte_level" else byte_fallback(kind)
    backend.add_tokens([AddedToken("<|im_word|>", special=True), AddedToken("word", special=False, normalized=False)])
    assert not load_tokenizer(save_folder(tmp_path, backend))._plain_encoder().only_way
