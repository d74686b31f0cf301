"""N24: the scheduler is a pure function of its calls. A recorded history, replayed on a fresh one, decides the same."""

import random
import subprocess
import sys

import pytest

from fakes.deciding import World, random_request
from sayfa.core.kv_cache import KvCache
from sayfa.core.page_pool import PagePool
from sayfa.core.policy import FairPolicy, Policy, PriorityPolicy, StaticPolicy
from sayfa.core.scheduler import Limits, Scheduler
from sayfa.core.trace import RecordingScheduler, replay

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=12, max_model_len=40, max_queued_requests=10)
POLICIES: dict[str, type[Policy]] = {"priority": PriorityPolicy, "fair": FairPolicy}


def cache() -> KvCache:
    return KvCache(PagePool(14), 4, model_digest="tiny")


def policy(name: str) -> Policy:
    return StaticPolicy(4) if name == "static" else POLICIES[name]()


def record(seed: int, policy_name: str) -> list[bytes]:
    """Play a random history on a recording scheduler; return its lines."""
    rnd = random.Random(seed)
    lines: list[bytes] = []
    world = World(num_pages=14, page_size=4, max_num_seqs=4, max_num_batched_tokens=12, max_model_len=40)
    world.scheduler = RecordingScheduler(LIMITS, policy(policy_name), cache(), lines.append)
    world.pool = world.scheduler.cache.pool
    world.runner.fail = lambda row, step: "broken" if rnd.random() < 0.01 else None
    for name in range(60):
        world.add(random_request(rnd, name))
        known = [str(number) for number in range(name + 1)]
        match rnd.randrange(13):
            case 0:
                world.scheduler.abort(rnd.choice(known), world.now_s, rnd.choice([None, None, [0]]))
            case 1:
                world.scheduler.preempt(rnd.choice(known), world.now_s)
            case 2:
                world.scheduler.reset_cache()
            case 3 | 4:
                world.scheduler.pause(rnd.choice(known), rnd.random() < 0.5)
        for _ in range(rnd.randrange(4)):
            world.step(seconds=rnd.random())
    for name in world.requests:
        world.scheduler.pause(name, on=False)
    world.run()
    world.check_answers()
    return lines


@pytest.mark.parametrize("policy_name", ["priority", "fair", "static"])
@pytest.mark.parametrize("seed", range(8))
def test_a_replayed_trace_gives_the_same_decisions(seed: int, policy_name: str) -> None:
    lines = record(seed, policy_name)
    steps = list(replay(lines, Scheduler(LIMITS, policy(policy_name), cache())))
    assert len(steps) > 60
    assert all(step.same for step in steps)


def test_a_replay_notices_another_decision() -> None:
    """The comparison can fail: with other limits the decisions are others."""
    lines = record(1, "priority")
    other = Scheduler(Limits(max_num_seqs=4, max_num_batched_tokens=13, max_model_len=40), PriorityPolicy(), cache())
    first_other = next(step for step in replay(lines, other) if not step.same)
    assert first_other.plan.rows


def test_decisions_do_not_depend_on_the_process() -> None:
    """Neither addresses nor the random order of sets and hashes of strings enter a decision."""
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/property']\n"
        "import test_core_trace, hashlib\n"
        "print(hashlib.sha256(b'\\n'.join(test_core_trace.record(5, 'fair'))).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1
