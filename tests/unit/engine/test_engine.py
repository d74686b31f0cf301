"""The engine's own duties: checks, seeds, honest refusals, drain, figures. The scheduler below it is the real one."""

import random

import pytest

from fakes.engines import run
from fakes.fake_engine import make_engine
from sayfa.base.clock import FakeClock
from sayfa.base.errors import InvalidRequest, Overloaded
from sayfa.base.messages import Request, RequestAdmitted
from sayfa.base.sampling_params import SamplingParams
from sayfa.core.policy import FairPolicy, PriorityPolicy
from sayfa.engine.estimate import MAX_RETRY_S, MIN_FINISHED, QueueEstimate


def request(name, *prompt, deadline_s=None, tenant="", priority=0, **params):
    params.setdefault("max_tokens", 4)
    return Request(
        id=name,
        prompt=list(prompt) or [1, 2, 3],
        params=SamplingParams(**params),
        deadline_s=deadline_s,
        tenant=tenant,
        priority=priority,
    )


@pytest.mark.parametrize(("bad", "param"), [
    (request("x", 1000), "prompt"),
    (request("x", -1), "prompt"),
    (request("x", *range(200)), "prompt"),
    (request("x", 1, temperature=float("nan")), "temperature"),
    (request("x", 1, n=10_000), "n"),
    (request("x", 1, stop_token_ids=[1000]), "stop_token_ids"),
    (request("x", 1, allowed_token_ids=[-4]), "allowed_token_ids"),
    (request("x", 1, logit_bias={1: float("inf")}), "logit_bias"),
    (Request(id="x", prompt=[], params=SamplingParams()), "prompt"),
    (Request(id="x", prompt=[1], params=SamplingParams(), adapter="none"), "adapter"),
])  # fmt: skip
def test_what_can_never_be_served_is_refused_by_its_field_and_leaves_no_trace(bad, param):
    engine = make_engine()
    with pytest.raises(InvalidRequest) as error:
        engine.add(bad)
    assert error.value.param == param
    assert not engine.has_work
    engine.audit()


def test_requests_without_a_seed_get_one_from_the_engines_own_seed():
    def answer(engine_seed, **params):
        return run(make_engine(seed=engine_seed), [request("a", **params), request("b", **params)])

    first, again, other = answer(1), answer(1), answer(2)
    assert first["a"][0].tokens == again["a"][0].tokens
    assert first["b"][0].tokens == again["b"][0].tokens
    assert first["a"][0].tokens != first["b"][0].tokens
    assert first["a"][0].tokens != other["a"][0].tokens
    assert answer(1, seed=9)["a"][0].tokens == answer(2, seed=9)["b"][0].tokens


def test_who_enters_is_told_before_the_step_that_computes_it():
    """That step may end the process; then nobody else could say who was running."""
    told, seen = [], []

    class LookingRunner:
        def __init__(self, runner):
            self.runner = runner

        def execute(self, plan):
            seen.append(
                [event.request for message in told for event in message.events if type(event) is RequestAdmitted]
            )
            return self.runner.execute(plan)

    engine = make_engine(wrap=LookingRunner)
    engine.add(request("a"))
    engine.add(request("b", n=2))
    messages = []
    while engine.has_work:
        messages.append(engine.step(told.append))
    assert (seen[0], seen[-1]) == (["a", "b"], ["a", "b", "b"])
    assert not any(type(event) is RequestAdmitted for message in messages for event in message.events)
    events = sorted((message.first_event, len(message.events)) for message in told + messages if message.events)
    assert [first for first, _ in events] == [sum(count for _, count in events[:n]) for n in range(len(events))]


def test_figures_and_events_of_steps_have_no_gaps():
    clock = FakeClock()

    class TickingRunner:
        def __init__(self, runner):
            self.runner = runner

        def execute(self, plan):
            clock.advance(0.25)
            return self.runner.execute(plan)

    engine = make_engine(clock=clock, wrap=TickingRunner)
    messages = []
    run(engine, [request(f"r{i}", n=2) for i in range(5)], lambda step, message: messages.append(message))
    next_event = 0
    for number, message in enumerate(messages, 1):
        assert message.stats.step == number
        assert message.stats.compute_s == 0.25
        assert message.first_event == next_event
        next_event += len(message.events)
    pong = engine.pong(3)
    assert (pong.number, pong.steps, pong.busy, pong.since_step_s) == (3, len(messages), False, 0.0)
    assert pong.expected_step_s == 0.25
    clock.advance(60)
    engine.add(request("after a pause"))
    assert engine.pong(4).since_step_s == 0.0  # an idle engine owed no progress


def test_drain_refuses_exactly_those_that_have_not_started():
    engine = make_engine(max_num_seqs=2)
    for i in range(6):
        engine.add(request(f"r{i}", max_tokens=10))
    engine.step()
    refused = engine.refuse_waiting()
    assert [refusal.id for refusal in refused] == ["r2", "r3", "r4", "r5"]
    assert {refusal.kind for refusal in refused} == {"draining"}
    finished = {}
    while engine.has_work:
        finished |= {output.id: output.finish for output in engine.step().outputs if output.finish}
    assert finished["r0"] == finished["r1"] == "length"
    engine.audit()


@pytest.mark.parametrize("seed", range(20))
def test_ending_all_gives_each_open_branch_exactly_one_end(seed):
    rng = random.Random(seed)
    engine = make_engine(max_num_seqs=3)
    wanted = {}
    for i in range(8):
        wanted[f"r{i}"] = rng.randint(1, 4)
        engine.add(request(f"r{i}", n=wanted[f"r{i}"], max_tokens=rng.randint(1, 8)))
    ends = []
    for _ in range(rng.randrange(12)):
        ends += [(output.id, output.branch) for output in engine.step().outputs if output.finish]
    for output in engine.end_all("over").outputs:
        assert (output.finish, output.error) == ("error", "over")
        ends.append((output.id, output.branch))
    assert sorted(ends) == sorted((name, branch) for name, n in wanted.items() for branch in range(n))
    while engine.has_work:
        engine.step()
    engine.audit()


def test_an_abort_frees_everything_within_a_step():
    engine = make_engine()
    for i in range(12):
        engine.add(request(f"r{i}", max_tokens=50, n=2))
    engine.step()
    engine.abort([f"r{i}" for i in range(12)] + ["unknown"])
    stats = engine.step().stats
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert not engine.has_work


def test_a_full_queue_refuses_with_a_time_that_follows_from_the_queue():
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1, max_queued_requests=MIN_FINISHED + 4)
    for i in range(MIN_FINISHED + 4):
        engine.add(request(f"r{i}", max_tokens=1))
    for _ in range(MIN_FINISHED + 1):  # one answer each two seconds
        engine.step()
        clock.advance(2.0)
    for i in range(MIN_FINISHED + 1):
        engine.add(request(f"more{i}"))
    with pytest.raises(Overloaded) as full:
        engine.add(request("one too many"))
    half_of_the_queue_s = 2.0 * (MIN_FINISHED + 4) / 2
    assert 0.7 * half_of_the_queue_s <= full.value.retry_after_s <= 1.3 * half_of_the_queue_s + 1
    assert str(full.value.retry_after_s) in full.value.message
    engine.abort(["more0"])
    with pytest.raises(Overloaded, match="deadline") as hopeless:
        engine.add(request("hurried", deadline_s=3.0))
    assert hopeless.value.code == "deadline_unreachable"
    engine.add(request("patient", deadline_s=300.0))


def paced_engine(policy, **limits):
    """An engine with one row that gives an answer each two seconds, and ten requests of tenant "crowd" in the queue."""
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1, policy=policy, **limits)
    for i in range(MIN_FINISHED + 11):
        engine.add(request(f"r{i}", max_tokens=1, tenant="crowd"))
    for _ in range(MIN_FINISHED + 1):
        engine.step()
        clock.advance(2.0)
    return engine


@pytest.mark.parametrize(("policy", "fields"), [(FairPolicy, {"tenant": "alone"}), (PriorityPolicy, {"priority": -1})])
def test_of_the_queue_only_what_is_before_a_request_speaks_against_its_deadline(policy, fields):
    engine = paced_engine(policy())
    for who in ({"tenant": "crowd"}, {"tenant": "crowd", "priority": 1}):
        with pytest.raises(Overloaded, match="deadline") as hopeless:
            engine.add(request("behind", deadline_s=15.0, **who))
        assert "about 20.0 s" in hopeless.value.message
    engine.add(request("ahead", deadline_s=15.0, max_tokens=1, **fields))
    while not (outputs := [output for output in engine.step().outputs if output.id == "ahead"]):
        pass
    assert [output.finish for output in outputs] == ["length"]
    assert len(engine._scheduler.unstarted()) >= 8, "the others were before it"


def test_all_answers_of_the_requests_in_the_queue_count():
    """Nine requests for ten answers each are ninety answers: counted by requests they promised a tenth of the time."""
    engine = paced_engine(PriorityPolicy(), max_queued_requests=MIN_FINISHED + 11)
    for i in range(9):
        engine.add(request(f"many{i}", n=10, max_tokens=1))
    with pytest.raises(Overloaded) as full:
        engine.add(request("one too many"))
    half_of_the_queue_s = 2.0 * (10 + 90) / 2
    assert 0.7 * half_of_the_queue_s <= full.value.retry_after_s <= 1.3 * half_of_the_queue_s + 1


class TickingClock(FakeClock):
    """Each look at it takes a tenth of a second, so that steps take time."""

    def monotonic(self):
        self.advance(0.1)
        return super().monotonic()


def test_an_answer_that_the_context_cuts_short_is_not_hopeless_for_what_it_cannot_have():
    engine = make_engine(clock=TickingClock())
    run(engine, [request("a", max_tokens=4)])
    wishes = {"max_tokens": 16, "ignore_eos": True, "deadline_s": 2.0}
    with pytest.raises(Overloaded, match="deadline"):
        engine.add(request("long", *[1] * 100, **wishes))
    engine.add(request("nearly full", *[1] * (engine.info.max_model_len - 2), **wishes))


@pytest.mark.parametrize("seed", range(20))
def test_the_estimate_is_whole_bounded_and_promises_nothing_it_does_not_know(seed):
    rng = random.Random(seed)
    estimate, now_s = QueueEstimate(rng), 0.0
    assert estimate.wait_s(100, now_s) is None
    assert estimate.retry_after_s(100, now_s) == 1
    for _ in range(200):
        now_s += rng.expovariate(1.0)
        estimate.note_finished(rng.randint(1, 3), now_s)
        seconds = estimate.retry_after_s(rng.randrange(10_000), now_s)
        assert isinstance(seconds, int)
        assert 1 <= seconds <= MAX_RETRY_S
    assert estimate.wait_s(0, now_s) == 0.0
    assert 20 < estimate.wait_s(100, now_s) < 100  # two answers a second on average
    estimate.begin(now_s)
    assert estimate.wait_s(100, now_s) is None


def test_answers_that_end_together_are_not_taken_for_a_pace():
    """A batch of 256 answers each ten seconds: right after one the queue looked as if it were gone at once."""
    estimate = QueueEstimate(random.Random(0))
    estimate.begin(5.0)
    for batch in range(1, 200):
        now_s = 5.0 + 10.0 * batch
        estimate.note_finished(256, now_s)
        for later_s in (0.0, 1.0, 9.0):
            wait_s = estimate.wait_s(2560, now_s + later_s)
            assert 99 <= wait_s <= 100 + 100 * later_s / 10 / min(batch, 64) + 1e-9
