"""R01, R02, R03, R07: random histories of the scheduler.

After each operation everything is audited, the page map rebuilt from the events equals the pool's tables, and no more
than 64 steps pass without progress. At the end each answer equals what the oracle gives without scheduler and pages,
whoever ran beside it, however its prompt was cut, found in pages or preempted.
"""

import random
from collections import Counter

import pytest

from fakes.deciding import World, random_request, request
from sayfa.base.step import RowResult, RunnerOutput, SchedulerOutput
from sayfa.core.policy import FairPolicy, PriorityPolicy, StaticPolicy


def random_world(rnd: random.Random, **settings: object) -> World:
    num_seqs = rnd.choice([1, 2, 5, 8])
    chosen: dict[str, object] = {
        "num_pages": rnd.choice([6, 9, 14, 30, 100]),
        "page_size": rnd.choice([1, 2, 4, 8]),
        "caching": rnd.random() < 0.8,
        "policy": rnd.choice([PriorityPolicy(), PriorityPolicy(0), FairPolicy(), StaticPolicy(num_seqs)]),
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": num_seqs + rnd.choice([0, 1, 7, 40]),
        "max_model_len": rnd.choice([12, 24, 40]),
        "max_chunk": rnd.choice([None, None, 1, 3]),
        "short_share": rnd.choice([0.0, 0.25, 0.9]),
        "max_overtakes": rnd.choice([0, 2, 16]),
        "max_queued_requests": rnd.choice([3, 1000]),
        "max_queued_tokens": rnd.choice([30, 10_000]),
        "max_scored": rnd.choice([None, 1, 4, 16]),
    }
    return World(**{**chosen, **settings})


class History:
    """A random history: who comes, leaves, yields and breaks is drawn from one seed."""

    def __init__(self, seed: int, **settings: object) -> None:
        self.rnd = random.Random(seed)
        self.world = random_world(self.rnd, **settings)
        self.world.runner.fail = self.fail
        self.faulty = self.rnd.random() < 0.4
        self.counts: Counter[str] = Counter()

    def fail(self, row: int, step: int) -> str | None:
        broken = self.faulty and self.rnd.random() < 0.02
        return "the numbers are not finite" if broken else None

    def operate(self) -> None:
        world, rnd = self.world, self.rnd
        choice = rnd.random()
        names = list(world.scheduler._roster.requests)
        if choice < 0.3:
            self.add()
        elif choice < 0.34 and names:
            world.scheduler.abort(rnd.choice(names), world.now_s)
        elif choice < 0.42 and names:
            world.scheduler.preempt(rnd.choice(names), world.now_s)
        elif choice < 0.44:
            world.scheduler.reset_cache()
        elif choice < 0.47:
            self.interrupted_step()
        elif choice < 0.55 and names:
            self.pause(rnd.choice(names))
        elif choice < 0.56 and names:
            name = rnd.choice(names)
            branches = [number for number in range(world.requests[name].params.n) if rnd.random() < 0.5]
            world.scheduler.abort(name, world.now_s, branches)
        else:
            world.step(seconds=rnd.choice([0.1, 1.0, 5.0]))
        world.check()

    def pause(self, name: str) -> None:
        """Pause a request, or let it go on: more often the first, as much is to happen while it is paused."""
        roster = self.world.scheduler._roster
        self.counts["paused"] += self.world.scheduler.pause(name, self.rnd.random() < 0.6)
        self.counts["held"] += bool(roster.held)
        self.counts["parked"] += sum(sequence.preempted > 0 for sequence in roster.parked)

    def add(self) -> None:
        name = self.counts["asked"]
        self.counts["asked"] += 1
        if not self.world.add(random_request(self.rnd, name)):
            self.counts["refused"] += 1

    def interrupted_step(self) -> None:
        """Something happens between deciding and updating: the results of who left are ignored."""
        world = self.world
        plan = world.scheduler.schedule(world.now_s)
        output = world.runner.execute(plan)
        for name in list(world.scheduler._roster.requests)[:2]:
            if self.rnd.random() < 0.3:
                self.pause(name)
            else:
                self.rnd.choice([world.scheduler.abort, world.scheduler.preempt])(name, world.now_s)
        world.take(world.scheduler.update(output, world.now_s))

    def play(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.operate()
        for name in self.world.scheduler._roster.requests:
            self.world.scheduler.pause(name, on=False)
        self.world.run()
        self.finish()

    def finish(self) -> None:
        world = self.world
        world.check_answers()
        assert world.pool.num_used == 0
        assert not world.runner.rows, "the runner was not told that a row is free"
        assert not world.scheduler.has_work
        assert self.counts["asked"] == self.counts["refused"] + len(world.requests)
        finished = Counter(answer.finish for answer in world.answers.values())
        assert finished == world.scheduler.finished
        assert finished.total() == sum(req.params.n for req in world.requests.values())


@pytest.mark.parametrize("seed", range(150))
def test_random_histories_leak_nothing_and_change_no_answer(seed: int) -> None:
    History(seed).play(120)


def test_the_histories_visit_every_corner() -> None:
    """What never happens in them is not tested by them."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        history = History(seed)
        history.play(120)
        world = history.world
        seen.update(type(event).__name__ for event in world.events)
        seen.update(answer.finish for answer in world.answers.values() if answer.finish)
        seen.update({name: history.counts[name] for name in ("refused", "paused", "held", "parked")})
        seen.update(hits=world.scheduler.stats(0, 0, 0, {}).prefix_hits)
    corners = ["PagesShared", "PageCopied", "PageDropped", "RequestPreempted", "refused", "hits"]
    corners += ["paused", "held", "parked", "stop", "length", "abort", "deadline", "error"]
    assert all(seen[corner] >= 20 for corner in corners), seen


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", range(20))
def test_many_random_histories_leak_nothing_and_change_no_answer(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        History(seed).play(300)


@pytest.mark.parametrize("seed", range(20))
def test_reserved_memory_gives_the_same_answers(seed: int) -> None:
    """The reservation policy is a policy: it changes when something runs, never what it answers."""
    History(seed, reserved=True, num_pages=60, max_model_len=24, page_size=4).play(100)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_at_each_step_equals_undisturbed(seed: int, caching: bool) -> None:
    """R02: a preemption forced at step k, for every k, changes neither tokens nor scores nor finish reason."""
    rnd = random.Random(seed)
    req = request(
        "x", [rnd.randrange(50) for _ in range(rnd.randrange(1, 14))], n=rnd.choice([1, 3]), max_tokens=9,
        prompt_logprobs=rnd.choice([None, 0]), seed=seed,
    )  # fmt: skip

    def play(forced: int | None) -> tuple[dict[tuple[str, int], tuple[object, ...]], int]:
        world = World(page_size=4, max_num_batched_tokens=8, max_num_seqs=4, caching=caching)
        world.add(req)
        while world.scheduler.has_work:
            world.step()
            if world.num_steps == forced:
                world.scheduler.preempt("x", world.now_s)
        world.check_answers()
        answers = {
            key: (a.tokens, a.scores, a.finish, a.last and a.last.stop_token) for key, a in world.answers.items()
        }
        return answers, world.num_steps

    undisturbed, num_steps = play(None)
    for forced in range(1, num_steps + 1):
        disturbed, _ = play(forced)
        assert disturbed == undisturbed, f"preempted after step {forced}"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("crowded", [True, False])
def test_t17_paused_at_each_step_equals_undisturbed(seed: int, caching: bool, crowded: bool) -> None:
    """T17: paused after step k for some steps, for every k, a request answers as ever, and so do those beside it.

    In a crowd it loses its pages meanwhile, as others need them; alone it keeps them and no token is computed twice.
    """
    rnd = random.Random(seed)
    num_others = 5 if crowded else 0
    reqs = [
        request(
            name, [rnd.randrange(50) for _ in range(rnd.randrange(1, 14))], n=rnd.choice([1, 3]), max_tokens=9,
            prompt_logprobs=rnd.choice([None, 0]), seed=seed,
        )
        for name in ("x", *range(num_others))
    ]  # fmt: skip

    def play(paused_at: int | None, steps: int) -> tuple[dict[tuple[str, int], tuple[object, ...]], int, World]:
        world = World(
            page_size=4, num_pages=14, max_num_batched_tokens=8, max_num_seqs=4, caching=caching, audit_every=7
        )
        for req in reqs:
            world.add(req)
        until = None
        while world.scheduler.has_requests:
            if world.scheduler.has_work:
                world.step()
            else:
                until = world.num_steps  # nobody else has anything to do
            if world.num_steps == paused_at and until is None and world.scheduler.pause("x", on=True):
                until = world.num_steps + steps
            if until is not None and world.num_steps >= until:
                world.scheduler.pause("x", on=False)
        world.check_answers()
        answers = {
            key: (a.tokens, a.scores, a.finish, a.last and a.last.stop_token) for key, a in world.answers.items()
        }
        return answers, world.num_steps, world

    undisturbed, num_steps, world = play(None, 0)
    num_computed = world.runner.num_computed
    for paused_at in range(1, num_steps + 1):
        disturbed, _, world = play(paused_at, rnd.choice([1, 3, 20]))
        assert disturbed == undisturbed, f"paused after step {paused_at}"
        if not crowded:
            assert world.runner.num_computed == num_computed, "a pause with room enough cost work"


@pytest.mark.parametrize("seed", range(10))
def test_each_prompt_position_is_scored_once_and_in_order(seed: int) -> None:
    """Chunks, preemption and prefix pages neither skip nor repeat a score."""
    rnd = random.Random(seed)
    world = World(page_size=2, num_pages=rnd.choice([12, 40]), max_num_batched_tokens=8, max_num_seqs=4,
                  max_chunk=rnd.choice([None, 1, 3]))  # fmt: skip
    for name in range(8):
        world.add(request(name, [1] * rnd.randrange(1, 15), n=rnd.choice([1, 2]), max_tokens=rnd.choice([0, 4]),
                          prompt_logprobs=0))  # fmt: skip
    while world.scheduler.has_work:
        world.step()
        if rnd.random() < 0.3:
            world.scheduler.preempt(str(rnd.randrange(8)), world.now_s)
    for name, req in world.requests.items():
        assert world.answers[name, 0].scores == list(range(1, len(req.prompt)))
        for branch in range(1, req.params.n):
            assert world.answers[name, branch].scores == []


@pytest.mark.parametrize("seed", range(10))
def test_the_neighbours_of_a_broken_row_are_undisturbed(seed: int) -> None:
    """R13: the broken row's request ends with its error; its pages cannot be found; all others equal the oracle."""
    world = World(num_pages=80, max_num_seqs=6)
    for name in range(6):
        world.add(request(name, list(range(name, name + 9)), max_tokens=8, n=1 + name % 2))
    rnd = random.Random(seed)
    at, victim = rnd.randrange(1, 6), rnd.randrange(6)
    broken: list[str] = []

    def break_row(plan: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        rows = {s.row: s for s in world.sequences() if s.row >= 0}
        index = victim % len(output.rows)
        broken.append(rows[output.rows[index].row].id)
        results = list(output.rows)
        results[index] = RowResult(row=results[index].row, error="not finite", error_code="numerical_error")
        return RunnerOutput(step=plan.step, rows=results)

    while world.scheduler.has_work:
        plan = world.scheduler.schedule(world.now_s)
        output = world.runner.execute(plan)
        if plan.step == at:
            output = break_row(plan, output)
            held = [p for s in world.sequences() if s.id == broken[0] for p in s.pages]
        world.take(world.scheduler.update(output, world.now_s))
        if plan.step == at:
            assert all(world.pool.hash_of(page) is None for page in held)
        world.check()
    world.check_answers()
    for (name, _), answer in world.answers.items():
        assert (answer.finish == "error") == (name == broken[0])
        assert answer.last is not None
        assert answer.last.error_code == ("numerical_error" if name == broken[0] else None)
