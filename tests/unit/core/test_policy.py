"""Who is first, who enters, who yields. Bounds under load are in tests/property/test_core_fairness.py."""

import random

import pytest

from fakes.deciding import request
from sayfa.core.policy import MAX_TENANTS, PREEMPTIONS_PER_CLASS, FairPolicy, Policy, PriorityPolicy, StaticPolicy
from sayfa.core.sequence import RequestState, Sequence, Status
from sayfa.core.waiting import WaitingQueue


def state(policy: Policy, number: int, **arguments: object) -> RequestState:
    made = RequestState(request(number, [1, 2, 3, 4], **arguments), number, 0.0, 100)  # type: ignore[arg-type]
    made.order = policy.order(made)
    policy.queued(made)
    return made


def queue_of(*states: RequestState) -> list[str]:
    """Return the ids in the order the queue gives them."""
    queue = WaitingQueue()
    for one in random.Random(0).sample(states, len(states)):
        queue.add(one.branch(0))
    queue.check()
    return [sequence.id for sequence in queue]


def test_first_come_first_served_inside_a_class() -> None:
    policy = PriorityPolicy()
    assert queue_of(*(state(policy, number) for number in range(20))) == [str(number) for number in range(20)]


def test_a_class_is_ahead_by_a_fixed_number_of_arrivals() -> None:
    policy = PriorityPolicy(class_lead=3)
    states = [state(policy, 0, priority=1), *(state(policy, number) for number in range(1, 6))]
    assert queue_of(*states) == ["1", "2", "0", "3", "4", "5"]


def test_without_a_lead_there_are_no_classes() -> None:
    policy = PriorityPolicy(class_lead=0)
    states = [state(policy, number, priority=-number) for number in range(5)]
    assert queue_of(*states) == ["0", "1", "2", "3", "4"]
    assert [policy.rank(one.branches[0])[0] for one in states] == [0] * 5


def test_the_lowest_class_and_in_it_the_latest_arrival_yields_first() -> None:
    policy = PriorityPolicy()
    states = [state(policy, number, priority=priority) for number, priority in enumerate([1, 0, 1, 0, -1])]
    ranked = sorted((one.branch(0) for one in states), key=policy.rank)
    assert [sequence.id for sequence in ranked] == ["4", "1", "3", "0", "2"]


def test_who_yielded_often_rises_by_a_class() -> None:
    policy = PriorityPolicy()
    low, high = state(policy, 0, priority=1).branch(0), state(policy, 1, priority=0).branch(0)
    assert policy.rank(low) > policy.rank(high)
    low.preempted = PREEMPTIONS_PER_CLASS
    assert policy.rank(low) < policy.rank(high)


def test_tenants_take_turns_by_tokens() -> None:
    """Tenant a asks for five requests before b asks for two: b's come after one of a's each."""
    policy = FairPolicy()
    states = [state(policy, number, tenant="a", max_tokens=6) for number in range(5)]
    states += [state(policy, number, tenant="b", max_tokens=6) for number in (5, 6)]
    assert queue_of(*states) == ["0", "5", "1", "6", "2", "3", "4"]


def test_a_tenant_that_was_idle_saves_nothing_up() -> None:
    policy = FairPolicy()
    for number in range(10):
        policy.entered(state(policy, number, tenant="a", max_tokens=6).branch(0))
    late = [state(policy, number, tenant="b", max_tokens=6) for number in range(20, 25)]
    busy = state(policy, 30, tenant="a", max_tokens=6)
    assert queue_of(*late, busy) == ["20", "21", "30", "22", "23", "24"]


def test_one_tenant_is_served_first_come_first_served_in_classes() -> None:
    policy = FairPolicy(class_lead_tokens=30)
    states = [state(policy, 0, priority=1, max_tokens=6), *(state(policy, i, max_tokens=6) for i in range(1, 8))]
    assert queue_of(*states) == ["1", "2", "0", "3", "4", "5", "6", "7"]


def test_further_answers_of_a_worse_class_hold_nobody_s_time_up() -> None:
    """They may be due for long; until then who comes anew would get all that the others had as credit."""
    policy = FairPolicy()
    policy.entered(state(policy, 0, tenant="slow", priority=100, n=2, max_tokens=6).branch(0))
    for number in range(1, 100):
        policy.entered(state(policy, number, tenant="a", max_tokens=6).branch(0))
    a, *others = [state(policy, number, tenant="ab"[number > 100], max_tokens=6) for number in range(100, 150)]
    assert sum(other.order < a.order for other in others) == 1


def test_time_never_runs_backwards() -> None:
    """Of a worse class somebody with an early tag enters late, and has further answers."""
    rng = random.Random(3)
    policy = FairPolicy(class_lead_tokens=50)
    states = [
        state(policy, number, tenant=rng.choice("abc"), priority=rng.randrange(4), n=rng.randrange(1, 5), max_tokens=6)
        for number in range(200)
    ]
    for one in sorted(states, key=lambda one: (one.order, one.number)):
        before = policy._now
        policy.entered(one.branch(0))
        assert policy._now >= before
        if rng.random() < 0.5:
            end(one, 3)
            policy.ended(one.branches[0])
        assert policy._now >= before


def end(one: RequestState, num_output: int) -> None:
    sequence = one.branches[0]
    sequence.tokens += [0] * num_output
    sequence.status = Status.FINISHED
    sequence.finish = "length"


def test_what_an_answer_had_is_settled_with_the_next_request() -> None:
    """Tenant a names no limit and has short answers; it is not taken for one that uses all it might have used."""
    policy = FairPolicy()
    for number in range(0, 40, 2):
        for tenant, limit in (("a", 90), ("b", 3)):
            one = state(policy, number, tenant=tenant, max_tokens=limit)
            policy.entered(one.branch(0))
            end(one, 3)
            policy.ended(one.branches[0])
    assert policy._finish["a"] == policy._finish["b"] == 20 * (4 + 3)


def test_many_tenants_cost_bounded_memory() -> None:
    policy = FairPolicy()
    for number in range(3 * MAX_TENANTS):
        state(policy, number, tenant=f"tenant{number}")
    assert len(policy._finish) <= MAX_TENANTS


def test_a_static_batch_closes_when_it_is_full_and_opens_when_it_is_empty() -> None:
    policy = StaticPolicy(2)
    sequences = [state(policy, number).branch(0) for number in range(4)]
    for running, sequence in enumerate(sequences[:2]):
        assert policy.may_enter(sequence, running)
        policy.entered(sequence)
    assert not policy.may_enter(sequences[2], 2)
    assert not policy.may_enter(sequences[2], 1)
    sequences[0].preempted = 1
    assert policy.may_enter(sequences[0], 1), "a member that yielded comes back"
    assert policy.may_enter(sequences[2], 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_stays_sorted_and_counted(seed: int) -> None:
    rnd = random.Random(seed)
    policy, queue = PriorityPolicy(4), WaitingQueue()
    inside: list[Sequence] = []
    for number in range(200):
        if inside and rnd.random() < 0.5:
            queue.remove(inside.pop(rnd.randrange(len(inside))))
        else:
            inside.append(state(policy, number, priority=rnd.randrange(-1, 2)).branch(0))
            if rnd.random() < 0.3:
                inside[-1].state.admitted_s = 1.0
            queue.add(inside[-1])
        queue.check()
    assert len(queue) == len(inside)
    if inside:
        queue.remove(inside[0])
        with pytest.raises(RuntimeError, match="not in the waiting queue"):
            queue.remove(inside[0])


def test_who_ends_after_his_tenant_was_forgotten_is_settled_with_nobody() -> None:
    """His tag was past already; a newcomer's is not touched."""
    policy = FairPolicy()
    old, new = state(policy, 0, tenant="a", max_tokens=6), state(policy, 1, tenant="b", max_tokens=6)
    old.branch(0)
    end(old, 6)
    del policy._finish["a"]
    before = dict(policy._finish)
    policy.ended(old.branches[0])
    assert policy._finish == before
    assert new.order == 0
