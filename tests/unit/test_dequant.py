"""Dequantization is bit-equal to the `gguf` package, for every type, over random bytes and real tensors."""

import gguf
import numpy as np
import pytest

from sayfa.base.errors import ModelError
from sayfa.base.gguf import BLOCK_SIZES
from sayfa.models.formats.dequant import dequantize


def reference(raw: np.ndarray, type_name: str) -> np.ndarray:
    if type_name == "F32":
        return raw.view(np.float32)
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name]), np.float32)


@pytest.mark.parametrize("type_name", BLOCK_SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_any_bytes_give_the_same_bits(type_name: str, seed: int) -> None:
    """Random scales are infinite or no numbers at times; these must be the same too."""
    rng = np.random.default_rng(seed)
    values, num_bytes = BLOCK_SIZES[type_name]
    rows, blocks = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    raw = rng.integers(0, 256, (rows, blocks * num_bytes), dtype=np.uint8)
    ours = dequantize(raw.reshape(-1), type_name, (rows, blocks * values))
    assert ours.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32), reference(raw, type_name).reshape(ours.shape).view(np.uint32))


@pytest.mark.parametrize("type_name", BLOCK_SIZES)
def test_tensors_longer_than_a_group_are_put_together_rightly(type_name: str) -> None:
    values, num_bytes = BLOCK_SIZES[type_name]
    rng = np.random.default_rng(9)
    blocks = (3 << 18) // values + 5
    raw = rng.integers(0, 256, (1, blocks * num_bytes), dtype=np.uint8)
    ours = dequantize(raw.reshape(-1), type_name, (1, blocks * values))
    assert np.array_equal(ours.view(np.uint32), reference(raw, type_name).reshape(ours.shape).view(np.uint32))


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_real_weights_come_back_within_the_step_of_their_type(type_name: str) -> None:
    """Independent of the reference's dequantizer: quantize, read, and compare with what went in."""
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(16, 256)).astype(np.float32)
    raw = np.ascontiguousarray(gguf.quants.quantize(weights, gguf.GGMLQuantizationType[type_name])).view(np.uint8)
    bits = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "F16": 11, "BF16": 8}[type_name]
    error = np.abs(dequantize(raw.reshape(-1), type_name, weights.shape) - weights).max()
    assert 0 < error < 2 * np.abs(weights).max() / 2**bits * 1.1


@pytest.mark.parametrize("num_bytes", [0, 17, 19, 36])
def test_a_wrong_number_of_bytes_is_refused(num_bytes: int) -> None:
    with pytest.raises(ModelError, match="Q4_0"):
        dequantize(np.zeros(num_bytes, np.uint8), "Q4_0", (1, 32))


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"I64.*Q6_K"):
        dequantize(np.zeros(8, np.uint8), "I64", (1,))


def test_the_result_is_a_copy_of_its_own() -> None:
    raw = np.arange(4, dtype=np.float32).view(np.uint8)
    raw.flags.writeable = False
    values = dequantize(raw, "F32", (2, 2))
    values += 1
    assert values.tolist() == [[1, 2], [3, 4]]
