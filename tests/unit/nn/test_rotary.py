"""Laws of the rotary tables: frequencies equal those of transformers, and angles are position × frequency."""

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sayfa.base.model_config import RopeConfig
from sayfa.nn.layers.rotary import inverse_frequencies, rope_table

SCALINGS = {
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "llama3 without a blend": {
        "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_frequencies_equal_those_of_transformers(name, theta, dim):
    kind, fields = name.split()[0], SCALINGS[name]
    rope = {"rope_type": kind, "rope_theta": theta, **fields}
    config = LlamaConfig(hidden_size=dim * 4, num_attention_heads=4, head_dim=dim, rope_parameters=rope)
    theirs = ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0].numpy()
    named = {key: value for key, value in fields.items() if key != "original_max_position_embeddings"}
    ours = RopeConfig(theta=theta, rotary_dim=dim, scaling=kind, **named)
    np.testing.assert_allclose(inverse_frequencies(ours), theirs, rtol=1e-6)


def test_divisors_of_a_file_take_the_place_of_a_scaling():
    divisors = [1.0, 2.0, 8.0, 32.0]
    rope = RopeConfig(rotary_dim=8, frequencies=divisors)
    plain = inverse_frequencies(RopeConfig(rotary_dim=8))
    np.testing.assert_allclose(inverse_frequencies(rope), plain / np.array(divisors), rtol=1e-6)


def test_table_holds_cos_and_sin_of_each_position():
    rope = RopeConfig(rotary_dim=32, style="adjacent")
    table = rope_table(rope, 100)
    angles = np.outer(np.arange(100), inverse_frequencies(rope).astype(np.float64))
    assert table.cos.shape == (100, 16)
    assert table.cos.dtype == table.sin.dtype == np.float32
    assert table.style == "adjacent"
    np.testing.assert_allclose(table.cos, np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(table.sin, np.sin(angles), atol=1e-5)
