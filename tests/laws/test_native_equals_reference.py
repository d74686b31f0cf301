"""Law: the native executor computes what the reference computes, on each family, in float32 throughout.

Only the order of additions differs, so the tolerance is that of rounding. Quantized and bfloat16 paths round on
purpose; they are held to their own references by the tests of the single ops.
"""

import numpy as np
import pytest

from fakes import needs
from fakes.models import FAMILIES, make_tiny
from fakes.steps import Driver, open_model, reference
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.sizing import kv_bytes_per_page
from sayfa.runner.executors import StepLimits, make_executor

TOLERANCE = 1e-4


def native(program, kv_type="float32", page_size=16):
    needs.native_library()
    chosen = make_executor(program, StepLimits(512, 512, page_size, kv_type), kind="native", threads=2, dtype="float32")
    chosen.executor.allocate_pages(200)
    chosen.executor.poison_pages()
    return chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_each_family_agree(tmp_path, family):
    """Ragged batches of prompts around page borders and beyond each sliding window."""
    config, program = open_model(make_tiny(family, tmp_path, seed=2))
    both = [reference(program, num_pages=200), native(program)]
    lengths = (1, 15, 16, 17, 49, 70)
    found = []
    for seed, chosen in enumerate(both):
        driver = Driver(chosen, config, num_pages=200, seed=seed)
        for row, length in enumerate(lengths):
            driver.add(row, np.random.default_rng(row).integers(0, 256, length).tolist())
        driver.step(dict.fromkeys(range(len(lengths)), 40), all_logits=True)
        driver.step({4: 40, 5: 40}, all_logits=True)
        found.append(driver.logits)
    for row, length in enumerate(lengths):
        ours, theirs = (np.stack([logits[row][position] for position in range(length)]) for logits in found)
        difference = np.abs(ours - theirs)
        assert difference.max() < TOLERANCE, f"{length} tokens: largest {difference.max()}, mean {difference.mean()}"


@pytest.mark.parametrize("wish", ["greedy", "seeded", "edited"])
def test_sampled_tokens_agree(tmp_path, wish):
    """The whole way with both draws: the same ids, log-probabilities within rounding."""
    params = {
        "greedy": SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1),
        "seeded": SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, logprobs=0),
        "edited": SamplingParams(temperature=0.8, repetition_penalty=1.4, logit_bias={5: 2.0}, min_tokens=5,
                                 stop_token_ids=[257], logprobs=1),
    }[wish]  # fmt: skip
    config, program = open_model(make_tiny("llama", tmp_path, seed=4))
    answers = []
    for chosen in (reference(program, num_pages=200), native(program)):
        driver = Driver(chosen, config, num_pages=200)
        for row in range(5):
            driver.add(row, np.random.default_rng(row).integers(0, 256, 5 + 9 * row).tolist(), params, seed=row)
        answers.append([result for _ in range(20) for result in driver.step(dict.fromkeys(range(5), 512))])
    for one, other in zip(*answers, strict=True):
        assert (one.row, one.tokens, one.error) == (other.row, other.tokens, other.error)
        for mine, theirs in zip(
            one.logprobs + one.prompt_logprobs, other.logprobs + other.prompt_logprobs, strict=True
        ):
            assert (mine.rank, mine.top_ids) == (theirs.rank, theirs.top_ids)
            assert mine.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)


@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_the_formula_for_a_page_is_a_lower_bound_and_close(tmp_path, kv_type, page_size):
    """The planner forecasts with the formula; the executor may add alignment, a cache line for each layer at most."""
    config, program = open_model(make_tiny("llama", tmp_path))
    formula = kv_bytes_per_page(config, kv_type, page_size)
    real = native(program, kv_type, page_size).executor.bytes_per_page
    assert formula <= real < formula + 64 * config.num_layers
