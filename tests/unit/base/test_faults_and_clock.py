"""Fault points do nothing unless armed, and then exactly what was asked; the fake clock never goes back."""

import ast
import timeit
from pathlib import Path

import pytest

import sayfa
from sayfa.base import faults
from sayfa.base.clock import FakeClock
from sayfa.base.faults import ALTERING, POINTS, altered, armed, fault

PACKAGE = Path(sayfa.__file__).parent


def passes(times=6):
    fired = []
    for number in range(1, times + 1):
        try:
            fault("engine.abort")
        except RuntimeError:
            fired.append(number)
    return fired


def boom():
    raise RuntimeError("armed")


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_an_armed_point_fires_at_its_nth_pass_and_with_every_ever_after(nth):
    assert passes() == []
    with armed("engine.abort", boom, nth=nth) as point:
        assert passes() == [nth]
        assert point.passes == 6
    with armed("engine.abort", boom, nth=nth, every=True):
        assert passes() == list(range(nth, 7))
    assert passes() == []
    assert faults._armed is None


def test_points_can_be_armed_inside_one_another():
    with armed("engine.abort", boom), armed("engine.step.before_decide", boom):
        with pytest.raises(RuntimeError):
            fault("engine.step.before_decide")
        assert passes() == [1]


def test_an_unknown_point_cannot_be_armed():
    with pytest.raises(KeyError, match="not a fault point"), armed("engine.no_such_place", boom):
        pass


def calls_in_package():
    """Each `fault("name")` and `altered("name", value)` in the package, as (file, function, name)."""
    for file in set(PACKAGE.rglob("*.py")) - {Path(faults.__file__)}:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("fault", "altered"):
                yield file.relative_to(PACKAGE), node.func.id, node.args[0].value


def test_the_list_of_points_is_the_points_in_the_code():
    assert sorted(name for _, _, name in calls_in_package()) == sorted(POINTS)
    assert {name for _, function, name in calls_in_package() if function == "altered"} == ALTERING
    assert len(POINTS) >= 60


def test_a_value_is_handed_through_or_altered():
    data = b"as it is"
    assert altered("wire.client_writes", data) is data
    with armed("wire.client_writes", alter=lambda value: value[:2], nth=2) as point:
        assert [altered("wire.client_writes", data) for _ in range(3)] == [data, b"as", data]
        assert point.passes == 3
    with pytest.raises(ValueError, match="hands no value through"), armed("engine.abort", alter=lambda value: value):
        pass


@pytest.mark.parametrize("pass_it", [lambda: fault("engine.abort"), lambda: altered("runner.logits", None)])
def test_a_point_that_is_not_armed_costs_next_to_nothing(pass_it):
    """A bound far above the truth (about 0.1 us): a step of one token takes 2.5 ms and passes some thirty points."""
    best_s = min(timeit.repeat(pass_it, number=10_000, repeat=5)) / 10_000
    assert best_s < 2e-6


def test_nothing_in_the_package_arms_a_point():
    for file in PACKAGE.rglob("*.py"):
        if file.name != "faults.py":
            assert "armed(" not in file.read_text(), f"{file} arms a fault point"


def test_the_fake_clock_moves_only_as_told_and_only_the_calendar_goes_back():
    clock = FakeClock(10.0, 1000.0)
    clock.advance(5)
    clock.jump_wall(-100)
    assert (clock.monotonic(), clock.wall()) == (15.0, 905.0)
    with pytest.raises(ValueError, match="jump_wall"):
        clock.advance(-1)
