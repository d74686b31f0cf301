"""Laws of the noise: a number depends on (seed, position) alone, and numbers look independent and even."""

import numpy as np

from sayfa.runner.noise import uniform


def grid(num_seeds, num_positions, first_seed=0):
    seeds = np.arange(first_seed, first_seed + num_seeds, dtype=np.uint64)
    return uniform(np.repeat(seeds, num_positions), np.tile(np.arange(num_positions), num_seeds))


def test_a_number_is_the_same_alone_and_in_a_crowd():
    crowd = grid(20, 30).reshape(20, 30)
    for seed in range(20):
        for position in range(0, 30, 7):
            alone = uniform(np.array([seed], np.uint64), np.array([position], np.int32))
            assert alone[0] == crowd[seed, position]


def test_numbers_are_even_and_neighbours_are_unrelated():
    """Neighbouring seeds and positions are the common case; a weak mix would show there first."""
    numbers = grid(300, 300, first_seed=2**63 - 150).reshape(300, 300)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 150  # chi-square of 99 degrees: above 150 once in a thousand
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.015
    assert len(np.unique(numbers)) == numbers.size


def test_the_numbers_never_change():
    """Answers to seeded requests are a promise over versions."""
    found = uniform(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 7, 8191]))
    assert found.tolist() == [0.572181483697937, 0.4543775081672341, 0.13705065697773688]
