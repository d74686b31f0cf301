"""Tokens that only the files beside tokenizer.json name become added tokens as they do with transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from fakes.tokenizers import save_folder
from sayfa.text.chat_template import load_chat_template
from sayfa.text.tokenizer import load_tokenizer

SPELLINGS = ["<s>", "</s>", "<|a|>", "<|b|>", "<X>", "<x>", "[PAD]", "<q>", "<image>"]
PARTS = [*SPELLINGS, "< s>", "<", "x", ">", "X", "[PAD", "a", "\n"]
NONE: dict[str, Any] = {"bos_token": None, "eos_token": None}


def letters(more: tuple[str, ...] = (), added: tuple[AddedToken, ...] = (), lower: bool = False) -> Tokenizer:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab | {text: len(vocab) + at for at, text in enumerate(more)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    backend.add_tokens(list(added))
    return backend


def token(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **{"special": True, "normalized": False, **flags})


def typed(text: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": text, **flags}


NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "q")
SHOWS_ALL = " ".join(f"{name}: {{{{ {name}_token }}}}" for name in NAMES)
CHAT = [{"role": "user", "content": "hi"}]
X = {"content": "<x>", "special": True, "normalized": False, "single_word": False}
BOTH_STRIP = {"lstrip": True, "rstrip": True}
CASES: dict[str, tuple[Tokenizer, dict[str, Any], dict[str, Any]]] = {
    "names in the vocabulary": (letters(("<s>", "</s>")), {"bos_token": "<s>", "eos_token": "</s>"}, {}),
    "names nowhere": (letters(), {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "[PAD]"}, {}),
    "one text for two names": (letters(), {"eos_token": "</s>", "bos_token": "</s>", "unk_token": "<q>"}, {}),
    "a name as an object": (letters(), {"bos_token": typed("<s>", lstrip=True, normalized=False)}, {}),
    "a name of an added token": (letters((), (token("<s>"),)), {"bos_token": typed("<s>", lstrip=True)}, {}),
    "other names": (letters(), {"image_token": "<image>", "sep_token": "<q>"}, {}),
    "additional": (letters(("<|a|>",)), {"additional_special_tokens": ["<|a|>", "<|b|>"]}, {}),
    "extra": (letters(("<|b|>",)), {"extra_special_tokens": ["<|a|>", typed("<|b|>", rstrip=True, special=True)]}, {}),
    "extra by name": (letters(), {"extra_special_tokens": {"image_token": "<image>"}}, {}),
    "extra before additional": (
        letters(), {"extra_special_tokens": ["<|a|>"], "additional_special_tokens": ["<|b|>"]}, {},
    ),
    "map": (letters(), NONE, {"special_tokens_map": {"eos_token": {"content": "</s>", **BOTH_STRIP}}}),
    "map against config": (letters(), {"eos_token": "</s>"}, {"special_tokens_map": {"eos_token": "<q>"}}),
    "map with additional": (letters(), {}, {"special_tokens_map": {"additional_special_tokens": ["<|a|>"]}}),
    "map with extra": (
        letters(), {"extra_special_tokens": ["<|b|>"]}, {"special_tokens_map": {"extra_special_tokens": ["<|a|>"]}},
    ),
    "map with extra by name": (letters(), {}, {"special_tokens_map": {"extra_special_tokens": {"q_token": "<q>"}}}),
    "map beside a list": (
        letters(), {"added_tokens_decoder": {"256": X}}, {"special_tokens_map": {"eos_token": "</s>"}},
    ),
    "added file": (letters(lower=True), {"eos_token": "</s>"}, {"added_tokens": {"<X>": 257, "</s>": 256}}),
    "added file against tokenizer.json": (
        letters((), (token("<q>", rstrip=True),)), {}, {"added_tokens": {"<q>": 256, "<x>": 257}},
    ),
    "added file beside a list": (letters(), {"added_tokens_decoder": {"256": X}}, {"added_tokens": {"<q>": 257}}),
    "list in its order": (letters(), {"added_tokens_decoder": {"1000": X, "256": typed("<q>", special=False)}}, {}),
    "list, normalized by default": (
        letters(lower=True), {"added_tokens_decoder": {"256": {"content": "<X>", "special": False}}}, {},
    ),
    "list, special by default not normalized": (
        letters(lower=True), {"added_tokens_decoder": {"256": {"content": "<X>", "special": True}}}, {},
    ),
    "list changes flags": (letters((), (token("<x>"),)), {"added_tokens_decoder": {"256": {**X, **BOTH_STRIP}}}, {}),
    "list makes special": (letters((), (token("<x>", special=False),)), {"added_tokens_decoder": {"256": X}}, {}),
    "list takes a word alone": (
        letters((), (token("<x>"),)), {"added_tokens_decoder": {"256": {**X, "single_word": True}}}, {},
    ),
    "a listed token has a name": (
        letters(lower=True), {"eos_token": "<X>", "added_tokens_decoder": {"256": {"content": "<X>"}}}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_the_files_beside_are_read_as_transformers_reads_them(case: str, tmp_path: Path) -> None:
    backend, config, files = CASES[case]
    save_folder(tmp_path, backend, NONE | config, **{f"{name}_json": content for name, content in files.items()})
    ours, oracle = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert ours.special_tokens == oracle.special_tokens_map
    theirs = oracle.apply_chat_template(CHAT, chat_template=SHOWS_ALL, tokenize=False)
    assert load_chat_template(ours, SHOWS_ALL).render(CHAT).text == theirs
    assert ours.bos_id == oracle.bos_token_id
    assert ours.eos_ids == frozenset([oracle.eos_token_id]) - {None}
    special = {index for index, token in oracle.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == special | set(oracle.all_special_ids)
    assert ours.vocab_size == len(oracle)
    rng = random.Random(1)
    texts = SPELLINGS + [" ".join(SPELLINGS), " " + "  ".join(SPELLINGS) + " "]
    texts += ["".join(rng.choice([*PARTS, " ", "  "]) for _ in range(rng.randrange(1, 12))) for _ in range(300)]
    for text in texts:
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special=False) == ids, f"{text!r}"
        for skip in (False, True):
            theirs = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == theirs, f"{text!r}"
