"""Native small ops against plain formulas in float64, over odd sizes, and the law that a row's bits are its own."""

import numpy as np
import pytest

from fakes.native_ops import Floats, aligned, mat, matrix, program, run, step
from sayfa import _native

ISAS = _native.isas()
WIDTHS = [1, 2, 7, 15, 16, 17, 31, 64, 100, 576, 1537]
ROWS = [1, 2, 3, 13, 100]


def close(got: Floats, want: np.ndarray, what: str, tolerance: float = 2e-6) -> None:
    error = np.abs(got - want)
    scale = np.maximum(np.abs(want), np.abs(want).max(initial=0) * 2e-2)
    worst = (error / np.maximum(scale, 1e-30)).max(initial=0)
    assert worst <= tolerance, f"{what}: largest relative difference {worst:.2e}, largest absolute {error.max():.2e}"


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_equals_the_formula(isa: str, width: int) -> None:
    weight = normal(1, width)
    for rows in ROWS:
        values = normal(rows, rows, width) * 3
        x, out = matrix(values), aligned(rows, width)
        for target in (out, x):  # apart and in place
            calls = program(isa, 2)
            calls.add_rms_norm(mat(x), mat(target), weight.ctypes.data, 1e-5, 0)
            run(calls, *step(num_tokens=rows))
            wide = values.astype(np.float64)
            want = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
            close(target, want, f"{isa} {rows} rows of {width}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [8, 30, 64, 128])
def test_head_norm_equals_the_formula_and_leaves_other_columns(isa: str, dim: int) -> None:
    rows, heads = 13, 5
    values, weight = normal(2, rows, heads * dim + 32), normal(3, dim)
    x = matrix(values)
    calls = program(isa, 2)
    calls.add_head_norm(mat(x[:, 16 : 16 + heads * dim]), heads, dim, weight.ctypes.data, 1e-6)
    run(calls, *step(num_tokens=rows))
    inside = values[:, 16 : 16 + heads * dim].reshape(rows, heads, dim).astype(np.float64)
    want = inside / np.sqrt((inside**2).mean(axis=2, keepdims=True) + 1e-6) * weight
    close(x[:, 16 : 16 + heads * dim], want.reshape(rows, -1), f"{isa} dim {dim}")
    assert np.array_equal(x[:, :16], values[:, :16])
    assert np.array_equal(x[:, 16 + heads * dim :], values[:, 16 + heads * dim :])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 128), (80, 32), (16, 6), (10, 10)])
def test_rope_equals_the_formula(isa: str, adjacent: bool, dim: int, rotary: int) -> None:
    heads, limit = 3, 50
    angle = np.outer(np.arange(limit), 10000.0 ** (-np.arange(rotary // 2) * 2 / rotary))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    for rows in ROWS:
        values = normal(rows, rows, heads * dim)
        positions = np.random.default_rng(rows).integers(0, limit, rows).astype(np.int32)
        x = matrix(values)
        calls = program(isa, 2)
        calls.add_rope(mat(x), heads, dim, rotary, cos.ctypes.data, sin.ctypes.data, adjacent)
        run(calls, *step(positions=positions))
        want = values.astype(np.float64).reshape(rows, heads, dim)
        half = rotary // 2
        first = slice(0, rotary, 2) if adjacent else slice(0, half)
        second = slice(1, rotary, 2) if adjacent else slice(half, rotary)
        a, b = want[..., first].copy(), want[..., second].copy()
        c, s = cos[positions][:, None].astype(np.float64), sin[positions][:, None].astype(np.float64)
        want[..., first], want[..., second] = a * c - b * s, b * c + a * s
        close(x, want.reshape(rows, -1), f"{isa} {rows} rows, dim {dim}, rotary {rotary}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("act", [0, 1])
def test_act_mul_equals_the_formula(isa: str, width: int, act: int) -> None:
    for rows in ROWS:
        values = normal(rows, rows, 2 * width) * 4
        values[0, 0] = -200.0  # the exponential leaves float32 here
        x, out = matrix(values), aligned(rows, width)
        calls = program(isa, 2)
        calls.add_act_mul(mat(x), mat(out), act)
        run(calls, *step(num_tokens=rows))
        gate, up = values[:, :width].astype(np.float64), values[:, width:].astype(np.float64)
        inner = gate if act == 0 else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        with np.errstate(over="ignore"):
            want = gate / (1 + np.exp(-inner)) * up
        close(out, want, f"{isa} {rows} rows of {width}", 5e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_and_gather_are_exact(isa: str, width: int) -> None:
    for rows in ROWS:
        a, b = normal(rows, rows, width), normal(rows + 1, rows, width)
        x, y = matrix(a), matrix(b)
        calls = program(isa, 2)
        calls.add_add(mat(x), mat(y), 0)
        picked = np.random.default_rng(rows).integers(0, rows, 7).astype(np.int32)
        out = aligned(7, width)
        calls.add_gather(mat(x), mat(out))
        run(calls, *step(num_tokens=rows, logit_rows=picked))
        assert np.array_equal(x, a + b)
        assert np.array_equal(out, (a + b)[picked])


def one_of_each(isa: str, threads: int, x: Floats, positions: np.ndarray) -> Floats:
    """rms_norm, head_norm, rope, act_mul one after another on rows [T, 96]; returns [T, 48]."""
    weight, cos, sin = normal(1, 96), np.cos(normal(2, 40, 8)), np.sin(normal(2, 40, 8))
    buffer, out = matrix(x), aligned(len(x), 48)
    calls = program(isa, threads)
    calls.add_rms_norm(mat(buffer), mat(buffer), weight.ctypes.data, 1e-5, 0)
    calls.add_head_norm(mat(buffer), 3, 32, weight.ctypes.data, 1e-5)
    calls.add_rope(mat(buffer), 3, 32, 16, cos.ctypes.data, sin.ctypes.data, False)
    calls.add_act_mul(mat(buffer), mat(out), 0)
    run(calls, *step(positions=positions.astype(np.int32)))
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(3))
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(isa: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, positions = normal(seed, 100, 96), rng.integers(0, 40, 100)
    want = one_of_each(isa, 1, x, positions)
    for threads in (1, 2, 3):
        picked = rng.choice(100, int(rng.integers(1, 14)), replace=False)
        got = one_of_each(isa, threads, x[picked], positions[picked])
        assert np.array_equal(got.view(np.uint32), want[picked].view(np.uint32)), f"{isa} rows {picked.tolist()}"


@pytest.mark.parametrize("isa", ISAS)
def test_not_a_number_stays_in_its_row_and_is_not_lost(isa: str) -> None:
    x, positions = normal(1, 5, 96), np.arange(5)
    want = one_of_each(isa, 2, x, positions)
    for bad in (np.nan, np.inf, -np.inf):
        x[2, 7] = bad
        got = one_of_each(isa, 2, x, positions)
        assert np.isnan(got[2]).any()
        assert np.array_equal(np.delete(got, 2, axis=0), np.delete(want, 2, axis=0))
