"""Noise of the draw, keyed by (seed, position) and by nothing else. Called by `sampler`.

So an answer is the same alone or in a crowd, and the same after a preemption.

A counter-based generator: two rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014) over seed and position.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_POSITION_STEP = np.uint64(0xD1B54A32D192ED03)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, 53 bits, from the row's seed and the position of the token that is drawn."""
    keys = _mix(seeds + _GOLDEN)
    bits = _mix(keys ^ ((positions.astype(np.uint64) + np.uint64(1)) * _POSITION_STEP))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
