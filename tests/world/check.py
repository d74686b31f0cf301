"""Play many worlds of one kind: `python -m world.check KIND FIRST COUNT` ends with 1 at the first broken law.

Used by the tests of the world, and by the mutants, which run it over a broken copy of the package.
"""

import sys

from world.history import Call, History, clock_history, numbers_history, random_history
from world.play import Outcome, ViolationError, play

CALENDAR_EVERY = 4
"""Every so many of the clock's histories are played again without the calendar's jumps."""


def check_any(seed: int) -> History:
    """F02: anything may happen."""
    history = random_history(seed)
    play(history)
    return history


def check_numbers(seed: int) -> History:
    """F20: only the call whose numbers are not finite fails; all others are served as if they had been alone."""
    history = numbers_history(seed)
    outcome = play(history)
    for answer in outcome.answers:
        if not answer.call.spoil:
            _demand(answer.served, f"call {answer.call.seed} was not served: {answer.status} {answer.code}")
        elif not answer.served:
            _demand(answer.code == "numerical_error", f"the spoiled call ended with {answer.code}")
    return history


def check_clock(seed: int) -> History:
    """F21: who names no deadline is served, nobody expires early (a law of `world.play`), no calendar decides."""
    history = clock_history(seed)
    outcome = play(history)
    for answer in outcome.answers:
        if answer.call.deadline_s is None:
            _demand(answer.served, f"call {answer.call.seed} was not served: {answer.status} {answer.code}")
    if seed % CALENDAR_EVERY == 0:
        calm = [event for event in history.events if isinstance(event, Call) or event.kind != "wall"]
        other = play(History(seed=history.seed, setting=history.setting, events=calm))
        _demand(_said(outcome) == _said(other), "the calendar changed an answer")
    return history


def check_garble(seed: int) -> History:
    """A message of the engine that cannot be read ends what it may have been about, and nothing else."""
    history = random_history(seed, blows=("garble", "scrape"))
    play(history)
    return history


def _said(outcome: Outcome) -> list[tuple[object, ...]]:
    return [(a.call.seed, a.status, a.code, a.ended_s, a.texts) for a in outcome.answers]


def _demand(holds: bool, law: str) -> None:
    if not holds:
        raise ViolationError(law)


CHECKS = {"any": check_any, "numbers": check_numbers, "clock": check_clock, "garble": check_garble}


def main() -> int:
    """Run the check that the arguments name."""
    check, first, count = CHECKS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, first + count):
        try:
            check(seed)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            print(f"seed {seed}: {type(error).__name__}: {error}"[:2000])
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
