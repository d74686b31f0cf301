"""R05, R06: the queue is bounded, and no tenant can fill it for the others."""

import random

import pytest

from fakes.deciding import World, request
from sayfa.base.errors import Overloaded, RateLimited, RequestError
from sayfa.base.messages import Request


def crowd(limit: int, **limits: object) -> World:
    """A world whose one row is taken, so that all others wait."""
    world = World(num_pages=200, max_num_seqs=1, max_queued_requests=limit, share_queue=True, **limits)
    world.add(request("runs", [1], max_tokens=60))
    world.step()
    return world


def fill(world: World, tenant: str) -> int:
    """Add requests of a tenant until one is refused; return how many were taken."""
    for number in range(1000):
        refused = refusal(world, request(f"{tenant}{number}", [1, 2], tenant=tenant))
        if refused is not None:
            full = world.scheduler._roster.waiting.num_new == world.limits.max_queued_requests
            assert (refused.code, refused.retry_after_s) == ("queue_full" if full else "share_of_queue_full", 7)
            return number
    raise AssertionError("nothing was refused")


def refusal(world: World, wish: Request) -> RequestError | None:
    try:
        world.scheduler.add(wish, world.now_s, 7)
    except (RateLimited, Overloaded) as refused:
        return refused
    return None


@pytest.mark.parametrize("limit", [1, 2, 7, 64])
def test_a_tenant_has_no_more_than_there_are_free_places(limit: int) -> None:
    world = crowd(limit)
    taken = fill(world, "a")
    assert taken == -(-limit // 2)
    assert fill(world, "b") == -(-(limit - taken) // 2)


def test_a_flood_leaves_room_for_each_newcomer() -> None:
    world = crowd(64)
    fill(world, "flood")
    for number in range(20):
        world.scheduler.add(request(f"b{number}", [1], tenant=f"tenant{number}"), world.now_s)


def test_without_keys_there_are_no_shares() -> None:
    world = crowd(8)
    for number in range(8):
        world.scheduler.add(request(number, [1]), world.now_s)
    with pytest.raises(Overloaded, match="full"):
        world.scheduler.add(request("more", [1]), world.now_s)


@pytest.mark.parametrize("seed", range(6))
def test_the_counts_by_tenant_hold_over_any_history(seed: int) -> None:
    rnd = random.Random(seed)
    world = World(num_pages=14, max_num_seqs=3, max_queued_requests=6, share_queue=True)
    for number in range(150):
        tenant = rnd.choice(["", "a", "b", "c"])
        world.add(request(number, [rnd.randrange(9)] * rnd.randint(1, 9), tenant=tenant, max_tokens=rnd.randint(1, 9)))
        if rnd.random() < 0.2:
            world.scheduler.abort(str(rnd.randrange(number + 1)), world.now_s)
        world.step()  # audits the queue's counts
    world.run()
