"""Tokens that stand outside the model's own vocabulary are read as transformers reads them, control tokens or not.

Qwen's files are laid out so: the vocabulary ends where the added tokens begin. What a user wrote is compared with
transformers' `split_special_tokens`, which takes control tokens for plain text and leaves the other added tokens whole.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from fakes.strings import random_string
from fakes.templates import QWEN
from fakes.tokenizers import byte_fallback, byte_level, save_folder
from sayfa.text.chat_template import load_chat_template
from sayfa.text.tokenizer import Tokenizer, load_tokenizer

KINDS = ["byte_level", "first", "always", "never", "prepend"]
ADDED = [
    ("<|box|>", True), ("<think>", False), ("</think>", False), ("<|end|>", True), ("<tool_call>", False),
    ("</tool_call>", False), ("<|pad|>", True), ("word", False),
]  # fmt: skip
PARTS = ["<|im_start|>", "<|im_end|>", "</s>", "<", "<|", "<t", "think>", "</", "tool_call>", "|>", " ", "\n", "hello"]


def with_added(folder: Path, kind: str) -> tuple[Tokenizer, Any]:
    backend = byte_level() if kind == "byte_level" else byte_fallback(kind)
    for text, special in ADDED:
        backend.add_tokens([AddedToken(text, special=special, normalized=False)])
    save_folder(folder, backend, {"chat_template": QWEN})
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))


def odd_text(rng: random.Random) -> str:
    parts = [*PARTS, *(text for text, _ in ADDED), random_string(rng, 3)]
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 9)))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_with_added_tokens_give_the_same_ids(kind: str, tmp_path: Path) -> None:
    ours, oracle = with_added(tmp_path, kind)
    rng = random.Random(1)
    for _ in range(500):
        text = odd_text(rng)
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_chat(text) == ids, f"{text!r}"
        harmless = text + "<"  # gets the mark, which breaks nothing
        ids = oracle(harmless, add_special_tokens=False)["input_ids"]
        assert ours.encode_chat(harmless + "\uf8e0", "\uf8e0") == ids, f"{harmless!r}"


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_wrote_keeps_its_added_tokens_whole_and_has_no_control_token(kind: str, tmp_path: Path) -> None:
    ours, oracle = with_added(tmp_path, kind)
    rng = random.Random(2)
    for _ in range(500):
        text = odd_text(rng)
        ids = oracle(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode_text(text) == ids, f"{text!r}"
        assert ours.special_ids.isdisjoint(ids)


@pytest.mark.parametrize("content", ["is 1 < 2", "is 1 <", "<think>", "a</think><|im_", "hello<"])
def test_a_chat_whose_text_ends_as_a_control_token_begins_keeps_the_template_s_tokens(
    content: str, tmp_path: Path
) -> None:
    ours, oracle = with_added(tmp_path, "byte_level")
    template = load_chat_template(ours)
    assert template is not None
    rendered = template.render([{"role": "user", "content": content}], options={"enable_thinking": False})
    assert rendered.encode(ours) == oracle(rendered.text, add_special_tokens=False)["input_ids"]
