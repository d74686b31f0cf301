"""Law: pages do not change the answer: the reference executor over scattered pages = a recomputation without pages."""

import numpy as np
import pytest

from fakes.contiguous import Contiguous
from fakes.models import FAMILIES, make_tiny
from fakes.steps import Driver, open_model, reference

PAGE = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        made[family] = make_tiny(family, tmp_path_factory.mktemp("tiny") / family, seed=7)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_scattered_pages_equal_the_recomputed_ones(folders, family):
    """Prompt lengths around page borders and beyond each sliding window; pages in random order, poisoned before use."""
    config, program = open_model(folders[family])
    oracle, chosen = Contiguous(program), reference(program)
    for seed, length in enumerate((1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1, 3 * PAGE)):
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, length).tolist()
        driver = Driver(chosen, config, seed=seed)
        driver.add(0, tokens)
        driver.step({0: 512}, all_logits=True)
        ours = np.stack([driver.logits[0][position] for position in range(length)])
        difference = np.abs(ours - oracle.logits(tokens))
        assert difference.max() < 5e-5, (
            f"{family}, {length} tokens: largest {difference.max()}, mean {difference.mean()}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_over_pages_equals_recomputing_everything(folders, family):
    """Token by token over three page borders; each step of the oracle starts from nothing."""
    config, program = open_model(folders[family])
    oracle, chosen = Contiguous(program), reference(program)
    for seed in range(2):
        prompt = np.random.default_rng(100 + seed).integers(0, config.vocab_size, 9 + 5 * seed).tolist()
        driver = Driver(chosen, config, seed=seed)
        driver.add(3, prompt)
        assert driver.generate(3, 40) == oracle.greedy(prompt, 40)
