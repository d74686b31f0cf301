"""The audit sees each kind of damage: a check that cannot fail shows nothing."""

from collections.abc import Callable

import pytest

from fakes.deciding import World, request
from sayfa.core.scheduler import Scheduler
from sayfa.core.sequence import Status


def busy() -> Scheduler:
    """Two run (one of two branches), one waits."""
    world = World(max_num_seqs=2)
    world.add(request("a", [1, 2, 3, 4, 5], n=2, max_tokens=9))
    world.step()
    world.step()
    world.add(request("b", [1, 2], max_tokens=9))
    world.step()
    world.scheduler.audit()
    return world.scheduler


def _lose_a_row(scheduler: Scheduler) -> None:
    scheduler._roster.running[0].row = scheduler._roster.running[1].row


def _run_and_wait(scheduler: Scheduler) -> None:
    scheduler._roster.waiting.add(scheduler._roster.running[0])


def _out_of_rank(scheduler: Scheduler) -> None:
    scheduler._roster.running.reverse()


def _nowhere(scheduler: Scheduler) -> None:
    scheduler._roster.waiting.remove(scheduler._roster.waiting[0])


def _wrong_branch_count(scheduler: Scheduler) -> None:
    scheduler._roster.requests["a"].open_branches -= 1


def _forgotten_request(scheduler: Scheduler) -> None:
    del scheduler._roster.requests["b"]


def _wrong_token_count(scheduler: Scheduler) -> None:
    scheduler._roster.waiting.num_tokens += 1


def _wrong_new_count(scheduler: Scheduler) -> None:
    scheduler._roster.waiting.num_new = 0


def _wrong_tenant_count(scheduler: Scheduler) -> None:
    scheduler._roster.waiting._new_by_tenant["b"] = 1


def _computed_beyond_pages(scheduler: Scheduler) -> None:
    sequence = scheduler._roster.running[0]
    sequence.tokens += [1] * 9
    sequence.computed += 8


def _computed_beyond_tokens(scheduler: Scheduler) -> None:
    scheduler._roster.running[0].computed = len(scheduler._roster.running[0].tokens)


def _waiting_with_pages(scheduler: Scheduler) -> None:
    scheduler._roster.waiting[0].pages.append(9)


def _running_without_a_row(scheduler: Scheduler) -> None:
    sequence = scheduler._roster.running[0]
    scheduler._roster._free_rows.append(sequence.row)
    sequence.row = -1


def _hash_too_many(scheduler: Scheduler) -> None:
    scheduler._roster.running[0].hashes += [b"x"] * 9


def _queue_out_of_order(scheduler: Scheduler) -> None:
    waiting = scheduler._roster.waiting
    waiting._sequences.append(waiting[0])


def _paused_but_running(scheduler: Scheduler) -> None:
    scheduler._roster.requests["a"].paused = True


def _held_but_not_paused(scheduler: Scheduler) -> None:
    scheduler.pause("a", True)
    scheduler._roster.requests["a"].paused = False


def _wrong_status(scheduler: Scheduler) -> None:
    scheduler._roster.waiting[0].status = Status.FINISHED


@pytest.mark.parametrize(
    "damage",
    [
        _lose_a_row, _run_and_wait, _out_of_rank, _nowhere, _wrong_branch_count, _forgotten_request, _wrong_token_count,
        _wrong_new_count, _computed_beyond_pages, _computed_beyond_tokens, _waiting_with_pages, _running_without_a_row,
        _hash_too_many, _wrong_status, _queue_out_of_order,
        _paused_but_running, _held_but_not_paused, _wrong_tenant_count,
    ],
)  # fmt: skip
def test_the_audit_sees(damage: Callable[[Scheduler], None]) -> None:
    scheduler = busy()
    damage(scheduler)
    with pytest.raises(RuntimeError):
        scheduler.audit()
