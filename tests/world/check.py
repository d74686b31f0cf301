"""Play many worlds of one kind: `python -m world.check KIND FIRST COUNT` ends with 1 at the first broken law.

Used by the tests of the world, and by the mutants, which run it over a broken copy of the package.
"""

import sys
from typing import TypeGuard

from msgspec.structs import replace

from world import load
from world.history import Blow, Call, History, clock_history, numbers_history, random_history
from world.laws import demand
from world.play import Outcome, play

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
            demand(answer.served, f"call {answer.call.seed} was not served: {answer.status} {answer.code}")
        elif not answer.served:
            demand(answer.code == "numerical_error", f"the spoiled call ended with {answer.code}")
    return history


def check_clock(seed: int) -> History:
    """F21: who names no deadline is served, nobody expires early (a law of `world.play`), no calendar decides."""
    history = clock_history(seed)
    outcome = play(history)
    for answer in outcome.answers:
        if answer.call.deadline_s is None:
            demand(answer.served, f"call {answer.call.seed} was not served: {answer.status} {answer.code}")
    if seed % CALENDAR_EVERY == 0:
        # A jump of nothing stays an event: without its turn, what happens at one time would happen in another order.
        calm = [replace(event, seconds=0.0) if _is_jump(event) else event for event in history.events]
        other = play(History(seed=history.seed, setting=history.setting, events=calm))
        demand(_said(outcome) == _said(other), "the calendar changed an answer")
    return history


def _is_jump(event: Call | Blow) -> TypeGuard[Blow]:
    return isinstance(event, Blow) and event.kind == "wall"


def check_garble(seed: int) -> History:
    """A message of the engine that cannot be read ends what it may have been about, and nothing else."""
    history = random_history(seed, blows=("garble", "scrape"))
    play(history)
    return history


def check_loads(seed: int) -> History:
    """R09: an engine that hangs while it loads is replaced, one that loads slowly is waited for."""
    history = random_history(seed, blows=("hang_load", "slow_load"))
    play(history)
    return history


def check_overload(seed: int) -> None:
    """F14: at ten times the capacity as much is served as ever; refusals say truly when to come back."""
    span_s = 12.0
    calm = load.run(seed, load.traffic(seed, 1.5, span_s), max_queued_requests=10_000, policy="priority")
    answers = load.run(seed, load.traffic(seed, 10.0, span_s, deadline_share=0.05), policy="priority").answers
    begun_s = min(answer.started_s for answer in answers)
    best = load.goodput(calm.answers, begun_s + 2, begun_s + span_s)
    got = load.goodput(answers, begun_s + 2, begun_s + span_s)
    demand(got >= 0.95 * best, f"goodput fell from {best:.1f} to {got:.1f} answers a second")
    refused = [a for a in answers if a.status == 503]
    demand(len(refused) > len(answers) / 2, "hardly anything was refused: this is no overload")
    for answer in refused:
        demand(answer.ended_s - answer.started_s <= 2 * load.STEP_S, "a refusal took longer than two steps")
    steady = [a for a in refused if begun_s + 3 <= a.started_s <= begun_s + 8 and a.code == "queue_full"]
    for answer in steady:
        true_s = load.half_queue_s(answers, answer.ended_s)
        said_s = int(answer.headers["retry-after"])
        demand(
            0.7 * true_s - 1 <= said_s <= 1.4 * true_s + 2, f"Retry-After {said_s}, half the queue took {true_s:.1f} s"
        )
    demand(bool(steady), "nobody was refused in the steady part")
    hopeless = [a for a in answers if a.call.deadline_s is not None and a.started_s >= begun_s + 4]
    late = [a for a in hopeless if a.code == "deadline_exceeded"]
    demand(len(late) <= 0.05 * len(hopeless), f"{len(late)} of {len(hopeless)} hopeless calls were queued and expired")


def check_fairness(seed: int) -> None:
    """F15: a flood of one key, a hundred times the calls of another one, costs that one a step or so."""
    span_s = 12.0
    normal = load.traffic(seed, 0.1, span_s, tenant=1)
    alone = [load.first_text_s(answer) for answer in load.run(seed, normal).answers]
    crowd = load.run(seed, normal, load.traffic(seed, 10.0, span_s)).answers
    beside = [load.first_text_s(answer) for answer in crowd if answer.call.tenant == 1]
    served = [answer.served for answer in crowd if answer.call.tenant == 1]
    demand(all(served), f"{served.count(False)} of {len(served)} calls beside the flood were not served")
    limit_s = 2 * max(alone) + load.STEP_S
    demand(max(beside) <= limit_s, f"first text after {max(beside):.3f} s, alone {max(alone):.3f} s at most")


def _said(outcome: Outcome) -> list[tuple[object, ...]]:
    return [(a.call.seed, a.status, a.code, a.ended_s, a.texts) for a in outcome.answers]


CHECKS = {
    "any": check_any,
    "numbers": check_numbers,
    "clock": check_clock,
    "garble": check_garble,
    "loads": check_loads,
    "overload": check_overload,
    "fairness": check_fairness,
}


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
