"""Native attention against a plain formula in float64: every page type, instruction set, shape, window and mixture."""

import numpy as np
import pytest

from fakes.native_ops import AttentionStep, Floats, Layer, Sequences
from sayfa import _native

ISAS = _native.isas()
# Largest difference over the largest value. Pages of 2 and 1 bytes: queries and weights are rounded to bf16 where the
# dot-product instruction is used, else only keys and values, which the reference below rounds alike.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2}


def rounded(x: Floats, kv_type: str, head_dim: int) -> np.ndarray:
    """What a page of this type gives back."""
    if kv_type == "float32":
        return x.astype(np.float64)
    if kv_type == "bfloat16":
        bits = x.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    heads = x.reshape(len(x), -1, head_dim)
    scale = np.abs(heads).max(axis=2, keepdims=True) / np.float32(127)
    steps = heads * (np.float32(1) / scale)  # float32, so that a value halfway between two steps goes the same way
    return (np.trunc(steps + np.copysign(np.float32(0.5), steps)) * scale.astype(np.float64)).reshape(x.shape)


def reference(layer: Layer, data: Sequences, row: tuple[int, int], num_heads: int, window: int) -> np.ndarray:
    """Softmax attention in float64 of one query token: row is (sequence, position). Returns [1, num_heads * dim]."""
    sequence, position = row
    dim, group = layer.head_dim, num_heads // layer.kv_heads
    key = rounded(data.key[sequence], layer.kv_type, dim).reshape(-1, layer.kv_heads, dim)
    value = rounded(data.value[sequence], layer.kv_type, dim).reshape(-1, layer.kv_heads, dim)
    query = data.query[sequence].astype(np.float64).reshape(-1, num_heads, dim)
    out = np.empty((num_heads, dim))
    lo = max(0, position + 1 - window) if window else 0
    for h in range(num_heads):
        score = key[lo : position + 1, h // group] @ query[position, h] * dim**-0.5
        weight = np.exp(score - score.max())
        out[h] = weight @ value[lo : position + 1, h // group] / weight.sum()
    return out.reshape(1, -1)


def assert_close(got: Floats, want: np.ndarray, tolerance: float, what: str) -> None:
    assert np.isfinite(got).all(), f"{what}: {np.argwhere(~np.isfinite(got))[:5].tolist()} are not finite"
    error = np.abs(got - want)
    bound = tolerance * np.abs(want).max()
    assert error.max() <= bound, (
        f"{what}: largest difference {error.max():.2e}, mean {error.mean():.2e}, bound {bound:.2e}"
    )


def check(
    layer: Layer,
    num_heads: int,
    *,
    isa: str,
    threads: int = 2,
    window: int = 0,
    tail: int = 3,
    attend_first: bool = True,
) -> None:
    """Write everything but the last `tail` tokens in one step, the rest in the next; compare both steps' rows.

    Without `attend_first` the first step only writes keys and values.
    """
    data = Sequences.random(layer, num_heads, seed=layer.seed + 1)
    call = AttentionStep(layer, num_heads, isa=isa, threads=threads, window=window)
    cuts = [max(0, length - tail) for length in layer.lengths]
    first = [(s, 0, cut) for s, cut in enumerate(cuts) if cut]
    second = [(s, cut, layer.lengths[s]) for s, cut in enumerate(cuts)]
    for chunks in (first, second):
        if chunks is first and not attend_first:
            call.write(data, chunks)
            continue
        for (s, start, end), got in zip(chunks, call(data, chunks), strict=True):
            step = max(1, (end - start) // 9)
            picked = list(range(start, end, step))
            want = np.concatenate([reference(layer, data, (s, p), num_heads, window) for p in picked])
            tolerance = TOLERANCE[layer.kv_type] if isa == "avx512bf16" else 3e-5
            if layer.kv_type == "int8" and isa != "avx512bf16":
                tolerance = 1e-4
            assert_close(got[::step], want, tolerance, f"{isa} {layer.kv_type} sequence {s} positions {start}..{end}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_a_mixture_of_lengths_equals_the_formula(isa: str, kv_type: str, page_size: int) -> None:
    """Lengths on both sides of page and block borders, one sequence of one token, in one step."""
    lengths = [1, 2, page_size - 1, page_size, page_size + 1, 255, 256, 257, 513]
    check(Layer(3, 64, page_size, kv_type, lengths, seed=page_size), 9, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [16, 20, 32, 64, 72, 80, 96, 112, 128, 144, 200, 256])
def test_every_head_dim_equals_the_formula(isa: str, head_dim: int) -> None:
    for kv_type in ("float32", "bfloat16", "int8"):
        check(Layer(2, head_dim, 32, kv_type, [5, 70, 300], seed=head_dim), 4, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (14, 2), (16, 2), (32, 1), (40, 1), (71, 1)])
def test_every_group_size_equals_the_formula(isa: str, heads: int, kv_heads: int) -> None:
    for kv_type in ("float32", "bfloat16"):
        check(Layer(kv_heads, 32, 16, kv_type, [3, 40, 290], seed=heads), heads, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [1, 2, 7, 16, 33, 255, 256, 300, 10_000])
def test_sliding_windows_equal_the_formula(isa: str, window: int) -> None:
    for kv_type in ("float32", "bfloat16", "int8"):
        check(Layer(2, 32, 16, kv_type, [1, 34, 600], seed=window), 6, isa=isa, window=window, tail=40)


@pytest.mark.parametrize("isa", ISAS)
def test_long_contexts_equal_the_formula(isa: str) -> None:
    """5,000 keys, where the work of one sequence is shared out, and sharp scores, where one key decides."""
    for kv_type in ("float32", "bfloat16", "int8"):
        layer = Layer(3, 64, 32, kv_type, [5000, 4097], seed=7)
        check(layer, 9, isa=isa, threads=3, tail=1, attend_first=False)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "int8"])
def test_sharp_scores_do_not_overflow(isa: str, kv_type: str) -> None:
    """Scores of some thousands: the largest key takes all weight, and nothing becomes infinite."""
    layer = Layer(2, 64, 32, kv_type, [400], seed=3)
    data = Sequences.random(layer, 4, seed=4, peak=300.0)
    got = AttentionStep(layer, 4, isa=isa)(data, [(0, 0, 400)])[0]
    assert np.isfinite(got).all()
    assert np.abs(got).max() <= np.abs(data.value[0]).max() * 1.01


@pytest.mark.parametrize("isa", ISAS)
def test_an_empty_step_and_empty_rows_do_nothing(isa: str) -> None:
    layer = Layer(2, 32, 16, "bfloat16", [20, 20], seed=1)
    data = Sequences.random(layer, 4, seed=1)
    call = AttentionStep(layer, 4, isa=isa, threads=2)
    assert call(data, []) == []
    alone = call(data, [(0, 0, 20)])[0]
    with_empty = call(data, [(1, 0, 0), (0, 0, 20), (1, 0, 0)])
    assert len(with_empty[0]) == 0
    assert np.array_equal(with_empty[1], alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "int8"])
def test_a_nan_in_a_key_or_value_reaches_the_rows_that_see_it_and_no_others(isa: str, kv_type: str) -> None:
    """A broken number may not be smoothed away (the finite check must see it), nor touch another sequence."""
    for which in ("key", "value"):
        layer = Layer(2, 32, 16, kv_type, [300, 50], seed=5)
        data = Sequences.random(layer, 4, seed=6)
        getattr(data, which)[0][100, 3] = np.nan
        got = AttentionStep(layer, 4, isa=isa, threads=2)(data, [(0, 0, 300), (1, 0, 50)])
        seen = got[0].reshape(300, 4, 32)[100:, :2]  # KV head 0 serves query heads 0 and 1
        assert np.isnan(seen).any(axis=2).all()
        assert np.isfinite(got[1]).all()
