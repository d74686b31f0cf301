"""F14, F15, R05, R06: ten times too much, and one key against another, on virtual time; see `world.check`."""

import pytest

from world.check import check_fairness, check_overload


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_f14_overload_serves_as_much_as_ever_and_refuses_truly(seed: int) -> None:
    """Goodput >= 95 % of the best; each refusal has a true Retry-After and comes within two steps; a bounded queue."""
    check_overload(seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_f15_a_flood_delays_another_key_by_no_more_than_its_own_time_and_a_step(seed: int) -> None:
    """All calls of the other key are served, the slowest first text within twice the slowest one alone, and a step."""
    check_fairness(seed)
