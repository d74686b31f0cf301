"""Laws of one row's bits: alone = in a crowd, chunked = whole, preempted = undisturbed. Both executors, bitwise."""

import numpy as np
import pytest

from fakes import needs
from fakes.models import make_tiny
from fakes.steps import GREEDY, Driver, open_model, reference
from sayfa.base.sampling_params import SamplingParams
from sayfa.runner.executors import StepLimits, make_executor

FAMILIES = ("llama", "gemma3", "qwen3")
WISHES = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, logprobs=3),
    "penalised": SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
}


@pytest.fixture(scope="module", params=["reference", "native"])
def models(request, tmp_path_factory):
    """Family → facts and executor. Natively with bfloat16 pages and two threads, as it is served."""
    made = {}
    for family in FAMILIES:
        config, program = open_model(make_tiny(family, tmp_path_factory.mktemp("tiny") / family, seed=3))
        if request.param == "reference":
            chosen = reference(program, num_pages=400)
        else:
            needs.native_library()
            chosen = make_executor(program, StepLimits(512, 512, 16), kind="native", threads=2)
            chosen.executor.allocate_pages(400)
            chosen.executor.poison_pages()
        made[family] = (config, chosen)
    return made


def prompt_of(seed, length, vocab_size):
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def assert_same_bits(expected, found, what):
    assert expected.keys() == found.keys(), what
    for position, logits in expected.items():
        differs = np.flatnonzero(logits.view(np.int32) != found[position].view(np.int32))
        assert len(differs) == 0, f"{what}: logits at position {position} differ first at id {differs[:1]}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 64])
def test_a_prompt_cut_into_chunks_gives_the_same_bits(models, family, chunk):
    """All logits of 53 positions and of ten decoded tokens."""
    config, chosen = models[family]
    tokens = prompt_of(1, 53, config.vocab_size)
    runs = []
    for size in (512, chunk):
        driver = Driver(chosen, config, num_pages=400, seed=size)
        driver.add(0, tokens)
        while len(driver.outputs[0]) < 10:
            driver.step({0: size}, all_logits=True)
        runs.append((driver.outputs[0], driver.logits[0]))
    assert_same_bits(runs[0][1], runs[1][1], f"{family} in chunks of {chunk}")
    assert runs[0][0] == runs[1][0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_a_row_gives_the_same_bits_alone_and_in_a_crowd(models, family, size):
    """Prompts of odd lengths in one batch, prefill and decode mixed: rows start at different steps."""
    config, chosen = models[family]
    prompts = {row: prompt_of(10 + row, 5 + 7 * row % 40, config.vocab_size) for row in range(size)}
    crowd = Driver(chosen, config, num_pages=400, seed=1)
    present: list[int] = []
    for step in range(size + 12):
        if step < size:
            crowd.add(step, prompts[step])
            present.append(step)
        crowd.step({row: 6 + row for row in reversed(present)})
    for row, prompt in prompts.items():
        alone = Driver(chosen, config, num_pages=400, seed=2)
        alone.add(row, prompt)
        assert alone.generate(row, len(crowd.outputs[row])) == crowd.outputs[row]
        assert_same_bits(alone.logits[row], crowd.logits[row], f"{family}: row {row} of {size}")


@pytest.mark.parametrize("wish", WISHES)
def test_a_preempted_sequence_answers_as_if_undisturbed(models, wish):
    """Forced out after each possible step, with other pages afterwards; ids and log-probabilities are equal."""
    config, chosen = models["llama"]
    params, prompt, count = WISHES[wish], prompt_of(5, 19, config.vocab_size), 14
    plain = Driver(chosen, config, num_pages=400)
    plain.add(2, prompt, params, seed=77)
    expected = [result for _ in range(count) for result in plain.step({2: 512})]
    for moment in range(1, count):
        driver = Driver(chosen, config, num_pages=400, seed=moment)
        driver.add(2, prompt, params, seed=77)
        found = []
        for step in range(count):
            if step == moment:
                driver.preempt(2, prompt, params, seed=77)
            found += driver.step({2: 512})
        assert found == expected, f"preempted after {moment} tokens"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_a_fork_answers_as_if_it_had_computed_the_prompt_itself(models, length):
    """Branches share full pages and copy the last one; each writes its own text, none disturbs another."""
    config, chosen = models["llama"]
    params, prompt = SamplingParams(temperature=1.0, logprobs=2), prompt_of(length, length, config.vocab_size)
    driver = Driver(chosen, config, num_pages=400, seed=length)
    driver.add(0, prompt, params, seed=50)
    driver.step({0: 512})
    for branch in (1, 2, 3):
        driver.fork(0, branch, params, seed=50 + branch)
    for _ in range(20):
        driver.step(dict.fromkeys(range(4), 512))
    assert len({tuple(driver.outputs[branch]) for branch in range(4)}) == 4
    for branch in range(4):
        alone = Driver(chosen, config, num_pages=400, seed=99)
        alone.add(branch, prompt, params, seed=50 + branch)
        assert alone.generate(branch, 20) == driver.outputs[branch][:20], f"branch {branch} of a prompt of {length}"


def test_noise_depends_on_seed_and_position_alone(models):
    """The same seed gives the same text in any company; another seed gives another."""
    config, chosen = models["llama"]
    params, prompt = SamplingParams(temperature=1.0), prompt_of(8, 11, config.vocab_size)
    texts = []
    for company in range(4):
        driver = Driver(chosen, config, num_pages=400, seed=company)
        driver.add(9, prompt, params, seed=1234)
        for row in range(company):
            driver.add(row, prompt_of(row, 4 + row, config.vocab_size), params, seed=row)
        for _ in range(16):
            driver.step(dict.fromkeys([*range(company), 9], 512))
        texts.append(driver.outputs[9])
    assert texts[0] == texts[1] == texts[2] == texts[3]
    other = Driver(chosen, config, num_pages=400)
    other.add(9, prompt, params, seed=1235)
    assert other.generate(9, 16) != texts[0]
