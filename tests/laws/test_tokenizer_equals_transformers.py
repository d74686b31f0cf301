"""Token ids equal those of transformers, for every kind of tokenizer and for the real models.

SmolLM2's file says that its pre-tokenizer is `smollm`; transformers reads no such name and falls back to GPT-2's rule,
so for that model it is given the rule of the model's own tokenizer.json: digits alone, then GPT-2's. That the rule is
right shows in the vocabulary itself, which a test looks at.
"""

import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from fakes import needs
from fakes.strings import random_string
from fakes.tokenizers import byte_fallback, byte_level, save_folder, with_bos
from sayfa.hub import resolve_model
from sayfa.text.tokenizer import Tokenizer, load_tokenizer

NUM_STRINGS = 10_000


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, Any]:
    path = resolve_model("smollm2")
    oracle = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return load_tokenizer(path), oracle


def compare(ours: Tokenizer, oracle: Any, seed: int, count: int, keep: Any = None) -> int:
    rng = random.Random(seed)
    compared = 0
    for _ in range(count):
        text = random_string(rng)
        if keep is not None and not keep(text):
            continue
        ids = oracle(text)["input_ids"]
        assert ours.encode(text) == ids, f"{text!r}"
        assert ours.decode(ids, skip_special=False) == oracle.decode(ids, clean_up_tokenization_spaces=False), (
            f"{text!r}"
        )
        compared += 1
    return compared


@pytest.mark.real_model
def test_smollm2_splits_as_its_vocabulary_was_trained(smollm2: tuple[Tokenizer, Any]) -> None:
    """Not one token holds a digit, or another number, together with anything else."""
    ours, _ = smollm2
    for index in range(ours.vocab_size):
        text = ours.token_bytes(index).decode(errors="ignore")
        assert len(text) == 1 or not any(unicodedata.category(char).startswith("N") for char in text)


@pytest.mark.real_model
def test_smollm2_ids_equal_without_numbers_as_transformers_reads_the_file(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, oracle = smollm2
    assert compare(ours, oracle, 1, 4_000, lambda text: not any(char.isnumeric() for char in text)) > 1_000


@pytest.mark.real_model
def test_smollm2_ids_equal_on_ten_thousand_strings(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, oracle = smollm2
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert compare(ours, oracle, 2, NUM_STRINGS) == NUM_STRINGS


@pytest.mark.real_model
def test_smollm2_folder_saved_by_transformers_gives_the_same_ids(
    smollm2: tuple[Tokenizer, Any], tmp_path: Path
) -> None:
    ours, oracle = smollm2
    oracle.save_pretrained(str(tmp_path))
    folder = load_tokenizer(tmp_path)
    assert compare(folder, AutoTokenizer.from_pretrained(str(tmp_path)), 3, 1_000) == 1_000
    assert (folder.vocab_size, folder.bos_id) == (ours.vocab_size, ours.bos_id)
    assert folder.special_ids == ours.special_ids
    assert folder.chat_template == ours.chat_template


@pytest.mark.slow
@pytest.mark.real_model
def test_gemma_ids_equal_on_ten_thousand_strings() -> None:
    """Needs the Gemma 3 270M file, which may not be handed on: set SAYFA_TEST_GEMMA3_GGUF to its path."""
    path = needs.gemma3_file()
    oracle = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    assert compare(load_tokenizer(path), oracle, 4, NUM_STRINGS) == NUM_STRINGS


KINDS = {
    "byte_level": byte_level,
    "byte_level_bos": lambda: with_bos(byte_level()),
    "first": lambda: byte_fallback("first"),
    "first_bos": lambda: with_bos(byte_fallback("first")),
    "always": lambda: byte_fallback("always"),
    "never": lambda: with_bos(byte_fallback("never")),
    "prepend": lambda: with_bos(byte_fallback("prepend")),
}


@pytest.mark.parametrize("switches", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_folder_gives_the_same_ids(kind: str, switches: dict[str, bool], tmp_path: Path) -> None:
    save_folder(tmp_path, KINDS[kind](), switches)
    ours, oracle = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    rng = random.Random(5)
    for _ in range(300):
        text = random_string(rng) + rng.choice(["", "<|im_start|>user\n", "<|im_end|>", " </s> x"])
        ids = oracle(text)["input_ids"]
        assert ours.encode(text) == ids, f"{text!r}"
        assert ours.encode(text, add_special=False) == oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_chat(text) == oracle(text, add_special_tokens=False)["input_ids"]
