"""Law: our logits are those of Hugging Face transformers, on random tiny models of each family and on real ones.

Both compute in float32 here, in another order of additions: tiny models agree to about 1e-5 of logits of about 5.
"""

import numpy as np
import pytest
import torch
import transformers

from fakes import needs
from fakes.gguf_files import convert
from fakes.models import FAMILIES, make_tiny
from fakes.steps import Driver, open_model, reference
from sayfa.hub import resolve_model
from sayfa.text.tokenizer import load_tokenizer

TOLERANCE = 5e-5
LENGTHS = (1, 15, 16, 17, 48, 65)
GGUF_FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "gemma3")


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    folder = make_tiny(request.param, tmp_path_factory.mktemp("tiny") / request.param, seed=11)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return request.param, folder, oracle


def our_logits(driver, row, tokens):
    driver.add(row, tokens)
    driver.step({row: 512}, all_logits=True)
    logits = driver.logits[row]
    driver.forget(row)
    return np.stack([logits[position] for position in range(len(tokens))])


def assert_close(ours, theirs, tolerance, what):
    difference = np.abs(ours - theirs)
    assert difference.max() < tolerance, f"{what}: largest {difference.max()}, mean {difference.mean()}"


def test_logits_of_each_family_equal_transformers(tiny):
    """Prompts around page borders and longer than each sliding window."""
    family, folder, oracle = tiny
    config, program = open_model(folder)
    driver = Driver(reference(program), config)
    for row, length in enumerate(LENGTHS):
        tokens = np.random.default_rng(length).integers(0, config.vocab_size, length).tolist()
        with torch.no_grad():
            theirs = oracle(torch.tensor([tokens])).logits[0].numpy()
        assert_close(our_logits(driver, row, tokens), theirs, TOLERANCE, f"{family}, {length} tokens")


def test_greedy_tokens_of_each_family_equal_transformers(tiny):
    """Eight prompts, 32 tokens each, over page borders and windows."""
    family, folder, oracle = tiny
    config, program = open_model(folder)
    driver = Driver(reference(program), config)
    prompts = {row: np.random.default_rng(row).integers(0, 256, 3 + 4 * row).tolist() for row in range(8)}
    for row, prompt in prompts.items():
        driver.add(row, prompt)
    for _ in range(32):
        driver.step(dict.fromkeys(prompts, 512))
    for row, prompt in prompts.items():
        theirs = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None
        )
        assert driver.outputs[row] == theirs[0, len(prompt) :].tolist(), f"{family}, prompt {row}"


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file_gives_the_logits_of_the_folder_it_was_made_from(tmp_path, family):
    """Names, the order of rotary pairs, Gemma's norms, Llama 3's divisors: both dialects describe one model."""
    gemma = {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 16}  # what a GGUF file can say
    shape = gemma if family == "gemma3" else {}
    folder = make_tiny(family, tmp_path / "folder", seed=5, **shape)
    file = convert(folder, tmp_path / "model.gguf")
    tokens = np.random.default_rng(0).integers(0, 320, 60).tolist()
    answers = []
    for path in (folder, file):
        config, program = open_model(path)
        answers.append(our_logits(Driver(reference(program), config), 0, tokens))
    assert_close(answers[1], answers[0], TOLERANCE, family)


# --------------------------------------------------------------------------------------------------- real models

TEXT = (
    "The old lighthouse keeper counted ships until the fog came in. Paris is the capital of France, and the Seine runs "
    "through it. def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2). Water boils at 100 "
    "degrees. Merhaba dünya, bugün hava çok güzel. The quick brown fox jumps over the lazy dog while wizards sing. "
    "In the beginning there was a question about the size of the sea, and nobody wrote the answer down for long years."
)


class RealModel:
    """A GGUF file, read by both sides, and the token ids of the text."""

    def __init__(self, path):
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        self.oracle = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        self.ids = load_tokenizer(path).encode(TEXT, add_special=True)
        self.config, program = open_model(path, num_positions=256)
        self.chosen = reference(program, num_pages=400)

    def assert_logits_agree(self, num_tokens, tolerance):
        tokens = self.ids[:num_tokens]
        with torch.no_grad():
            theirs = self.oracle(torch.tensor([tokens])).logits[0].numpy()
        assert_close(our_logits(Driver(self.chosen, self.config), 0, tokens), theirs, tolerance, self.config.name)

    def differing_prompts(self, num_prompts, num_tokens):
        """Greedy answers to prompts of 4 to 33 tokens cut out of the text; those where the two sides differ.

        The oracle reads prompt and answer at once: if each of its most likely tokens is the next one of our answer, its
        own greedy answer is the same, by induction, for a fiftieth of the passes.
        """
        differing = []
        for first in range(0, num_prompts, 20):
            driver = Driver(self.chosen, self.config, num_pages=400, seed=first)
            prompts = {}
            for number in range(first, min(first + 20, num_prompts)):
                start = number * 7 % (len(self.ids) - 40)
                prompts[number - first] = self.ids[start : start + 4 + number * 5 % 30]
                driver.add(number - first, prompts[number - first])
            for _ in range(num_tokens):
                driver.step(dict.fromkeys(prompts, 512))
            for row, prompt in prompts.items():
                ours = driver.outputs[row]
                with torch.no_grad():
                    logits = self.oracle(torch.tensor([prompt + ours[:-1]])).logits[0, len(prompt) - 1 :]
                theirs = logits.argmax(-1).tolist()
                if ours != theirs:
                    at = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
                    lead = float(logits[at, theirs[at]] - logits[at, ours[at]])
                    differing.append(f"prompt {first + row} at output {at}: {ours[at]} and {theirs[at]}, lead {lead}")
        return differing


@pytest.fixture(scope="module")
def smollm2():
    return RealModel(resolve_model("smollm2"))


@pytest.mark.real_model
@pytest.mark.timeout(400)  # reading a GGUF file takes transformers ten seconds of one free core
def test_smollm2_logits_and_greedy_tokens_equal_transformers(smollm2):
    """The embedded model, from its GGUF file: one text's logits, and eight prompts × 16 tokens."""
    smollm2.assert_logits_agree(70, 2e-3)
    assert smollm2.differing_prompts(8, 16) == []


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(3000)
def test_smollm2_greedy_tokens_equal_transformers_on_200_prompts(smollm2):
    """200 prompts × 64 tokens."""
    assert smollm2.differing_prompts(200, 64) == []


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(3000)
def test_gemma3_logits_and_greedy_tokens_equal_transformers():
    """The real Gemma 3 270M: K-quants, sliding window, vocabulary of 262k. It is not shipped: `needs` tells why."""
    model = RealModel(needs.gemma3_file())
    model.assert_logits_agree(60, 2e-3)
    assert model.differing_prompts(20, 32) == []
