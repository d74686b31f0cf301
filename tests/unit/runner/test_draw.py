"""Laws of the draw: it equals the rule written out in plain Python, and no numbers in range upset it."""

import itertools
import math

import numpy as np
import pytest

from sayfa.runner.draw import LOGPROB_FLOOR, DrawColumns, draw, largest


def columns(rows, **wishes):
    """One column record for all rows; each wish is a number or a list."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "uniform": 0.5, "num_top": -1}
    types = {"top_k": np.int32, "num_top": np.int32, "uniform": np.float64}
    return DrawColumns(**{
        name: np.broadcast_to(np.asarray(wishes.get(name, value), types.get(name, np.float32)), rows).copy()
        for name, value in defaults.items()
    })  # fmt: skip


def by_the_rule(row, *, temperature, top_k, top_p, min_p, uniform):
    """The rule in plain Python, one token at a time."""
    if any(math.isnan(x) or x == math.inf for x in row) or all(x == -math.inf for x in row):
        return -1
    if temperature < 1e-5:
        return max(range(len(row)), key=lambda i: (row[i], -i))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    kept = order[:top_k] if top_k > 0 else order
    weight = {i: math.exp((row[i] - row[order[0]]) / temperature) for i in kept}
    total = math.fsum(weight.values())
    p = {i: w / total for i, w in weight.items() if w > 0}
    p = {i: x for i, x in p.items() if x >= min_p * max(p.values())}
    if top_p < 1:
        chosen, reached = [], 0.0
        for i in sorted(p, key=lambda i: (-p[i], i)):
            chosen.append(i)
            reached += p[i]
            if reached >= top_p:
                break
        p = {i: p[i] for i in chosen}
    goal, walked = uniform * math.fsum(p.values()), 0.0
    for i in sorted(p):
        walked += p[i]
        if walked > goal:
            return i
    return max(p)


@pytest.mark.parametrize("seed", range(20))
def test_draw_equals_the_rule(seed):
    """Every mixture of wishes, on rows with many ties."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 60))
    logits = (rng.integers(-8, 8, (32, vocab)) / 2).astype(np.float32)
    logits[rng.random((32, vocab)) < 0.1] = -np.inf
    wishes = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], 32).astype(np.float32),
        "top_k": rng.choice([-1, 0, 1, 3, vocab, 10**9], 32).astype(np.int32),
        "top_p": rng.choice([0.05, 0.5, 0.9, 1.0], 32).astype(np.float32),
        "min_p": rng.choice([0.0, 0.05, 0.6, 1.0], 32).astype(np.float32),
        "uniform": rng.random(32),
    }
    found = draw(logits.copy(), columns(32, **wishes)).token
    for index in range(32):
        mine = {name: column[index].item() for name, column in wishes.items()}
        expected = by_the_rule(logits[index].tolist(), **mine)
        assert found[index] == expected, f"row {index}: {mine}"


@pytest.mark.parametrize(("top_p", "last"), [(0.25, 0), (0.5, 1), (0.75, 2), (0.76, 3), (1.0, 3)])
def test_a_sum_that_reaches_top_p_exactly_is_enough(top_p, last):
    """Four equal tokens of a quarter each: lower ids are kept first, and no more than needed."""
    drawn = draw(np.zeros((1, 4), np.float32), columns(1, top_p=top_p, uniform=0.999))
    assert drawn.token[0] == last


def test_frequencies_follow_the_softmax():
    """20,000 evenly spread numbers hit each id in proportion to its probability, within half a per mille."""
    logits = np.random.default_rng(0).normal(size=17).astype(np.float32)
    grid = (np.arange(20_000) + 0.5) / 20_000
    tokens = draw(np.tile(logits, (20_000, 1)), columns(20_000, temperature=0.8, uniform=grid)).token
    weights = np.exp(logits.astype(np.float64) / np.float32(0.8))
    np.testing.assert_allclose(np.bincount(tokens, minlength=17) / 20_000, weights / weights.sum(), atol=5e-4)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_row_gives_minus_one_and_its_neighbours_do_not_notice(broken):
    logits = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    whole = draw(logits.copy(), columns(5, num_top=2))
    logits[2, 31] = broken
    found = draw(logits.copy(), columns(5, num_top=2))
    assert found.token[2] == -1
    for name in ("token", "logprob", "top_ids"):
        np.testing.assert_array_equal(
            np.delete(getattr(found, name), 2, 0), np.delete(getattr(whole, name), 2, 0), err_msg=name
        )


def test_a_row_of_masked_ids_only_gives_minus_one():
    assert draw(np.full((1, 9), -np.inf, np.float32), columns(1)).token[0] == -1


def test_all_extreme_numbers_in_range_end_with_an_allowed_id():
    """Temperature, top-p, min-p, noise and logits at the ends of their ranges, in all combinations (B032)."""
    rows = {
        "flat": np.zeros(50), "huge": np.linspace(-3e38, 3e38, 50), "one": np.r_[np.full(49, -np.inf), 7.0],
        "tiny": np.full(50, 1e-38),
    }  # fmt: skip
    for name, row in rows.items():
        for t, p, m, k, u in itertools.product(
            [1e-9, 1e-5, 1.0, 100.0], [1e-7, 1.0], [0.0, 1.0], [0, 1, 2**31 - 1], [0.0, 1 - 2**-53]
        ):
            logits = row.astype(np.float32)[None]
            wishes = columns(1, temperature=t, top_p=p, min_p=m, top_k=k, uniform=u, num_top=20)
            drawn = draw(logits, wishes)
            assert 0 <= drawn.token[0] < 50, (name, t, p, m, k, u)
            assert np.isfinite(logits[0, drawn.token[0]])
            assert np.isfinite(drawn.logprob).all()
            assert np.isfinite(drawn.top_logprobs).all()


def test_logprobs_are_those_of_the_logits_and_bounded_below():
    """Best first, lower ids first among equals, -9999 for what cannot happen (B013)."""
    logits = np.array([[1.0, 3.0, 3.0, -np.inf, 0.0]], np.float32)
    drawn = draw(logits, columns(1, temperature=0.0, num_top=5))
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    assert drawn.token[0] == 1
    assert drawn.rank[0] == 1
    assert drawn.top_ids[0].tolist() == [1, 2, 0, 4, 3]
    np.testing.assert_allclose(drawn.top_logprobs[0, :4], expected[[1, 2, 0, 4]], rtol=1e-6)
    assert drawn.top_logprobs[0, 4] == LOGPROB_FLOOR
    np.testing.assert_allclose(drawn.logprob[0], expected[1], rtol=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_largest_equals_sorting(seed):
    values = np.random.default_rng(seed).integers(0, 6, 40).astype(np.float32)
    for count in (0, 1, 7, 39, 40):
        assert largest(values, count).tolist() == sorted(range(40), key=lambda i: (-values[i], i))[:count]
