"""Who is here and how one comes and goes, state by state; and what a sequence may never be."""

from collections.abc import Callable

import pytest

from fakes.deciding import World, request
from sayfa.core.sequence import RequestState, Sequence, Status
from sayfa.core.waiting import WaitingQueue


def world_with_two() -> World:
    """`a` runs with two branches, `b` with one."""
    world = World(max_num_seqs=4)
    world.add(request("a", [1, 2, 3, 4, 5], n=2, max_tokens=9))
    world.add(request("b", [1, 2], max_tokens=9))
    world.step()
    world.step()
    return world


def test_a_fault_in_rows_of_one_request_ends_it_once() -> None:
    world = world_with_two()
    running = {sequence.id: sequence for sequence in world.sequences() if sequence.branch == 0}
    rows = [sequence.row for sequence in world.sequences() if sequence.id == "a"]
    assert len(rows) == 2
    world.runner.fail = lambda row, step: "a fault" if row in rows else None
    world.step()
    world.runner.fail = lambda row, step: None
    world.run()
    for branch in (0, 1):
        last = world.answers["a", branch].last
        assert last is not None
        assert (last.finish, last.error) == ("error", "a fault")
    assert world.answers["b", 0].finish == "length"
    assert running["b"].preempted == 0


def test_last_words_that_wait_for_an_update_are_not_lost_by_a_fault() -> None:
    """One leaves, and before the next update another one's rows break: both are told."""
    world = world_with_two()
    [row] = [sequence.row for sequence in world.sequences() if sequence.id == "b"]
    assert world.scheduler.abort("a", world.now_s)
    world.runner.fail = lambda number, step: "a fault" if number == row else None
    world.run()
    ends = {key: answer.finish for key, answer in world.answers.items()}
    assert ends == {("a", 0): "abort", ("a", 1): "abort", ("b", 0): "error"}


def test_nobody_yields_for_a_request_that_is_not_here() -> None:
    world = world_with_two()
    assert world.scheduler.preempt("nobody", world.now_s) == 0
    assert world.scheduler.preempt("a", world.now_s) == 2
    assert world.scheduler.preempt("a", world.now_s) == 0
    world.run()
    world.check_answers()


@pytest.mark.parametrize("stand", ["waiting", "running", "held", "parked"])
def test_one_can_end_wherever_he_stands(stand: str) -> None:
    """And nothing of him is left: no place in a queue, no row, no page."""
    world = World(max_num_seqs=1)
    if stand == "waiting":
        world.add(request("first", [1], max_tokens=50))
        world.step()
    world.add(request("r", [1, 2, 3, 4, 5], max_tokens=50))
    if stand != "waiting":
        world.step()
    if stand in ("held", "parked"):
        world.scheduler.pause("r", True)
    if stand == "parked":
        world.scheduler.preempt("r", world.now_s)
    roster = world.scheduler._roster
    assert [sequence.id for sequence in getattr(roster, stand)][-1:] == ["r"]
    assert world.scheduler.abort("r", world.now_s)
    assert "r" not in [sequence.id for sequence in roster.sequences()]
    world.scheduler.audit()
    assert world.scheduler.finished == {"abort": 1}
    assert world.scheduler.open_branches() == ([("first", 0)] if stand == "waiting" else [])
    assert not world.scheduler.abort("r", world.now_s)


def test_nobody_leaves_a_queue_that_he_is_not_in() -> None:
    queue = WaitingQueue()
    states = [RequestState(request(name, [1]), number, 0.0, 9) for number, name in enumerate("ab")]
    first, last = (state.branch(0) for state in states)
    for missing, there in ((last, first), (first, last)):
        queue.add(there)
        with pytest.raises(RuntimeError, match=f"{missing.id}/0 is not in the waiting queue"):
            queue.remove(missing)
        queue.check()
        queue.remove(there)
    assert (len(queue), queue.num_tokens, queue.num_new, queue.num_new_tokens) == (0, 0, 0, 0)


# ------------------------------------------------------------------------------------- what a check finds


def sound() -> Sequence:
    sequence = RequestState(request("r", [1, 2, 3, 4, 5, 6]), 0, 0.0, 99).branch(0)
    sequence.status, sequence.row, sequence.pages, sequence.computed = Status.RUNNING, 3, [1, 2], 5
    sequence.hashes, sequence.num_stored = [b"one"], 1
    sequence.take_tokens()
    return sequence


def _computed_all(sequence: Sequence) -> None:
    sequence.computed = 6


def _computed_less_than_nothing(sequence: Sequence) -> None:
    sequence.computed = -1


def _too_few_pages(sequence: Sequence) -> None:
    sequence.pages.pop()


def _stored_without_hash(sequence: Sequence) -> None:
    sequence.num_stored = 2


def _hash_of_an_open_page(sequence: Sequence) -> None:
    sequence.hashes.append(b"two")


def _waits_with_a_row(sequence: Sequence) -> None:
    sequence.status = Status.WAITING


def _ended_with_a_row(sequence: Sequence) -> None:
    sequence.status = Status.FINISHED


def _no_row_but_pages(sequence: Sequence) -> None:
    sequence.row, sequence.computed, sequence.num_stored = -1, 0, 0


def _no_row_but_computed(sequence: Sequence) -> None:
    sequence.row, sequence.num_stored = -1, 0


def _no_row_but_stored(sequence: Sequence) -> None:
    sequence.row, sequence.computed, sequence.pages = -1, 0, []


def _runs_without_a_row(sequence: Sequence) -> None:
    sequence.row, sequence.computed, sequence.num_stored, sequence.pages = -1, 0, 0, []


def _adds_to_the_prompt(sequence: Sequence) -> None:
    sequence.tokens = sequence.state.request.prompt


DAMAGE = [
    (_adds_to_the_prompt, "r/0 runs, but would add its output to the request's own prompt"),
    (_computed_all, "r/0: 6 computed of 6 tokens"),
    (_computed_less_than_nothing, "r/0: -1 computed of 6 tokens"),
    (_too_few_pages, "r/0: 5 computed in 1 pages of 4"),
    (_stored_without_hash, "r/0: 2 pages stored, 1 hashes"),
    (_hash_of_an_open_page, "r/0: 1 pages stored, 2 hashes"),
    (_waits_with_a_row, "r/0 is waiting but holds row 3"),
    (_ended_with_a_row, "r/0 is finished but holds row 3"),
    (_no_row_but_pages, r"r/0 has no row but holds pages \[1, 2\]"),
    (_no_row_but_computed, "r/0 has no row but holds pages"),
    (_no_row_but_stored, "r/0 has no row but holds pages"),
    (_runs_without_a_row, "r/0 runs without a row"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_the_check_of_a_sequence_names_what_is_wrong(damage: Callable[[Sequence], None], told: str) -> None:
    sequence = sound()
    sequence.check(4)
    sequence.status = Status.PAUSED  # one that is paused may keep its row
    sequence.check(4)
    sequence.status = Status.RUNNING
    damage(sequence)
    with pytest.raises(RuntimeError, match=told):
        sequence.check(4)


def test_who_samples_nothing_may_be_computed_to_the_end() -> None:
    sequence = sound()
    sequence.state.max_tokens = 0
    sequence.computed = 6
    sequence.check(4)


def test_who_waits_has_no_copy_of_the_prompt_and_who_runs_has_its_own() -> None:
    """Else a request for 128 answers to 100,000 tokens would take 100 MB as it waits, and 20 ms only to be aborted."""
    world = World(max_num_seqs=2)
    asked = request("a", [1, 2, 3, 4, 5], n=4, max_tokens=9)
    world.add(asked)
    [first] = world.sequences()
    assert first.tokens is asked.prompt
    world.step()
    waiting = [sequence for sequence in world.sequences() if sequence is not first]
    assert len(waiting) == 3
    assert all(sequence.tokens is asked.prompt for sequence in waiting)
    world.run()
    assert asked.prompt == [1, 2, 3, 4, 5]
    world.check_answers()
