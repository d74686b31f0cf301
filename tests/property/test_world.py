"""F02, F20, F21, F25: whole-system histories from seeds, on virtual time; the laws are told in `world.play`.

API core, supervisor, wire, engine loop, engine, scheduler and page pool are the real ones, in one thread. A failing
seed is made small by `python -m world.shrink SEED` (in tests/) and then kept in tests/world/cases.
"""

from collections import Counter
from pathlib import Path

import pytest

from world.check import CHECKS, check_any
from world.history import KINDS, Blow, Call, from_json, random_history
from world.laws import ViolationError
from world.play import play
from world.seen import WANTED, Seen
from world.shrink import failure_of, shrink

CHUNK = 100
CASES = sorted((Path(__file__).parents[1] / "world" / "cases").glob("*.json"))


def play_chunk(kind: str, first: int, count: int = CHUNK) -> None:
    for seed in range(first, first + count):
        try:
            CHECKS[kind](seed)
        except Exception as error:
            small = shrink(random_history(seed)).to_json() if kind == "any" else ""
            raise ViolationError(f"{kind} seed {seed}: {error!r}\n{small}") from error


@pytest.mark.parametrize("first", range(0, 2000, CHUNK))
def test_f02_anything_may_happen_and_the_laws_hold(first: int) -> None:
    play_chunk("any", first)


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_f20_numbers_that_are_not_finite_end_their_own_request_only(first: int) -> None:
    """R13: neighbours say what they say alone; nothing that the spoiled request held is found again."""
    play_chunk("numbers", first)


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_f21_no_clock_that_jumps_ends_anybody_early(first: int) -> None:
    """R14: calendar by ten years, all processes asleep for an hour; deadlines are kept to the step."""
    play_chunk("clock", first)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100_000, 130_000, 1000))
def test_f02_many_more_histories(first: int) -> None:
    play_chunk("any", first, 1000)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_what_once_broke_holds(case: Path) -> None:
    """Each kept history once broke a law; what was wrong is told in the file's name."""
    play(from_json(case.read_bytes()))


def test_the_same_history_plays_the_same_way() -> None:
    for seed in range(40):
        history = random_history(seed)
        assert play(history).digest == play(from_json(history.to_json())).digest


@pytest.mark.timeout(600)
def test_the_histories_visit_what_they_are_for() -> None:
    """Each kind of blow falls, each ending is seen often, and all that worlds are for happens, in 300 histories."""
    endings: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    seen = Seen()
    for seed in range(300):
        history = random_history(seed)
        outcome = play(history)
        endings += outcome.counts
        seen.update(outcome.seen)
        kinds.update(event.kind for event in history.events if isinstance(event, Blow))
    assert set(kinds) == set(KINDS)
    assert min(endings[name] for name in ("served", "refused", "expired", "left", "failed")) >= 30
    assert not [name for name in WANTED if not seen[name]], "these never happened"


def test_what_worlds_are_not_for_is_not_counted() -> None:
    with pytest.raises(KeyError, match="no such thing"):
        Seen().note("no such thing")


def test_a_failing_history_is_made_small() -> None:
    """The minimiser keeps what is needed to fail and little else."""
    history = next(h for h in map(random_history, range(100)) if len(h.events) >= 8)
    guilty = next(event for event in history.events if isinstance(event, Call)).seed

    def fails(one: object) -> str | None:
        events = one.events  # type: ignore[attr-defined]
        return "x" if any(isinstance(e, Call) and e.seed == guilty and len(e.prompt) >= 1 for e in events) else None

    small = shrink(history, fails)
    assert [event.seed for event in small.events if isinstance(event, Call)] == [guilty]
    assert len(small.events) == 1
    assert small.events[0].prompt == [1]  # type: ignore[union-attr]


def test_a_history_that_holds_is_no_case() -> None:
    assert failure_of(check_any(0)) is None
    with pytest.raises(ValueError, match="does not fail"):
        shrink(random_history(0))
