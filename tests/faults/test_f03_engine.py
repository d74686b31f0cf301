"""F03 in an engine with a model: each point of the computing wing and of the start, at each pass, with each kind.

Outcome of a fault in a step: all requests have their right answers, or one ends with an error, or the engine's process
ends. Never a wrong token, and nothing is left: the engine is kept, and what a fault spoils shows in the next run.
"""

import pytest

from faults.in_engine import REQUESTS, Stage, fires_at_start
from faults.points import AT_START, HARMLESS_IN_A_STEP, LOSING_THE_TABLE
from sayfa.base.errors import ModelError

MODEL_ERRORS = ("load.json", "load.open", "load.map")


@pytest.fixture(scope="module")
def stage():
    return Stage()


def fire_all(fire):
    """Fire at the first pass, the second, ... until the point is passed no more; return how often that was."""
    nth = 1
    while fire(nth) >= nth:
        nth += 1
        assert nth < 200
    return nth - 1


@pytest.mark.parametrize("kind", ["raise", "memory"])
@pytest.mark.parametrize("name", HARMLESS_IN_A_STEP)
def test_a_step_that_fails_once_harms_nobody(stage, name, kind):
    def fire(nth):
        passes, failed, ended = stage.fire(name, kind, nth)
        assert (failed, ended) == (set(), False)
        stage.check()
        return passes

    assert fire_all(fire) >= 3


@pytest.mark.parametrize("kind", ["raise", "memory"])
@pytest.mark.parametrize("name", LOSING_THE_TABLE)
def test_a_table_that_could_not_be_changed_ends_the_engine(stage, name, kind):
    def fire(nth):
        passes, failed, ended = stage.fire(name, kind, nth)
        assert failed == set()
        assert ended == (passes >= nth)
        stage.check()
        return passes

    assert fire_all(fire) >= 1


@pytest.mark.parametrize("kind", ["nan", "infinite"])
def test_numbers_that_are_not_finite_end_one_request(stage, kind):
    """R13: whatever row and step; the others' answers are what they are alone."""

    def fire(nth):
        passes, failed, ended = stage.fire("runner.logits", kind, nth)
        assert not ended
        assert len(failed) == (passes >= nth)
        stage.check()
        return passes

    assert fire_all(fire) >= 3


@pytest.mark.parametrize("kind", ["raise", "memory", "eio"])
@pytest.mark.parametrize("name", AT_START)
def test_a_fault_at_the_start_is_an_error_and_never_an_engine(name, kind):
    def fire(nth):
        passes, problem = fires_at_start(name, kind, nth)
        assert (problem is not None) == (passes >= nth)
        if problem is not None and kind == "eio" and name in MODEL_ERRORS:
            assert isinstance(problem, ModelError)
            assert "EIO" in str(problem)
        return passes

    assert fire_all(fire) >= 1


def test_the_requests_are_worth_it(stage):
    """Penalties, scores and branches are among them, so that what a fault spoils can show."""
    assert any(request.params.n > 1 for request in REQUESTS)
    assert all(got.tokens for branches in stage.wanted.values() for got in branches)
