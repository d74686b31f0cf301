"""Rotary tables: a checkpoint's rope facts → cos and sin for each position. Called by the model files at load.

Idea: Su et al., RoFormer (2021). "llama3" scaling keeps short wavelengths, divides long ones by `factor` and blends
between, as published with Llama 3.1; "linear" divides all of them.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sayfa.base.model_config import RopeConfig
from sayfa.nn.program.program import RopeTable


def inverse_frequencies(rope: RopeConfig) -> NDArray[np.float32]:
    """Radians per position for each pair [rotary_dim / 2], float32, scaling applied."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = (1.0 / rope.theta**exponents).astype(np.float32)
    if rope.frequencies is not None:
        return (plain / np.asarray(rope.frequencies, np.float32)).astype(np.float32)
    if rope.scaling == "linear":
        return plain / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return _llama3(plain.astype(np.float64), rope).astype(np.float32)
    return plain


def _llama3(plain: NDArray[np.float64], rope: RopeConfig) -> NDArray[np.float64]:
    turns = rope.original_context * plain / (2 * math.pi)  # turns that a pair makes within the original context
    width = rope.high_freq_factor - rope.low_freq_factor
    kept = (turns - rope.low_freq_factor) / width if width else np.sign(turns - rope.low_freq_factor)
    blend = np.clip(kept, 0.0, 1.0)
    return (1.0 - blend) * plain / rope.factor + blend * plain


def rope_table(rope: RopeConfig, num_positions: int) -> RopeTable:
    """Make the table of one rope for positions [0, num_positions).

    Angles are float32 products, as the models were trained and as the usual implementations compute them: at position
    10,000 an angle of more precision would differ from theirs by up to 6e-4.
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies(rope)[None, :]
    return RopeTable(np.cos(angles), np.sin(angles), rope.style)
