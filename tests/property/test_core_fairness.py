"""R06, S23, S26, S27: who waits how long. Bounds are stated in the policy and the planner; here they are attacked."""

import random
from collections import defaultdict

import pytest

from fakes.deciding import World, request
from sayfa.base.messages import PageStored, Request, RequestAdmitted, RequestQueued
from sayfa.core.policy import FairPolicy, PriorityPolicy


def overtakes(world: World) -> dict[str, dict[int, int]]:
    """For each request: by how many later ones of each class it was overtaken (let in first though they came later)."""
    queued: list[str] = []
    admitted: set[str] = set()
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for event in world.events:
        if isinstance(event, RequestQueued):
            queued.append(event.request)
        elif isinstance(event, RequestAdmitted) and event.request not in admitted:
            admitted.add(event.request)
            own = queued.index(event.request)
            for other in queued[:own]:
                if other not in admitted:
                    counts[other][world.requests[event.request].priority] += 1
    return counts


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("max_overtakes", [0, 3, 16])
def test_within_a_class_a_request_is_overtaken_at_most_max_overtakes_times(seed: int, max_overtakes: int) -> None:
    rnd = random.Random(seed)
    world = World(num_pages=200, max_num_seqs=6, max_num_batched_tokens=12, max_overtakes=max_overtakes, audit_every=20)
    for name in range(120):
        long = rnd.random() < 0.3
        world.add(request(name, [rnd.randrange(50) for _ in range(rnd.randrange(25, 50) if long else 3)], max_tokens=3))
        for _ in range(rnd.randrange(3)):
            world.step()
    world.run()
    worst = max((count[0] for count in overtakes(world).values()), default=0)
    assert worst <= max_overtakes
    if max_overtakes == 16:
        assert worst > 0, "no short prompt was ever let past a long one: the test shows nothing"


@pytest.mark.parametrize("seed", range(6))
def test_a_flood_of_a_better_class_overtakes_a_request_fewer_than_class_lead_times_a_class(seed: int) -> None:
    rnd = random.Random(seed)
    lead = 8
    world = World(num_pages=60, max_num_seqs=2, policy=PriorityPolicy(lead), audit_every=20, max_overtakes=2)
    for name in range(150):  # two better ones come for each that can be served, without end
        priority = rnd.choice([0, 0, 0, 0, 1, 2])
        world.add(request(name, [rnd.randrange(50) for _ in range(4)], max_tokens=3, priority=priority))
        world.step()
    world.run()
    counts = overtakes(world)
    for name, by_class in counts.items():
        own = world.requests[name].priority
        for other, count in by_class.items():
            assert count <= max(0, own - other) * lead + 2, f"class {own} overtaken {count} times by class {other}"
    assert any(by_class[0] > 2 for name, by_class in counts.items() if world.requests[name].priority == 2)


@pytest.mark.parametrize("budget", [16, 32, 64])
def test_a_short_prompt_is_not_stalled_by_a_long_one_nor_the_long_one_by_short_ones(budget: int) -> None:
    """A prompt within the short share has its token after one step; a flood of them costs only the share."""
    world = World(num_pages=400, page_size=4, max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=1000)
    world.add(request("long", [i % 50 for i in range(800)], max_tokens=1))
    name = 0
    while world.answers["long", 0].last is None:
        world.add(request(name, [name % 50, 1, 2], max_tokens=1))
        world.step()
        assert world.answers[str(name), 0].finish == "length", "the short prompt had to wait"
        name += 1
    share = budget - int(budget * world.limits.short_share)
    assert name <= -(-800 // share)


@pytest.mark.parametrize("short_share", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("policy", [PriorityPolicy, FairPolicy])
@pytest.mark.parametrize("num_short", [5, 14, 40])
def test_a_long_scored_prompt_gets_its_share_of_the_scored_positions_in_each_step(
    short_share: float, policy: type[PriorityPolicy], num_short: int
) -> None:
    """A flood of scored prompts, shorter ones or as long as it, costs a long one no more than the short share."""
    world = World(num_pages=400, page_size=4, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=1000,
                  max_scored=16, short_share=short_share, policy=policy(), audit_every=20)  # fmt: skip
    world.add(request("long", [i % 50 for i in range(400)], max_tokens=1, prompt_logprobs=0))
    world.step()
    long = world.sequences()[0]
    name = 0
    while world.answers["long", 0].last is None:
        while len(world.sequences()) < 8:
            world.add(request(name, [name % 50] * num_short, max_tokens=1, prompt_logprobs=0))
            name += 1
        before = long.computed
        world.step()
        assert long.computed - before >= 16 - int(16 * short_share) or long.finish
    if num_short <= 16 * short_share:
        assert world.answers["0", 0].last is not None, "no short prompt was let past the long one"
    world.run()
    world.check_answers()


@pytest.mark.parametrize("length", [30, 100])
def test_a_flood_of_scored_prompts_takes_no_rows_that_it_cannot_use(length: int) -> None:
    """Another tenant's chat is answered in the step in which it comes, and so is one that stands behind the flood."""
    world = World(num_pages=2000, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=200, max_scored=8,
                  policy=FairPolicy(), audit_every=50)  # fmt: skip
    for name in range(60):
        world.add(request(name, [name % 50] * length, max_tokens=1, tenant="flood", prompt_logprobs=0))
    for name in range(40):
        world.step()
        assert len(world.scheduler._roster.running) <= 2, "rows stand still"
        if name in (2, 7, 30):
            world.add(request(f"chat{name}", [name, 1, 2], max_tokens=1, tenant="chat"))
            world.step()
            assert world.answers[f"chat{name}", 0].finish == "length", "the chat had to wait"
    world.run(max_steps=10_000)
    world.check_answers()


@pytest.mark.parametrize("max_overtakes", [0, 3, 16])
@pytest.mark.parametrize("num_waiting", [1, 3, 12])
def test_nobody_waits_for_the_scores_of_those_before(max_overtakes: int, num_waiting: int) -> None:
    """While a long prompt is scored, others that want scores are passed as often as may be; then they enter, too."""
    world = World(num_pages=4000, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=500, max_scored=8,
                  max_overtakes=max_overtakes, audit_every=50)  # fmt: skip
    for name in range(1 + num_waiting):
        world.add(request(f"scored{name}", [name] * 400, max_tokens=1, prompt_logprobs=0))
    for name in range(50):
        world.add(request(name, [name, 1, 2], max_tokens=1))
        world.step()
        waiting = [n for n in range(name + 1) if world.answers[str(n), 0].last is None]
        assert len(waiting) <= num_waiting, "chats wait for more than those before them to enter"
    assert not waiting
    assert world.answers["scored0", 0].last is None, "nobody was before them: the test shows nothing"
    world.run()
    world.check_answers()
    assert max((count[0] for count in overtakes(world).values()), default=0) <= max_overtakes


def test_decodes_run_in_each_step_beside_a_long_prompt() -> None:
    """S26: whoever decodes gets a token in each step, however long the prompts beside it."""
    world = World(num_pages=400, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=500)
    for name in range(4):
        world.add(request(name, [name], max_tokens=60))
    world.step()
    for name in range(3):
        world.add(request(f"long{name}", [(name + i) % 50 for i in range(300)], max_tokens=1))
    for _ in range(40):
        before = [len(world.answers[str(name), 0].tokens) for name in range(4)]
        plan = world.step()
        assert [len(world.answers[str(name), 0].tokens) for name in range(4)] == [count + 1 for count in before]
        assert plan.num_tokens == 16, "the rest of the budget was not used"


def test_a_better_class_comes_first_and_yields_last() -> None:
    """S23: under pressure the requests of the better class run; those of the worse class yield."""
    world = World(num_pages=12, page_size=4, max_num_seqs=8, max_model_len=40, caching=False)
    for name in range(4):
        world.add(request(f"low{name}", [name, 1, 2], max_tokens=20, priority=1))
    world.step()
    world.add(request("high", [9, 9, 9], max_tokens=30))
    world.run()
    world.check_answers()
    last = {name: answer.last for (name, _), answer in world.answers.items()}
    assert last["high"] is not None
    assert last["high"].times is not None
    assert last["high"].times.preempted == 0
    assert world.scheduler.stats(0, 0, 0, {}).preemptions > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_tenant_s_flood_delays_another_tenant_by_a_bounded_number_of_requests(seed: int) -> None:
    """With fair queueing a newcomer stands behind what runs and one turn of each tenant, not behind the flood."""
    rnd = random.Random(seed)

    def steps_to_answer(policy: FairPolicy | PriorityPolicy) -> int:
        world = World(num_pages=200, max_num_seqs=4, policy=policy, audit_every=50)
        for name in range(100):
            world.add(request(name, [rnd.randrange(50) for _ in range(4)], max_tokens=4, tenant="flood"))
        for _ in range(3):
            world.step()
        for name in range(3):
            world.add(request(f"b{name}", [1, 2, 3, name], max_tokens=4, tenant="b"))
        begun = world.num_steps
        while world.answers["b2", 0].last is None:
            world.step()
        return world.num_steps - begun

    assert steps_to_answer(FairPolicy()) <= 20
    assert steps_to_answer(PriorityPolicy()) > 60


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("arrival", [1, 2, 9])
def test_many_answers_are_as_many_turns(n: int, arrival: int) -> None:
    """A flood of requests for n answers each delays a newcomer of another tenant no more than one of single answers.

    Also one that comes while their prompts are computed, when the further branches are not there yet.
    """
    policy = FairPolicy()
    world = World(num_pages=500, max_num_seqs=4, policy=policy, audit_every=50)
    for name in range(12):
        world.add(request(name, [name, 1, 2], n=n, max_tokens=8, tenant="flood"))
    for _ in range(arrival):
        world.step()
    waits = []
    for name in range(5):
        world.add(request(f"b{name}", [9, 9, name], max_tokens=8, tenant="b"))
        begun = world.num_steps
        while world.answers[f"b{name}", 0].last is None:
            world.step()
        waits.append(world.num_steps - begun)
    assert max(waits) <= 3 * 8, "it stood behind the further branches of the flood"
    world.run()
    world.check_answers()
    assert not policy._due, "what has ended is not due"


def test_equal_tenants_get_equal_shares_and_weights_count() -> None:
    """Jain's index of the tokens that equal tenants had at half time is at least 0.95; a double weight has double."""

    def served(weights: dict[str, float], tenants: int) -> list[int]:
        world = World(num_pages=200, max_num_seqs=4, policy=FairPolicy(weights), audit_every=100)
        for number in range(60):  # one tenant after the other asks for all it wants
            for tenant in range(tenants):
                world.add(request(f"{tenant}-{number}", [tenant, number % 50], max_tokens=4, tenant=str(tenant)))
        for _ in range(60 * tenants // 2):
            world.step()
        return [
            sum(len(answer.tokens) for (name, _), answer in world.answers.items() if name.startswith(f"{tenant}-"))
            for tenant in range(tenants)
        ]

    shares = served({}, 4)
    assert sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares)) >= 0.95
    heavy, light = served({"0": 2.0}, 2)
    assert 1.6 <= heavy / light <= 2.4


def test_a_common_start_is_computed_once_though_all_come_at_once() -> None:
    """S5, S6: who needs a page that is being computed waits for it and computes it not again."""
    world = World(num_pages=200, page_size=4, max_num_seqs=16, max_num_batched_tokens=32, max_model_len=200)
    prefix = [(3 * i) % 50 for i in range(100)]
    for name in range(16):
        world.add(request(name, [*prefix, name, name + 1], max_tokens=1))
    world.run()
    world.check_answers()
    assert world.runner.num_computed == 100 + 16 * 2
    stored = [event.hash for event in world.events if isinstance(event, PageStored)]
    assert len(stored) == len(set(stored)) == 25


def steps_until_answered(world: World, *names: str) -> int:
    """Step until each of these requests has ended; return the steps it took."""
    begun = world.num_steps
    while any(world.answers[name, 0].last is None for name in names):
        world.step()
    return world.num_steps - begun


@pytest.mark.parametrize("policy", [PriorityPolicy, FairPolicy])
@pytest.mark.parametrize("max_scored", [1, 8])
@pytest.mark.parametrize("head_start", [0, 1, 20])
@pytest.mark.parametrize("num_chats", [1, 6])
def test_a_chat_does_not_wait_for_the_pages_of_a_prompt_that_is_scored(
    policy: type[PriorityPolicy], max_scored: int, head_start: int, num_chats: int
) -> None:
    """Few positions are scored in a step: chats with the same start compute it, once for all of them, at their pace."""
    prefix = [(3 * i) % 50 for i in range(600)]
    chats = [request(f"chat{name}", [*prefix, name, 1, 2], max_tokens=1) for name in range(num_chats)]

    def world_with_chats(*before: Request, steps: int = 0) -> World:
        world = World(num_pages=1000, max_num_batched_tokens=64, max_model_len=1000, max_scored=max_scored,
                      policy=policy(), audit_every=20)  # fmt: skip
        for req in before:
            world.add(req)
        for _ in range(steps):
            world.step()
        for chat in chats:
            world.add(chat)
        return world

    names = [chat.id for chat in chats]
    alone = steps_until_answered(world_with_chats(), *names)
    world = world_with_chats(request("scored", [*prefix, 49], max_tokens=1, prompt_logprobs=0), steps=head_start)
    assert steps_until_answered(world, *names) <= 2 * alone
    assert world.answers["scored", 0].last is None, "the prompt was scored before: the test shows nothing"
    world.run(max_steps=1000)
    world.check_answers()
    assert world.runner.num_computed <= 2 * 600 + 1 + 3 * num_chats, "chats did not share what one of them computed"


def test_pages_of_a_scored_prompt_that_were_scored_before_are_waited_for() -> None:
    """After a preemption it computes them at full pace; who needs the same does not compute them again."""
    prefix = [(3 * i) % 50 for i in range(100)]
    world = World(num_pages=200, max_num_batched_tokens=64, max_model_len=200, max_scored=4)
    world.add(request("scored", [*prefix, *range(40)], max_tokens=1, prompt_logprobs=0))
    while world.sequences()[0].computed < 100:
        world.step()
    world.scheduler.preempt("scored", world.now_s)
    world.scheduler.reset_cache()
    world.step()
    world.add(request("chat", [*prefix, 1, 2], max_tokens=1))
    assert steps_until_answered(world, "chat") <= 2
    assert world.answers["chat", 0].last is not None
    assert world.answers["chat", 0].last.num_cached == 100


def test_nobody_waits_for_the_pages_of_a_prompt_that_stands_still() -> None:
    """A long prompt of a better class leads; a chat of that class needs a page of the one that waits for its turn."""
    prefix = [(3 * i) % 50 for i in range(72)]
    world = World(num_pages=1000, max_num_batched_tokens=64, max_model_len=2000)
    world.add(request("behind", [*prefix, *[1] * 900], max_tokens=1, priority=1))
    world.step()
    world.add(request("lead", [i % 50 for i in range(1500)], max_tokens=1))
    world.step()
    world.add(request("chat", [*prefix, 1, 2], max_tokens=1))
    assert steps_until_answered(world, "chat") == 1
    behind = next(sequence for sequence in world.sequences() if sequence.id == "behind")
    assert behind.computed == 64, "it did not stand still: the test shows nothing"
    world.run()
    world.check_answers()
