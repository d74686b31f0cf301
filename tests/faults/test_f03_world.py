"""F03 in whole systems: each point that a world passes, with each kind of fault that makes sense there.

Of each history with one fault the laws of `world.play` hold: every call ends once, what is served is right, nothing is
left, the books balance. And the fault has no other effect than it may have: nobody notices, one request ends with its
error, the engine is started anew and who was with it is told, or the start fails.

`make test` fires at the passes 1, 2, 3, 5, 8, ... of each point, `make test-all` at every one.
"""

import pytest

from faults.in_world import HISTORIES, baseline, judge, play
from faults.points import BESIDE, COSTING_THE_ENGINE, DISK_KINDS, IN_ENGINE, OF_ONE, PAUSING, WIRE_KINDS

MOST_PASSES = 1000


@pytest.fixture(scope="module")
def wanted():
    return {name: baseline(history) for name, history in HISTORIES.items()}


def fire_all(history, name, kind, effect, wanted, *, every):
    """Play with the fault at each pass until the point is passed no more; return how often it fired."""
    fired, nth, before = 0, 1, 1
    while True:
        result = play(history, name, kind, nth)
        if result.passes < nth:
            return fired
        judge(history, effect, result, wanted)
        fired += 1
        assert fired < MOST_PASSES
        nth, before = (nth + 1, 1) if every else (nth + before, nth)


EVERY = [
    pytest.param(False, id="some"),
    pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="all"),
]
CASES = [
    *(("main", name, "raise", "one") for name in OF_ONE),
    *(("main", name, "raise", "none") for name in BESIDE),
    *(("main", name, "raise", "engine") for name in COSTING_THE_ENGINE),
    *(("main", name, "die", "engine") for name in IN_ENGINE),
    *(("main", name, kind, "engine") for name in ("wire.client_reads", "wire.client_writes") for kind in WIRE_KINDS),
    *(("main", "log.write", kind, "none") for kind in DISK_KINDS),
    *(("death", name, "raise", "engine") for name in ("client.restart", "client.hello", "client.progress")),
    *(("death", name, "raise", "gives up") for name in ("client.lost", "client.bury")),
    *(("death", name, "raise", "start") for name in ("client.before_spawn", "client.attach")),
    ("death", "client.quarantine", "raise", "none"),
    *(("drain", name, "raise", "none") for name in ("client.drain", "server.drain")),
    *(("drain", name, kind, "engine") for kind in ("raise", "die")
      for name in ("engine.refuse_waiting", "engine.end_all", "process.while_draining")),
    *(("readers", name, kind, "engine") for kind in ("raise", "die") for name in PAUSING),
]  # fmt: skip


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_fault_has_no_other_effect_than_it_may_have(case, every, wanted):
    """A case: history, point, kind of fault, effect."""
    key, *what = case
    assert fire_all(HISTORIES[key], *what, wanted[key], every=every) >= 1


@pytest.mark.parametrize("name", sorted({name for key, name, _, _ in CASES if key == "main"}))
def test_time_that_passes_at_a_point_breaks_no_law(name, wanted):
    """Seven seconds in which nothing runs; all calls of that time come at once then, and some may find a full queue."""
    history = HISTORIES["main"]
    judge(history, "delay", play(history, name, "delay", 1), wanted["main"])
