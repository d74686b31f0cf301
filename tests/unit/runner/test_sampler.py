"""Laws of the sampler: what each wish does to the logits, formula by formula, and that a failing row fails alone."""

import numpy as np
import pytest

from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import NewRow, ScheduledRow
from sayfa.runner.draw import draw, score_token
from sayfa.runner.prepare import prepare
from sayfa.runner.request_table import RequestTable
from sayfa.runner.sampler import Sampler

VOCAB = 40


class Bench:
    """A sampler over rows whose logits the test gives; `seen` are the logits that reached the draw."""

    def __init__(self):
        self.table = RequestTable(8, 200, 16, VOCAB)
        self.sampler = Sampler(self.table, self._draw)
        self.seen = None

    def _draw(self, logits, columns):
        self.seen = logits.copy()
        return draw(logits, columns)

    def add(self, row, tokens, params, num_prompt=None, seed=5):
        prompt = len(tokens) if num_prompt is None else num_prompt
        pages = list(range(1 + 20 * row, 14 + 20 * row))
        self.table.put(NewRow(row=row, tokens=tokens, num_prompt=prompt, params=params, seed=seed, pages=pages))

    def step(self, logits, rows=None, num_logits=1):
        """Sample the last position of each row from logits [rows, V]."""
        rows = range(len(logits)) if rows is None else rows
        plan = [ScheduledRow(r, int(self.table.num_tokens[r]) - num_logits, num_logits, num_logits, True) for r in rows]
        results = self.sampler.sample(np.asarray(logits, np.float32).copy(), prepare(plan, self.table))
        self.table.check()
        return results


def logits_of(seed, rows=1):
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 3


def penalised(logits, prompt, output, params):
    """The formula: repetition over prompt and output, presence and frequency over the output only."""
    expected = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        value, factor = expected[token], params.repetition_penalty
        expected[token] = value / factor if value > 0 else value * factor
    for token in set(output):
        expected[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return expected


@pytest.mark.parametrize("seed", range(5))
def test_penalties_count_what_they_should_from_the_first_step_on(seed):
    """First and following steps, a prompt that repeats one id, and a sequence that was preempted in between (B029)."""
    params = SamplingParams(repetition_penalty=1.7, presence_penalty=1.1, frequency_penalty=0.6)
    prompt, output = [7] * 9 + [3, 12], []
    bench = Bench()
    bench.add(2, prompt, params, seed=seed)
    for step in range(6):
        logits = logits_of(10 * seed + step)
        if step == 4:
            bench.table.forget(2)
            bench.add(2, prompt + output, params, num_prompt=len(prompt), seed=seed)
        result = bench.step(logits, [2])[0]
        np.testing.assert_allclose(bench.seen[0], penalised(logits[0], prompt, output, params), rtol=1e-5)
        output += result.tokens


def test_bias_is_added_once_and_allowed_ids_are_the_only_ones_left():
    bench = Bench()
    bench.add(0, [1, 2], SamplingParams(logit_bias={5: 3.5, 39: -100.0}))
    bench.add(1, [1, 2], SamplingParams(allowed_token_ids=[4, 30]))
    logits = logits_of(0, 2)
    bench.step(logits)
    expected = logits[0].copy()
    expected[5] += 3.5
    expected[39] -= 100.0
    np.testing.assert_array_equal(bench.seen[0], expected)
    assert np.flatnonzero(np.isfinite(bench.seen[1])).tolist() == [4, 30]


def test_no_end_token_comes_before_min_tokens_and_any_may_after():
    """Both kinds of end token lead by far; `ignore_eos` leaves the model's own end tokens alone."""
    for ignore in (False, True):
        bench = Bench()
        params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[8], eos_token_ids=[9], ignore_eos=ignore)
        bench.add(0, [1], params)
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, [8, 9, 11]] = [9.0, 8.0, 1.0]
        found = [bench.step(logits)[0].tokens[0] for _ in range(4)]
        assert found == [9 if ignore else 11] * 3 + [8]


def test_end_tokens_that_the_model_cannot_draw_need_no_mask():
    """A tokenizer may know more tokens than the model has rows, its end tokens among them."""
    bench = Bench()
    bench.add(0, [1], SamplingParams(temperature=0.0, min_tokens=1, eos_token_ids=[9, VOCAB, VOCAB + 1000]))
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [9, 11]] = [9.0, 8.0]
    assert [bench.step(logits.copy())[0].tokens for _ in range(2)] == [[11], [9]]


def test_a_row_with_broken_logits_fails_alone():
    """Any kind of wish, any kind of break; the neighbours answer as they do without it (R13)."""
    wishes = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(logprobs=2),
              SamplingParams(repetition_penalty=1.3), SamplingParams(logit_bias={3: 1.0})]  # fmt: skip
    for broken in (np.nan, np.inf):
        for victim in range(len(wishes)):
            answers = []
            for breaks in (False, True):
                bench = Bench()
                for row, params in enumerate(wishes):
                    bench.add(row, [1, 2, 3 + row], params, seed=row)
                logits = logits_of(3, len(wishes))
                if breaks:
                    logits[victim, 17] = broken
                answers.append(bench.step(logits))
            assert answers[1][victim].error_code == "numerical_error"
            assert answers[1][victim].tokens == []
            for row in range(len(wishes)):
                assert row == victim or answers[0][row] == answers[1][row]


def test_wishes_that_leave_no_token_end_the_request_with_that_reason():
    bench = Bench()
    bench.add(0, [1], SamplingParams(allowed_token_ids=[9], min_tokens=1, eos_token_ids=[9]))
    bench.add(1, [1], SamplingParams(temperature=0.0))
    results = bench.step(logits_of(0, 2))
    assert results[0].error_code == "no_token_allowed"
    assert results[1].error is None
    assert len(results[1].tokens) == 1


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e-3, 100.0])
def test_extreme_penalties_end_with_finite_numbers(penalty):
    """A logit divided by 1e-38 leaves float32 (B032), and 1e-300 is 0 there; neither warns."""
    bench = Bench()
    params = SamplingParams(repetition_penalty=penalty, presence_penalty=2.0, frequency_penalty=-2.0, logprobs=3)
    bench.add(0, [1, 2, 3], params)
    for step in range(5):
        result = bench.step(logits_of(step))[0]
        assert result.error is None
        assert np.isfinite(result.logprobs[0].top_logprobs).all()
        assert np.isfinite(result.logprobs[0].logprob)


@pytest.mark.parametrize("chunk", [1, 2, 5, 12])
def test_prompt_scores_are_the_models_own_whatever_the_chunks(chunk):
    """Position p's logits score the token at p + 1, untouched by penalties and bias; the last ones are the draw's."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 12).tolist()
    logits = logits_of(5, 12)
    bench = Bench()
    bench.add(3, tokens, SamplingParams(prompt_logprobs=2, repetition_penalty=1.5, logit_bias={1: 50.0}))
    found, samples = [], []
    for start in range(0, 12, chunk):
        count = min(chunk, 12 - start)
        plan = [ScheduledRow(3, start, count, count, start + count == 12)]
        result = bench.sampler.sample(logits[start : start + count].copy(), prepare(plan, bench.table))[0]
        found += result.prompt_logprobs
        samples += result.tokens
    assert len(found) == 11
    assert len(samples) == 1
    for position, score in enumerate(found):
        logprob, rank, ids, _ = score_token(logits[position], tokens[position + 1], 2)
        assert (score.logprob, score.rank, score.top_ids) == (logprob, rank, ids.tolist())


def test_log_probabilities_are_given_exactly_to_rows_that_ask():
    bench = Bench()
    for row, wish in enumerate((None, 0, 4)):
        bench.add(row, [1], SamplingParams(logprobs=wish))
    results = bench.step(logits_of(1, 3))
    assert [len(result.logprobs) for result in results] == [0, 1, 1]
    assert [len(result.logprobs[0].top_ids) for result in results[1:]] == [0, 4]


def test_the_drawn_token_is_the_rows_next_input():
    bench = Bench()
    bench.add(6, [4, 5], SamplingParams(temperature=0.0))
    drawn = [bench.step(logits_of(seed), [6])[0].tokens[0] for seed in range(3)]
    assert bench.table.tokens[6, :5].tolist() == [4, 5, *drawn]
