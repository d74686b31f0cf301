"""Weight products: each type equals its own dequantized weights, and a row never notices its neighbours."""

import numpy as np
import pytest

from fakes.single_op import BLOCKS, FLOATS, K_QUANTS, Product, plain, quantized, random_piece, to_bf16
from sayfa.nn.program.native import isas
from sayfa.nn.program.program import Weight

ALL = [*BLOCKS, *FLOATS]
ISAS = isas()
ROWS = [*range(1, 14), 32, 100]


def _expected(weight: Weight, x: np.ndarray, type_name: str, isa: str = "") -> np.ndarray:
    """The product in float64, with the activations as the format sees them on an instruction set ("": the best)."""
    if type_name in BLOCKS:
        seen = quantized(x)
    else:
        rounded = (
            type_name != "F32" and (isa or ISAS[0]) == "avx512bf16"
        )  # the others have no product of bfloat16 pairs
        seen = to_bf16(x) if rounded else x.astype(np.float64)
    w = plain(weight)
    return seen @ (to_bf16(w) if type_name == "F16" else w.astype(np.float64)).T


def _tolerance(weight: Weight, x: np.ndarray, type_name: str) -> np.ndarray:
    """Rounding of the sums; for K-quants also of group scales and minima to float16 (one part in 2048)."""
    size = np.abs(x).astype(np.float64) @ np.abs(plain(weight)).astype(np.float64).T
    if type_name in K_QUANTS:
        return size * 2.5e-3 + 1e-6
    return size * (2e-6 if type_name in FLOATS else 1e-5) + 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ALL)
def test_product_equals_the_dequantized_weights(type_name: str, isa: str) -> None:
    """Every type, odd numbers of columns and groups, several seeds: native = float64 within the stated rounding."""
    for seed, (num_rows, n, k) in enumerate([(1, 70, 256), (5, 33, 768), (13, 1, 256), (7, 96, 512)]):
        rng = np.random.default_rng(seed)
        weight = Weight((random_piece(rng, type_name, n, k),))
        x = rng.standard_normal((num_rows, k), dtype=np.float32) * np.float32(2.0) ** rng.integers(-3, 4, (num_rows, 1))
        product = Product(weight)
        got = product.run(product.executor(16, isa=isa), x)
        wanted = _expected(weight, x, type_name, isa)
        worst = np.abs(got - wanted) / _tolerance(weight, x, type_name)
        assert worst.max() <= 1, f"{type_name} {isa}: largest error is {worst.max():.2f} of the tolerance"


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_k_may_be_any_number_of_blocks(type_name: str) -> None:
    """An odd number of groups of 32 (K = 32, 96, 1120)."""
    for k in (32, 96, 1120):
        rng = np.random.default_rng(k)
        weight = Weight((random_piece(rng, type_name, 40, k),))
        x = rng.standard_normal((3, k), dtype=np.float32)
        product = Product(weight)
        got = product.run(product.executor(4), x)
        assert (np.abs(got - _expected(weight, x, type_name)) <= _tolerance(weight, x, type_name)).all()


@pytest.mark.parametrize("k", [1, 2, 31, 33, 577])
@pytest.mark.parametrize("type_name", FLOATS)
@pytest.mark.parametrize("isa", ISAS)
def test_float_weights_take_any_k(type_name: str, k: int, isa: str) -> None:
    """K need not be even, nor a multiple of anything."""
    rng = np.random.default_rng(k)
    weight = Weight((random_piece(rng, type_name, 67, k),))
    x = rng.standard_normal((4, k), dtype=np.float32)
    product = Product(weight)
    got = product.run(product.executor(4, isa=isa), x)
    assert (np.abs(got - _expected(weight, x, type_name, isa)) <= _tolerance(weight, x, type_name)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ALL)
def test_a_rows_bits_do_not_depend_on_its_neighbours(type_name: str, isa: str) -> None:
    """Alone, with any number of others, in any place, with 1, 2 or 3 workers: the same bits."""
    rng = np.random.default_rng(7)
    k = 512
    weight = Weight((random_piece(rng, type_name, 100, k),))
    x = rng.standard_normal((max(ROWS), k), dtype=np.float32)
    alone = None
    for threads in (1, 2, 3):
        product = Product(weight, norm=rng.standard_normal(k, dtype=np.float32) if threads == 0 else None)
        executor = product.executor(max(ROWS), isa=isa, threads=threads)
        if alone is None:
            alone = np.concatenate([product.run(executor, row[None]) for row in x])
        for num_rows in ROWS:
            first = int(rng.integers(0, max(ROWS) - num_rows + 1))
            got = product.run(executor, x[first : first + num_rows])
            differs = np.flatnonzero((got != alone[first : first + num_rows]).any(axis=1))
            assert not len(differs), f"{type_name} {isa}: rows {differs[:5]} of {num_rows} differ, {threads} workers"


@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0", "F32", "BF16"])
def test_a_fused_norm_keeps_the_law_and_the_formula(type_name: str) -> None:
    """RmsNorm → product: right, and the same bits for one row (prepared by each worker) as for many."""
    rng = np.random.default_rng(3)
    k = 576
    weight = Weight((random_piece(rng, type_name, 80, k),))
    norm = rng.uniform(0.5, 1.5, k).astype(np.float32)
    product = Product(weight, norm=norm)
    executor = product.executor(40)
    x = rng.standard_normal((40, k), dtype=np.float32)
    many = product.run(executor, x)
    alone = np.concatenate([product.run(executor, row[None]) for row in x])
    assert (many == alone).all()
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * norm
    exact = normed @ plain(weight).astype(np.float64).T
    scale = np.abs(normed) @ np.abs(plain(weight)).T.astype(np.float64)
    assert (np.abs(many - exact) / scale).max() < (1e-6 if type_name == "F32" else 8e-3)


def test_pieces_may_have_different_types() -> None:
    """q and k in Q4_K, v in Q6_K, one more in F32: columns land where they belong, each within its own rounding."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        types = ["Q4_K", "Q4_K", "Q6_K", "F32", "BF16", "Q8_0"]
        pieces = [random_piece(rng, name, rows, 512) for name, rows in zip(types, [40, 24, 24, 5, 70, 32], strict=True)]
        weight = Weight(tuple(pieces))
        x = rng.standard_normal((9, 512), dtype=np.float32)
        product = Product(weight)
        got = product.run(product.executor(16), x)
        start = 0
        for piece in pieces:
            one = Weight((piece,))
            part = got[:, start : start + piece.rows]
            start += piece.rows
            assert (np.abs(part - _expected(one, x, piece.type)) <= _tolerance(one, x, piece.type)).all(), piece.type


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q6_K", "BF16", "F32"])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gate_and_up_in_one_panel(type_name: str, act: str, isa: str) -> None:
    """Linear → ActMul fused equals product and activation apart, for widths that fill no whole panel too."""
    for width in (16, 40, 96):
        rng = np.random.default_rng(width)
        weight = Weight(tuple(random_piece(rng, type_name, width, 256, name) for name in ("gate", "up")))
        x = rng.standard_normal((7, 256), dtype=np.float32)
        apart = Product(weight)
        both = apart.run(apart.executor(8, isa=isa), x).astype(np.float64)
        gate, up = both[:, :width], both[:, width:]
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        with np.errstate(over="ignore"):
            wanted = (gate / (1 + np.exp(-gate)) if act == "silu" else 0.5 * gate * (1 + np.tanh(inner))) * up
        fused = Product(weight, act=act)
        got = fused.run(fused.executor(8, isa=isa), x)
        np.testing.assert_allclose(got, wanted, rtol=3e-6, atol=1e-5 * np.abs(wanted).max())


def test_bias_and_residual() -> None:
    """out = x w + bias, and out += the same."""
    rng = np.random.default_rng(0)
    weight = Weight((random_piece(rng, "Q8_0", 50, 96), random_piece(rng, "F32", 30, 96)))
    bias = rng.standard_normal(80, dtype=np.float32)
    x, residual = rng.standard_normal((6, 96), dtype=np.float32), rng.standard_normal((6, 80), dtype=np.float32)
    bare, biased, added = Product(weight), Product(weight, bias=bias), Product(weight, bias=bias, add=True)
    y = bare.run(bare.executor(8), x)
    assert (biased.run(biased.executor(8), x) == y + bias).all()
    assert (added.run(added.executor(8), x, residual) == residual + (y + bias)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "BF16", "F32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_says_so_and_harms_nobody(type_name: str, isa: str, bad: float) -> None:
    """NaN or infinity in one row: that row's results are all not finite, its neighbours keep their bits (R13)."""
    rng = np.random.default_rng(5)
    weight = Weight((random_piece(rng, type_name, 64, 256),))
    product = Product(weight)
    executor = product.executor(8, isa=isa)
    x = rng.standard_normal((8, 256), dtype=np.float32)
    good = product.run(executor, x)
    x[3, 17] = bad
    got = product.run(executor, x)
    assert not np.isfinite(got[3]).any()
    assert (np.delete(got, 3, axis=0) == np.delete(good, 3, axis=0)).all()


def test_a_zero_row_gives_zeros() -> None:
    """All-zero activations have no scale; formats without a minimum and with one give exact zeros."""
    rng = np.random.default_rng(6)
    for type_name in BLOCKS:
        product = Product(Weight((random_piece(rng, type_name, 32, 256),)))
        assert (product.run(product.executor(2), np.zeros((2, 256), np.float32)) == 0).all()


def test_dtype_chooses_the_panels_of_float_weights() -> None:
    """F16 as float32 panels is exact; as bfloat16 panels it is rounded, and "auto" says bfloat16 for 16-bit files."""
    rng = np.random.default_rng(8)
    weight = Weight((random_piece(rng, "F16", 32, 64),))
    x = rng.standard_normal((4, 64), dtype=np.float32)
    results = {}
    for dtype in ("auto", "bfloat16", "float32"):
        product = Product(weight)
        results[dtype] = product.run(product.executor(4, dtype=dtype), x)
    exact = x.astype(np.float64) @ plain(weight).astype(np.float64).T
    np.testing.assert_allclose(results["float32"], exact, rtol=1e-5, atol=1e-5)
    assert (results["auto"] == results["bfloat16"]).all()
    assert (results["auto"] != results["float32"]).any()
