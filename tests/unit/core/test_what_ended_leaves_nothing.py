"""R20: nothing that the deciding wing holds grows with the number of requests that have ended."""

import gc
import random
from types import FunctionType, ModuleType
from typing import Any

from fakes.deciding import World, request
from sayfa.core.policy import FairPolicy

ROUND = 300


def num_reachable(root: Any) -> int:
    """How many objects hang on `root`; code and what modules hold is not counted."""
    seen: dict[int, Any] = {}
    todo = [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType)):
            continue
        seen[id(thing)] = thing
        todo += gc.get_referents(thing)
    return len(seen)


def play(w: World, rng: random.Random, first: int) -> None:
    """A round of requests of all kinds, each of which ends."""
    for number in range(first, first + ROUND):
        name = f"r{number}"
        w.add(
            request(
                name,
                [rng.randrange(40) for _ in range(rng.randint(1, 12))],
                priority=rng.choice((-1, 0, 2)),
                tenant=rng.choice("abc"),
                salt=rng.choice(("", "s")),
                deadline_s=rng.choice((None, 3.0, 1e7, 1e7)),
                n=rng.choice((1, 1, 3)),
                max_tokens=rng.randint(1, 6),
            )
        )
        if rng.random() < 0.1:
            w.scheduler.abort(name, w.now_s)
        while len(w.scheduler.open_branches()) > 6:
            w.step()
            if rng.random() < 0.1:
                w.scheduler.pause(name, on=True)
                w.scheduler.pause(name, on=False)
    w.run()


def test_r20_what_ended_leaves_nothing() -> None:
    """Deadlines months ahead, tenants, salts, priorities, aborts: after a round as much hangs on it as before."""
    w = World(num_pages=24, page_size=4, max_num_seqs=6, policy=FairPolicy(), audit_every=100)
    rng = random.Random(1)
    play(w, rng, 0)
    before = num_reachable(w.scheduler)
    play(w, rng, ROUND)
    play(w, rng, 2 * ROUND)
    assert num_reachable(w.scheduler) <= before + ROUND // 2
