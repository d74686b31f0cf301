"""Laws of the request table: its invariants hold over random histories, and nothing of a row survives `forget`."""

import random

import numpy as np
import pytest

from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import NewRow
from sayfa.runner.request_table import RequestTable

WISHES = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(presence_penalty=0.5, frequency_penalty=-0.5),
    SamplingParams(logit_bias={3: 1.0}),
    SamplingParams(min_tokens=4, logprobs=2, prompt_logprobs=1),
]


def new_row(rng, row, length, params):
    tokens = [rng.randrange(50) for _ in range(length)]
    pages = [rng.randrange(1, 999) for _ in range(-(-length // 16))]
    return NewRow(row=row, tokens=tokens, num_prompt=rng.randint(1, length), params=params, seed=-1, pages=pages)


@pytest.mark.parametrize("seed", range(15))
def test_invariants_hold_over_random_histories(seed):
    rng = random.Random(seed)
    table = RequestTable(6, 200, 16, 50)
    live: set[int] = set()
    for _ in range(300):
        row = rng.randrange(6)
        if row not in live:
            table.put(new_row(rng, row, rng.randint(1, 100), rng.choice(WISHES)))
            live.add(row)
        elif rng.random() < 0.2:
            table.forget(row)
            live.discard(row)
        else:
            if table.num_pages[row] * 16 <= table.num_tokens[row] < 190:
                table.add_pages(row, [rng.randrange(1, 999)])
            if table.num_tokens[row] < 190:
                token = np.array([rng.randrange(50)], np.int32)
                table.set_sampled(np.array([row], np.int32), table.num_tokens[[row]].copy(), token)
        table.check()
    for row in live:
        table.forget(row)
    table.check()
    assert not table.pages.any()
    assert not table.num_tokens.any()
    assert not table.edits_logits.any()
    assert not table.counts


def test_a_taken_row_a_row_outside_and_a_sequence_too_long_are_refused():
    rng = random.Random(0)
    table = RequestTable(2, 32, 16, 50)
    table.put(new_row(rng, 0, 5, WISHES[0]))
    for row, length, what in ((0, 5, "in use"), (2, 5, "outside"), (-1, 5, "outside"), (1, 33, "33 tokens")):
        with pytest.raises(ValueError, match=what):
            table.put(new_row(rng, row, length, WISHES[0]))
    with pytest.raises(ValueError, match="got 3 pages, but holds 2"):
        table.add_pages(0, [5, 6])


def test_forgetting_twice_is_harmless():
    table = RequestTable(2, 32, 16, 50)
    table.put(new_row(random.Random(0), 1, 20, WISHES[1]))
    table.forget(1)
    table.forget(1)
    table.check()
