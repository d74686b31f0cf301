"""F28, T23: how long a wrong key takes says nothing about how much of it is right.

Two classes of wrong keys, timed in a random order: the right key up to its last characters, and random characters of
the same length. Welch's test on the times; with so many of them the normal distribution stands for Student's.
"""

import math
import random
import time

import pytest

from sayfa.base.errors import Unauthorized
from sayfa.server.auth import Keys

NUM_TIMED = 20_000
LEAST_P = 0.001
KEY = "sk-" + "0123456789abcdef" * 4


def wrong_keys(rnd: random.Random, count: int) -> list[tuple[bool, str]]:
    """Half with a right prefix of a random length (most of the key, often), half with none; in random order."""
    made = []
    for number in range(count):
        right = number % 2 == 0
        length = rnd.choice((len(KEY) - 1, len(KEY) - 1, rnd.randrange(8, len(KEY)))) if right else 0
        rest = "".join(rnd.choices("ghijklmnop", k=len(KEY) - length))
        made.append((right, f"Bearer {KEY[:length]}{rest}"))
    rnd.shuffle(made)
    return made


def timed(keys: Keys, headers: list[tuple[bool, str]]) -> tuple[list[int], list[int]]:
    """Nanoseconds that each refusal takes: with a right prefix, and without."""
    times: tuple[list[int], list[int]] = ([], [])
    for right, header in headers:
        begun = time.perf_counter_ns()
        try:
            keys.tenant(header)
        except Unauthorized:
            times[0 if right else 1].append(time.perf_counter_ns() - begun)
    return times


def welch_p(first: list[int], second: list[int]) -> float:
    """The probability of means so far apart if both classes were alike.

    The slowest hundredth, in which others had their turn, is left out.
    """
    cut = sorted(first + second)[int(0.99 * (len(first) + len(second)))]
    kept = [[value for value in values if value <= cut] for values in (first, second)]
    means = [sum(values) / len(values) for values in kept]
    spreads = [
        sum((v - mean) ** 2 for v in values) / len(values) ** 2 for values, mean in zip(kept, means, strict=True)
    ]
    return math.erfc(abs(means[0] - means[1]) / math.sqrt(2 * sum(spreads)))


def best_p_of_three(keys: Keys, seed: int) -> float:
    """The best of three runs: a machine that is disturbed in one of them is no leak, a leak shows in all."""
    rnd = random.Random(seed)
    return max(welch_p(*timed(keys, wrong_keys(rnd, NUM_TIMED))) for _ in range(3))


@pytest.mark.parametrize("others", [0, 3])
def test_f28_the_time_of_a_failure_tells_nothing_of_the_key(others: int) -> None:
    """20,000 failures a run; right prefixes of all lengths; with one key and with several."""
    keys = Keys([KEY, *(f"sk-other-{number}" for number in range(others))])
    assert keys.tenant(f"Bearer {KEY}")
    timed(keys, wrong_keys(random.Random(0), 2000))  # warm
    p = best_p_of_three(keys, 1)
    assert p > LEAST_P, f"right and wrong prefixes differ, p = {p:.2g}"


def test_f28_the_test_sees_a_comparison_that_stops_early() -> None:
    """A check that compares character by character is found out."""

    class Careless(Keys):
        def tenant(self, authorization: str) -> str:
            given = authorization.removeprefix("Bearer ")
            for one, other in zip(given, KEY, strict=False):
                if one != other:
                    break
            raise Unauthorized("no")

    assert best_p_of_three(Careless([KEY]), 2) < LEAST_P
