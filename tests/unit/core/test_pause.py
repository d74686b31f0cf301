"""T17, R07: a request whose reader is behind stands still in the scheduler, and nobody stands still for it."""

import pytest

from fakes.deciding import World, request
from sayfa.core.policy import FairPolicy, Policy, PriorityPolicy, StaticPolicy

LONG = 60


def running(world: World) -> list[str]:
    return [sequence.id for sequence in world.scheduler._roster.running]


def num_tokens(world: World, name: str, branch: int = 0) -> int:
    return len(world.answers[name, branch].tokens)


def world_of(*names: str, **settings: object) -> World:
    """One step has been made with these requests; each would go on for long."""
    world = World(**{"num_pages": 100, **settings})  # type: ignore[arg-type]
    for name in names:
        world.add(request(name, [1, 2, 3], max_tokens=LONG))
    world.step()
    return world


def test_a_paused_request_keeps_its_place_and_gets_nothing() -> None:
    w = world_of("a", "b")
    pages = list(w.scheduler._roster.running[0].pages)
    assert w.scheduler.pause("a", on=True)
    for _ in range(5):
        assert [row.row for row in w.step().rows] == [1]
    assert (num_tokens(w, "a"), num_tokens(w, "b")) == (1, 6)
    stats = w.scheduler.stats(0.0, 0.0, 0.0, {})
    assert (stats.running, stats.waiting, stats.paused) == (1, 0, 1)
    assert w.scheduler.pause("a", on=False)
    plan = w.step()
    assert [(row.row, row.start) for row in plan.rows] == [(0, 3), (1, 8)]
    assert not plan.new
    assert w.scheduler._roster.running[0].pages[:1] == pages
    w.run()
    w.check_answers()


def test_a_pause_says_whether_it_changed_anything() -> None:
    """Unknown ids, a second pause, what has not started and what has ended are let be."""
    w = world_of("a", max_num_seqs=1)
    w.add(request("waits", [1], max_tokens=1))
    assert not w.scheduler.pause("unknown", on=True)
    assert not w.scheduler.pause("a", on=False)
    assert not w.scheduler.pause("waits", on=True)
    assert w.scheduler.pause("a", on=True)
    assert not w.scheduler.pause("a", on=True)
    assert w.scheduler.pause("a", on=False)
    w.run()
    assert not w.scheduler.pause("a", on=True)


def test_an_engine_whose_requests_are_all_paused_has_no_work_but_is_not_empty() -> None:
    """One step tells the new figures; then there is nothing to do until somebody reads or leaves."""
    w = world_of("a", "b")
    for name in "ab":
        w.scheduler.pause(name, on=True)
    assert w.scheduler.has_work
    assert not w.step().rows
    assert not w.scheduler.has_work
    assert w.scheduler.has_requests
    assert w.scheduler.abort("a", w.now_s)
    w.scheduler.pause("b", on=False)
    w.run()
    w.check_answers()
    assert not w.scheduler.has_requests


@pytest.mark.parametrize("policy", [PriorityPolicy(), FairPolicy(), StaticPolicy(2)])
def test_who_waits_for_a_row_gets_that_of_the_longest_paused(policy: Policy) -> None:
    """F25: rows that are all held by paused requests are no reason to wait."""
    w = world_of("a", "b", max_num_seqs=2, policy=policy)
    for name in "ba":
        w.scheduler.pause(name, on=True)
    w.add(request("new", [5], max_tokens=3))
    plan = w.step()
    assert running(w) == ["new"]
    assert plan.forget == [1]
    assert [sequence.id for sequence in w.scheduler._roster.held] == ["a"]
    assert [sequence.id for sequence in w.scheduler._roster.parked] == ["b"]
    for name in "ab":
        w.scheduler.pause(name, on=False)
    w.run()
    w.check_answers()


def test_who_waits_for_pages_gets_those_of_paused_ones() -> None:
    w = world_of("a", num_pages=8, page_size=4)
    for _ in range(12):
        w.step()
    w.scheduler.pause("a", on=True)
    w.add(request("new", list(range(20)), max_tokens=2))
    w.step()
    assert running(w) == ["new"]
    w.scheduler.pause("a", on=False)
    w.run()
    w.check_answers()


def test_who_grows_takes_pages_from_paused_ones_before_it_yields() -> None:
    """The running one is never preempted for the sake of one that stands still, however good that one's rank is."""
    w = world_of("first", "second", num_pages=12, page_size=4)
    w.scheduler.pause("first", on=True)
    for _ in range(36):
        w.step()
    assert num_tokens(w, "second") == 37
    assert w.scheduler._roster.running[0].preempted == 0
    w.scheduler.pause("first", on=False)
    w.run()
    w.check_answers()


def test_a_request_that_waits_after_a_preemption_can_be_paused() -> None:
    """It does not come back before it is resumed, then from its old place."""
    w = world_of("a", "b")
    w.scheduler.preempt("a", w.now_s)
    w.scheduler.pause("a", on=True)
    w.step()
    assert running(w) == ["b"]
    assert w.scheduler.num_waiting == 0
    w.scheduler.pause("a", on=False)
    w.step()
    assert running(w) == ["a", "b"]


def test_all_branches_stand_still_also_those_that_come_to_be() -> None:
    """A pause between deciding and updating the step that ends the prompt: the other branches are born paused."""
    w = World()
    w.add(request("a", [1, 2, 3], n=3, max_tokens=4))
    plan = w.scheduler.schedule(w.now_s)
    output = w.runner.execute(plan)
    w.scheduler.pause("a", on=True)
    w.take(w.scheduler.update(output, w.now_s))
    assert not w.step().rows
    assert [num_tokens(w, "a", branch) for branch in range(3)] == [1, 0, 0]
    assert w.scheduler.stats(0.0, 0.0, 0.0, {}).paused == 3
    w.scheduler.pause("a", on=False)
    w.run()
    w.check_answers()


@pytest.mark.parametrize("how", ["held", "parked"])
@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_a_paused_request_can_end(how: str, end: str) -> None:
    """All it held is free with that."""
    w = World()
    w.add(request("a", [1, 2, 3], n=2, max_tokens=LONG, deadline_s=10.0))
    for _ in range(3):
        w.step()
    w.scheduler.pause("a", on=True)
    if how == "parked":
        assert w.scheduler.preempt("a", w.now_s) == 2
    if end == "abort":
        w.scheduler.abort("a", w.now_s)
    w.now_s = 11.0
    w.step()
    assert {w.answers["a", branch].finish for branch in range(2)} == {end}
    assert w.pool.num_used == 0
    assert w.step().forget == [] or not w.scheduler.has_work


def test_a_paused_request_that_could_never_come_back_ends_when_it_must_yield() -> None:
    """What it has fills the whole pool: preempted, it would wait for ever, so it ends as it would have anyway."""
    w = World(num_pages=4, page_size=4)
    w.add(request("a", list(range(8)), max_tokens=20))
    while len(w.scheduler._roster.running[0].tokens if w.scheduler._roster.running else [0] * 13) < 13:
        w.step()
    w.scheduler.pause("a", on=True)
    w.add(request("new", [1, 2], max_tokens=2))
    w.run()
    assert w.answers["a", 0].finish == "length"
    assert w.answers["new", 0].finish == "length"
    w.check_answers()


# ------------------------------------------------------------------------------------- some branches end by themselves


@pytest.mark.parametrize("branch", range(3))
def test_a_branch_ends_alone_and_at_once(branch: int) -> None:
    """A stop string that only the server sees ends one answer of several: no step computes it any more."""
    w = World()
    w.add(request("a", [1, 2, 3], n=3, max_tokens=6))
    for _ in range(3):
        w.step()
    before = num_tokens(w, "a", branch)
    assert w.scheduler.abort("a", w.now_s, [branch])
    assert len(w.step().rows) == 2
    assert (w.answers["a", branch].finish, num_tokens(w, "a", branch)) == ("abort", before)
    assert w.scheduler.abort("a", w.now_s, [branch])  # again: nothing happens
    w.run()
    w.check_answers()
    others = {w.answers["a", other].finish for other in range(3) if other != branch}
    assert others == {"length"}


def test_the_first_branch_may_end_before_the_others_are_born() -> None:
    """They come all the same; and before a request has run none of its branches can be named."""
    w = World(max_num_batched_tokens=8)
    w.add(request("a", list(range(20)), n=3, max_tokens=4))
    assert not w.scheduler.abort("a", w.now_s, [0])
    w.step()
    assert w.scheduler.abort("a", w.now_s, [0])
    w.run()
    w.check_answers()
    assert [w.answers["a", branch].finish for branch in range(3)] == ["abort", "length", "length"]


def test_when_the_last_open_branch_ends_the_request_does() -> None:
    w = World()
    w.add(request("a", [1], n=2, max_tokens=9))
    for _ in range(3):
        w.step()
    w.scheduler.abort("a", w.now_s, [0])
    w.scheduler.abort("a", w.now_s, [1])
    assert not w.scheduler.has_requests
    w.run()
    w.check_answers()
    assert w.pool.num_used == 0
