"""The native draw means what runner/draw.py says: same tokens, same log-probabilities, on every instruction set.

The two round differently (float32 weights here, float64 there), so a token is right when the reference draws it for a
uniform number, top-p or min-p that is 3e-6 away.
"""

from itertools import product

import numpy as np
import pytest

from fakes.native_ops import Floats
from sayfa import _native
from sayfa.runner.draw import DrawColumns, Drawn, draw

ISAS = _native.isas()
NEAR = 3e-6


def columns(num_rows: int, **given: object) -> DrawColumns:
    """Greedy rows without log-probabilities, but for what is given (one number for all rows, or an array)."""
    kinds = {
        "temperature": (0.0, np.float32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "top_k": (0, np.int32),
        "uniform": (0.5, np.float64),
        "num_top": (-1, np.int32),
    }
    unknown = set(given) - set(kinds)
    assert not unknown
    return DrawColumns(
        **{
            name: np.resize(np.asarray(given.get(name, default), kind), num_rows)
            for name, (default, kind) in kinds.items()
        }
    )


def native(logits: Floats, ask: DrawColumns, isa: str, threads: int = 2) -> Drawn:
    """Call the native draw on a copy of the logits whose rows are not next to each other."""
    num_rows, vocab = logits.shape
    spread = np.full((num_rows, vocab + 5), np.nan, np.float32)
    spread[:, :vocab] = logits
    width = max(1, int(ask.num_top.max(initial=0)))
    out = Drawn(
        np.full(num_rows, -7, np.int32),
        np.full(num_rows, -9999.0, np.float32),
        np.zeros(num_rows, np.int32),
        np.zeros((num_rows, width), np.int32),
        np.full((num_rows, width), -9999.0, np.float32),
    )
    _native.sample(
        _native.Pool(threads), isa, spread.ctypes.data, vocab + 5, num_rows, vocab,
        ask.temperature.ctypes.data, ask.top_p.ctypes.data, ask.min_p.ctypes.data, ask.top_k.ctypes.data,
        ask.uniform.ctypes.data, out.token.ctypes.data, ask.num_top.ctypes.data, width, out.logprob.ctypes.data,
        out.rank.ctypes.data, out.top_ids.ctypes.data, out.top_logprobs.ctypes.data,
    )  # fmt: skip
    assert np.array_equal(spread[:, :vocab], logits, equal_nan=True), "the draw changed the logits"
    return out


def reference_range(logits: Floats, ask: DrawColumns) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest token that the reference draws for numbers next to those asked."""
    tokens = []
    for u, p, m in product((-NEAR, 0, NEAR), (-NEAR, 0, NEAR), (-NEAR, 0, NEAR)):
        if p and not (ask.top_p < 1).any():
            continue
        if m and not (ask.min_p > 0).any():
            continue
        near = DrawColumns(
            temperature=ask.temperature,
            top_p=np.where(ask.top_p < 1, ask.top_p + p, 1.0).astype(np.float64),
            min_p=np.where(ask.min_p > 0, np.minimum(ask.min_p * (1 + m), 1.0), 0.0).astype(np.float64),
            top_k=ask.top_k,
            uniform=np.clip(ask.uniform + u, 0.0, 1 - 1e-12),
            num_top=ask.num_top,
        )
        tokens.append(draw(logits, near).token)
    return np.min(tokens, axis=0), np.max(tokens, axis=0)


def logits_of(rng: np.random.Generator, rows: int, vocab: int, kind: str) -> Floats:
    """Rows as models give them (peaked), flat ones, ones with many equal values, and ones with masked ids."""
    x = rng.standard_normal((rows, vocab))
    if kind == "peaked":
        x *= 4
    if kind == "flat":
        x *= 0.01
    if kind == "equal":
        x = np.round(x)
    if kind == "masked":
        x[rng.random((rows, vocab)) < 0.9] = -np.inf
        x[:, int(rng.integers(vocab))] = 0.0
    return x.astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["peaked", "flat", "equal", "masked"])
@pytest.mark.parametrize("vocab", [1, 2, 17, 1000, 1024, 5003])
def test_the_native_draw_draws_what_the_reference_draws(isa: str, kind: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 24
    for _ in range(4):
        logits = logits_of(rng, rows, vocab, kind)
        ask = columns(
            rows,
            temperature=rng.choice([0.0, 0.3, 1.0, 2.5], rows),
            top_k=rng.choice([0, 1, 2, 5, 40, 700, vocab, 10**6], rows),
            top_p=rng.choice([1.0, 0.999, 0.9, 0.5, 1e-6], rows),
            min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0], rows),
            uniform=rng.choice([0.0, 0.25, 1 - 1e-9], rows) if rng.random() < 0.3 else rng.random(rows),
        )
        got = native(logits, ask, isa).token
        least, most = reference_range(logits, ask)
        wrong = np.flatnonzero((got < least) | (got > most))
        assert len(wrong) == 0, (
            f"{isa} {kind} vocab {vocab} row {wrong[0]}: drew {got[wrong[0]]}, reference {least[wrong[0]]}.."
            f"{most[wrong[0]]}; temperature {ask.temperature[wrong[0]]} top_k {ask.top_k[wrong[0]]} "
            f"top_p {ask.top_p[wrong[0]]} min_p {ask.min_p[wrong[0]]} uniform {ask.uniform[wrong[0]]}"
        )


@pytest.mark.parametrize("isa", ISAS)
def test_the_first_and_the_last_survivor_are_the_reference_s(isa: str) -> None:
    """A uniform of 0 draws the lowest surviving id, one next to 1 the highest: so the surviving sets are equal."""
    rng = np.random.default_rng(5)
    for vocab in (100, 49152):
        for kind in ("peaked", "flat"):
            logits = np.repeat(logits_of(rng, 6, vocab, kind), 2, axis=0)
            ask = columns(
                12,
                temperature=0.8,
                uniform=np.resize([0.0, 1 - 1e-12], 12),
                top_k=np.repeat([0, 0, 50, 50, 3000, 0], 2),
                top_p=np.repeat([0.9, 0.5, 1.0, 0.9, 0.9, 1.0], 2),
                min_p=np.repeat([0.0, 0.0, 0.0, 0.0, 0.0, 0.02], 2),
            )
            least, most = reference_range(logits, ask)
            got = native(logits, ask, isa).token
            assert ((got >= least) & (got <= most)).all(), f"{isa} {vocab} {kind}: {got} outside {least}..{most}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 3, 16, 1023, 1025, 49152])
def test_greedy_takes_the_lowest_id_among_equals(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(0, 4, (16, vocab)).astype(np.float32)
    got = native(logits, columns(16), isa).token
    assert np.array_equal(got, logits.argmax(axis=1))
    rare = rng.standard_normal((16, vocab)).astype(np.float32)
    assert np.array_equal(native(rare, columns(16), isa).token, rare.argmax(axis=1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [5, 1000, 3001])
def test_log_probabilities_ranks_and_best_ids_are_the_reference_s(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for kind in ("peaked", "flat", "equal", "masked"):
        logits = logits_of(rng, 12, vocab, kind)
        ask = columns(12, temperature=0.0, num_top=rng.choice([-1, 0, 1, 5, 20, 400], 12))
        got, want = native(logits, ask, isa), draw(logits, ask)
        assert np.array_equal(got.token, want.token)
        assert np.array_equal(got.rank, want.rank)
        assert np.array_equal(got.top_ids, want.top_ids), f"{isa} {kind} {vocab}"
        assert np.allclose(got.logprob, want.logprob, atol=2e-5, rtol=1e-6)
        assert np.allclose(got.top_logprobs, want.top_logprobs, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_rank_and_log_probability_of_a_drawn_token(isa: str) -> None:
    rng = np.random.default_rng(9)
    logits = logits_of(rng, 32, 2000, "peaked")
    ask = columns(32, temperature=1.5, num_top=3, uniform=rng.random(32))
    got = native(logits, ask, isa)
    wide = logits.astype(np.float64)
    normaliser = wide.max(axis=1) + np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1))
    chosen = wide[np.arange(32), got.token]
    assert np.allclose(got.logprob, chosen - normaliser, atol=2e-5)
    assert np.array_equal(got.rank, (wide > chosen[:, None]).sum(axis=1) + 1)
    assert (got.rank > 1).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("place", [0, 15, 16, 999, 1000, 1499])
def test_a_broken_row_gives_minus_one_and_touches_no_other(isa: str, place: int) -> None:
    rng = np.random.default_rng(place)
    logits = logits_of(rng, 9, 1500, "peaked")
    ask = columns(
        9, temperature=np.resize([0.0, 1.0], 9), num_top=2, top_k=np.resize([0, 0, 20], 9), uniform=rng.random(9)
    )
    want = native(logits, ask, isa)
    broken = logits.copy()
    broken[1, place], broken[2, place], broken[3] = np.nan, np.inf, -np.inf
    broken[4, place] = -np.nan
    got = native(broken, ask, isa)
    assert got.token[1:5].tolist() == [-1] * 4
    fine = [0, 5, 6, 7, 8]
    for name in ("token", "logprob", "rank", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(got, name)[fine], getattr(want, name)[fine])
    masked = logits.copy()
    masked[0, place] = -np.inf  # a masked id is no fault
    assert native(masked, ask, isa).token[0] not in (-1, place)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_is_drawn_alike_alone_and_in_a_crowd(isa: str) -> None:
    rng = np.random.default_rng(3)
    logits = logits_of(rng, 40, 3000, "peaked")
    ask = columns(
        40,
        temperature=rng.choice([0.0, 0.7, 1.0], 40),
        top_k=rng.choice([0, 30], 40),
        top_p=rng.choice([1.0, 0.9], 40),
        uniform=rng.random(40),
        num_top=4,
    )
    want = native(logits, ask, isa, threads=1)
    for threads in (1, 2, 3):
        rows = rng.choice(40, 7, replace=False)
        part = DrawColumns(**{name: getattr(ask, name)[rows] for name in DrawColumns.__dataclass_fields__})
        got = native(logits[rows], part, isa, threads)
        for name in ("token", "logprob", "rank", "top_ids", "top_logprobs"):
            assert np.array_equal(getattr(got, name), getattr(want, name)[rows])


@pytest.mark.parametrize("isa", ISAS)
def test_draws_follow_the_distribution(isa: str) -> None:
    """Twenty thousand draws over six ids: chi-square below the 0.001 border of 5 degrees of freedom."""
    logits = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.15, 0.05], np.float32))
    num = 20_000
    uniform = np.random.default_rng(1).random(num)
    drawn = native(np.tile(logits, (num, 1)), columns(num, temperature=1.0, uniform=uniform), isa).token
    counts = np.bincount(drawn, minlength=6)
    want = np.exp(logits) * num
    assert ((counts - want) ** 2 / want).sum() < 20.5
