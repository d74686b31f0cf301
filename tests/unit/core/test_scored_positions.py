"""The prompt positions scored in one step are bounded; the bound changes no score, and nobody waits for ever."""

import random

import pytest

from fakes.engines import assert_same, make_requests, run
from fakes.fake_engine import make_engine
from sayfa.base.errors import ConfigError
from sayfa.base.messages import Request
from sayfa.base.sampling_params import SamplingParams


class CountingRunner:
    """Notes how many rows of logits each plan wants."""

    def __init__(self, runner):
        self.runner = runner
        self.num_logits = []

    def execute(self, plan):
        self.num_logits.append(sum(row.num_logits for row in plan.rows))
        return self.runner.execute(plan)


@pytest.mark.parametrize("seed", range(25))
def test_no_step_wants_more_logits_than_rows_and_the_scores_stay(seed):
    rng = random.Random(seed)
    max_scored, max_num_seqs = rng.choice([1, 2, 5, 16]), rng.choice([1, 3, 8])
    requests = make_requests(seed, 6, vocab=1000, longest=60)
    requests += [
        Request(id=f"scored{i}", prompt=[rng.randrange(1000) for _ in range(rng.randint(1, 70))],
                params=SamplingParams(prompt_logprobs=1, max_tokens=rng.choice([0, 1, 9]), seed=i, n=1 + 2 * (i % 2)))
        for i in range(6)
    ]  # fmt: skip
    rng.shuffle(requests)
    counters = []

    def count(runner):
        counters.append(CountingRunner(runner))
        return counters[-1]

    numbers = {"num_pages": 200, "max_num_seqs": max_num_seqs}
    free = run(make_engine(**numbers), requests)
    bounded = run(make_engine(wrap=count, max_scored=max_scored, **numbers), requests)
    assert_same(bounded, free)
    assert max(counters[0].num_logits) <= max_num_seqs + max_scored
    for request in requests:
        if request.params.prompt_logprobs is not None:
            scores = bounded[request.id][0].prompt_logprobs
            assert [score.rank for score in scores] == list(range(1, len(request.prompt)))


def test_a_bound_of_none_at_all_is_refused():
    with pytest.raises(ConfigError, match="max_scored"):
        make_engine(max_scored=0)
