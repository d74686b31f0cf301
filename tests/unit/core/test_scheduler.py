"""The scheduler's rules, each in the smallest case that shows it. Histories and bounds are in tests/property."""

import pytest

from fakes.deciding import World, request
from fakes.runner import FakeRunner
from sayfa.base.errors import ConfigError, InvalidRequest, LostStateError, Overloaded
from sayfa.base.messages import RequestAdmitted, RequestFinished, RequestPreempted, RequestQueued, StepMade
from sayfa.base.sampling_params import MAX_SEED
from sayfa.base.step import RowResult, RunnerOutput, ScheduledRow
from sayfa.core import kv_cache
from sayfa.core.planner import Planner
from sayfa.core.policy import StaticPolicy
from sayfa.core.results import Results
from sayfa.core.scheduler import Limits
from sayfa.core.sequence import branch_seed


def count_up(context: list[int], seed: int) -> int:
    """The rule "last token + 1"."""
    return context[-1] + 1


def world(**settings: object) -> World:
    return World(**{"rule": count_up, **settings})


# ------------------------------------------------------------------------------------------- plans


def test_a_prompt_and_its_answer_in_plain_steps() -> None:
    w = world()
    w.add(request("a", [5, 6, 7], max_tokens=3))
    first = w.step()
    assert first.rows == [ScheduledRow(0, 0, 3, 1, True)]
    assert (first.new[0].tokens, first.new[0].num_prompt, first.new[0].pages) == ([5, 6, 7], 3, [1])
    second = w.step()
    assert (second.rows, second.new, second.added_pages) == ([ScheduledRow(0, 3, 1, 1, True)], [], [])
    third = w.step()
    assert (third.rows, third.added_pages) == ([ScheduledRow(0, 4, 1, 1, True)], [(0, [2])])
    answer = w.answers["a", 0]
    assert (answer.tokens, answer.finish) == ([8, 9, 10], "length")
    assert w.step().forget == [0]
    assert not w.scheduler.has_work


def test_decodes_come_first_and_prompts_fill_the_step() -> None:
    w = world(max_num_batched_tokens=16)
    for name in "abc":
        w.add(request(name, [1, 2], max_tokens=9))
    w.step()
    w.add(request("long", list(range(40)), max_tokens=9))
    plan = w.step()
    assert [(row.count, row.num_logits, row.sample) for row in plan.rows] == [(1, 1, True)] * 3 + [(13, 0, False)]
    counts = [w.step().rows[-1] for _ in range(3)]
    assert [(row.start, row.count, row.sample) for row in counts] == [(13, 13, False), (26, 13, False), (39, 1, True)]


def test_who_comes_enters_and_who_ends_leaves_in_the_same_step() -> None:
    w = world(max_num_seqs=2)
    w.add(request("short", [1], max_tokens=1))
    w.add(request("long", [1], max_tokens=9))
    w.add(request("next", [1], max_tokens=9))
    w.step()
    assert w.answers["short", 0].finish == "length"
    plan = w.step()
    assert plan.forget == [0]
    assert [new.row for new in plan.new] == [0]
    assert len(plan.rows) == 2


def test_a_second_request_takes_the_first_one_s_pages() -> None:
    w = world()
    w.add(request("a", list(range(10)), max_tokens=1))
    w.run()
    w.add(request("b", list(range(10)), max_tokens=1))
    plan = w.step()
    assert plan.rows == [ScheduledRow(0, 8, 2, 1, True)]
    last = w.answers["b", 0].last
    assert last is not None
    assert (last.num_prompt, last.num_cached) == (10, 8)
    stats = w.scheduler.stats(0.0, 0.0, 0.0, {})
    assert (stats.prefix_queries, stats.prefix_hits) == (20, 8)


@pytest.mark.parametrize("num_prompt", [4, 5, 6, 8, 9])
def test_branches_share_the_prompt_and_copy_only_the_open_page(num_prompt: int) -> None:
    """S7: the prompt is computed once; each further branch computes its last token alone."""
    w = world(caching=False, page_size=4)
    w.add(request("a", list(range(num_prompt)), n=3, max_tokens=4))
    w.step()
    plan = w.step()
    partial = (num_prompt - 1) % 4 != 0
    assert len(plan.copies) == (2 if partial else 0)
    assert [row.row for row in plan.rows] == [0, 1, 2]
    assert plan.rows[1:] == [ScheduledRow(new.row, num_prompt - 1, 1, 1, True) for new in plan.new]
    assert [new.seed for new in plan.new] == [branch_seed(1, 1), branch_seed(1, 2)]
    whole = (num_prompt - 1) // 4
    assert all(new.pages[:whole] == w.sequences()[0].pages[:whole] for new in plan.new)
    w.run()
    w.check_answers()
    assert w.runner.num_computed == num_prompt + 2 + 3 * 3


def test_a_branch_is_not_looked_up_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source's pages are its own in any case; to hash a long prompt anew for each branch would take seconds."""
    hashed = []
    page_hash = kv_cache.page_hash
    monkeypatch.setattr(kv_cache, "page_hash", lambda *given: hashed.append(given) or page_hash(*given))
    w = world(page_size=2, num_pages=200, max_num_batched_tokens=64)
    w.add(request("a", list(range(40)), n=8, max_tokens=2))
    w.run()
    w.check_answers()
    assert len(hashed) <= 20 + 8


def test_branches_that_find_no_row_come_later_and_answer_the_same() -> None:
    """B064: n = 8 that fits only in turns."""
    w = World(max_num_seqs=2, num_pages=7, page_size=2, max_num_batched_tokens=4, max_model_len=12)
    w.add(request("a", [1, 2, 3, 4, 5], n=8, max_tokens=5))
    w.run()
    w.check_answers()
    assert [w.answers["a", branch].finish for branch in range(8)] == ["length"] * 8


def test_branches_differ_and_the_first_is_the_plain_answer() -> None:
    """B022: with a seed the choices differ from each other, are the same each time, and choice 0 is that of n = 1."""

    def answers(n: int) -> list[list[int]]:
        w = World()
        w.add(request("a", [1, 2, 3], n=n, seed=7, max_tokens=8))
        w.run()
        return [w.answers["a", branch].tokens for branch in range(n)]

    several = answers(4)
    assert several == answers(4)
    assert len({tuple(tokens) for tokens in several}) == 4
    assert several[0] == answers(1)[0]


def test_branch_seeds_are_distinct_and_fit_the_field() -> None:
    seeds = [branch_seed(seed, branch) for seed in (-MAX_SEED - 1, -1, 0, 1, MAX_SEED) for branch in range(128)]
    assert len(set(seeds)) == len(seeds)
    assert all(-MAX_SEED - 1 <= seed <= MAX_SEED for seed in seeds)


# ------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize(
    ("params", "tokens", "finish", "stop"),
    [
        ({"max_tokens": 5}, [4, 5, 6, 7, 8], "length", None),
        ({"max_tokens": None}, list(range(4, 14)), "length", None),
        ({"max_tokens": 99}, list(range(4, 14)), "length", None),
        ({"stop_token_ids": [6]}, [4, 5], "stop", 6),
        ({"eos_token_ids": [4]}, [], "stop", 4),
        ({"eos_token_ids": [4], "ignore_eos": True, "max_tokens": 2}, [4, 5], "length", None),
        ({"stop_token_ids": [5], "eos_token_ids": [4], "ignore_eos": True}, [4], "stop", 5),
        ({"stop_token_ids": [4, 7], "min_tokens": 2}, [4, 5, 6], "stop", 7),
        ({"stop_token_ids": [6], "max_tokens": 3}, [4, 5], "stop", 6),
        ({"stop_token_ids": [7], "max_tokens": 3}, [4, 5, 6], "length", None),
        ({"max_tokens": 0}, [], "length", None),
    ],
)
def test_endings(params: dict[str, object], tokens: list[int], finish: str, stop: int | None) -> None:
    w = world(max_model_len=13)
    w.add(request("a", [1, 2, 3], **params))  # type: ignore[arg-type]
    w.run()
    answer = w.answers["a", 0]
    assert answer.last is not None
    assert (answer.tokens, answer.finish, answer.last.stop_token) == (tokens, finish, stop)


@pytest.mark.parametrize("num_prompt", [1, 2, 9])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("scores", [None, 0])
def test_a_request_for_no_tokens_computes_its_prompt_and_samples_nothing(
    num_prompt: int, n: int, scores: int | None
) -> None:
    """B037."""
    w = world(max_num_batched_tokens=8)
    w.add(request("a", list(range(num_prompt)), n=n, max_tokens=0, prompt_logprobs=scores))
    while w.scheduler.has_work:
        assert not any(row.sample for row in w.step().rows)
    assert [w.answers["a", branch].finish for branch in range(n)] == ["length"] * n
    assert w.answers["a", 0].scores == ([] if scores is None else list(range(1, num_prompt)))


@pytest.mark.parametrize("num_prompt", range(3, 14))
def test_a_request_for_no_tokens_ends_also_without_the_branch_that_is_scored(num_prompt: int) -> None:
    """The other one finds in pages all that a score would need, and still has a token to compute."""
    w = world(max_scored=1)
    w.add(request("before", list(range(num_prompt)), max_tokens=1))
    w.run()
    w.add(request("a", list(range(num_prompt)), n=2, max_tokens=0, prompt_logprobs=0))
    w.step()
    assert w.scheduler.abort("a", w.now_s, [0])
    w.run(max_steps=100)
    assert [w.answers["a", branch].finish for branch in range(2)] == ["abort", "length"]


def test_a_branch_that_is_not_scored_does_not_end_the_one_that_is() -> None:
    """An abort by name makes the other branches at once; the third has its prompt before the first is scored."""
    w = world(max_scored=1)
    w.add(request("a", list(range(9)), n=3, max_tokens=0, prompt_logprobs=0))
    w.step()
    assert w.scheduler.abort("a", w.now_s, [1])
    w.run()
    assert [w.answers["a", branch].finish for branch in range(3)] == ["length", "abort", "length"]
    assert w.answers["a", 0].scores == list(range(1, 9))


def test_a_prompt_that_leaves_room_for_one_token_gets_one() -> None:
    """B038: exact end at the context's border."""
    w = world(max_model_len=8)
    w.add(request("a", list(range(7)), max_tokens=None))
    w.add(request("full", list(range(8)), max_tokens=0))
    w.run()
    assert (w.answers["a", 0].tokens, w.answers["a", 0].finish) == ([7], "length")
    assert w.answers["full", 0].finish == "length"


def test_a_growing_request_that_fills_the_pool_ends_with_length() -> None:
    """B064: it fits at first, its output does not; those beside it finish."""
    w = world(num_pages=6, page_size=2, max_model_len=60)
    w.add(request("grows", [1, 2, 3], max_tokens=50))
    for name in range(4):
        w.add(request(name, [name], max_tokens=3))
    w.run()
    assert w.answers["grows", 0].finish == "length"
    assert len(w.answers["grows", 0].tokens) == 8  # 10 slots for 3 + 7 tokens, and the token after them
    assert [w.answers[str(name), 0].finish for name in range(4)] == ["length"] * 4
    assert w.scheduler.finished == {"length": 5}


def test_a_deadline_ends_who_waits_and_who_runs() -> None:
    w = world(max_num_seqs=1)
    w.add(request("runs", [1], max_tokens=50, deadline_s=4.5))
    w.add(request("waits", [1], max_tokens=50, deadline_s=2.5))
    w.add(request("after", [1], max_tokens=2))
    w.run()
    assert (w.answers["runs", 0].finish, len(w.answers["runs", 0].tokens)) == ("deadline", 5)
    assert (w.answers["waits", 0].finish, w.answers["waits", 0].tokens) == ("deadline", [])
    assert w.answers["after", 0].finish == "length"
    assert w.pool.num_used == 0


@pytest.mark.parametrize("when", range(6))
def test_an_abort_frees_everything_at_once(when: int) -> None:
    """R04: waiting, in the middle of the prompt, decoding, forked."""
    w = world(max_num_batched_tokens=8)
    w.add(request("a", list(range(20)), n=3, max_tokens=30))
    for _ in range(when):
        w.step()
    assert w.scheduler.abort("a", w.now_s)
    w.scheduler.audit()
    assert (w.scheduler.num_running, w.scheduler.num_waiting, w.pool.num_used) == (0, 0, 0)
    assert not w.scheduler.abort("a", w.now_s)
    w.run()
    assert [w.answers["a", branch].finish for branch in range(3)] == ["abort"] * 3
    assert not w.runner.rows


def test_the_parts_of_a_request_s_time_add_up() -> None:
    w = world(max_num_seqs=1, max_num_batched_tokens=4)
    w.add(request("first", [1], max_tokens=5))
    w.now_s = 1.0
    w.add(request("second", list(range(10)), max_tokens=3))
    w.run()
    last = w.answers["second", 0].last
    assert last is not None
    assert last.times is not None
    parts = last.times
    assert (parts.queue_s, parts.prefill_s, parts.decode_s, parts.preempted) == (5.0, 3.0, 2.0, 0)
    assert parts.queue_s + parts.prefill_s + parts.decode_s == w.now_s - 1.0 - 1.0  # the last step told of the row


# ------------------------------------------------------------------------------------------- refusals


def test_impossible_requests_are_refused_at_once_with_both_numbers() -> None:
    """B034, B064: and they leave no trace."""
    w = world(num_pages=21, page_size=1, max_model_len=64)
    cases = [
        (request("empty", []), "prompt is empty"),
        (request("pool", list(range(30))), "30 pages .* 20;"),
        (request("context", list(range(64))), "64 tokens.* 64,"),
        (request("longer", list(range(65)), max_tokens=0), "65 tokens.* 64,"),
    ]
    for req, message in cases:
        with pytest.raises(InvalidRequest, match=message) as refusal:
            w.scheduler.add(req, 0.0)
        assert refusal.value.param == "prompt"
    assert not w.scheduler.has_work
    for name in range(10):
        w.add(request(name, [name], max_tokens=2))
    w.run()
    w.check_answers()
    assert [event.request for event in w.events if isinstance(event, RequestQueued)] == [
        str(name) for name in range(10)
    ]


@pytest.mark.parametrize("max_tokens", [None, 2**31 - 1])
def test_more_tokens_than_the_context_has_room_for_cannot_be_asked_for(max_tokens: int | None) -> None:
    """The runner counts in 32 bits up to which token nothing may end an answer; the context bounds it."""
    w = world(num_pages=40, max_model_len=64)
    for least in (61, 2**31 - 1):
        req = request("a", [1, 2, 3, 4], min_tokens=least, max_tokens=max_tokens, eos_token_ids=[5])
        for door in (w.scheduler.check, lambda asked: w.scheduler.add(asked, 0.0)):
            with pytest.raises(InvalidRequest, match=rf"`min_tokens` is {least}.* 64 tokens .* 60 .* 4;") as refusal:
                door(req)
            assert (refusal.value.param, refusal.value.code) == ("min_tokens", "context_length_exceeded")
    assert not w.scheduler.has_requests
    w.add(request("a", [1, 2, 3, 4], min_tokens=60, max_tokens=max_tokens, eos_token_ids=[5]))
    w.run()
    assert (len(w.answers["a", 0].tokens), w.answers["a", 0].finish) == (60, "length")


def test_an_id_that_is_here_is_refused() -> None:
    w = world()
    w.add(request("a", [1]))
    with pytest.raises(InvalidRequest, match="'a' is here"):
        w.scheduler.add(request("a", [1]), 0.0)


def test_a_full_queue_refuses_and_tells_when_to_come_again() -> None:
    w = world(max_queued_requests=2)
    assert w.add(request("a", [1]))
    assert w.add(request("b", [1]))
    with pytest.raises(Overloaded, match="2 requests wait") as refusal:
        w.scheduler.add(request("c", [1]), 0.0, retry_after_s=7)
    assert refusal.value.retry_after_s == 7
    w.step()
    w.scheduler.add(request("c", [1]), 0.0)


def test_the_queue_is_bounded_in_tokens_but_an_empty_one_takes_any_request() -> None:
    w = world(max_queued_tokens=10)
    w.scheduler.add(request("big", list(range(30))), 0.0)
    with pytest.raises(Overloaded, match="30 prompt tokens wait"):
        w.scheduler.add(request("small", [1]), 0.0)


def test_a_preempted_sequence_takes_no_place_from_new_requests() -> None:
    w = world(max_queued_requests=1)
    assert w.add(request("a", [1]))
    w.step()
    w.scheduler.preempt("a", w.now_s)
    assert w.scheduler.num_waiting == 1
    w.scheduler.add(request("b", [1]), 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0}, {"max_num_batched_tokens": 3}, {"max_model_len": 0}, {"max_queued_requests": 0},
        {"max_chunk": 0}, {"short_share": 1.0}, {"short_share": -0.1},
    ],
)  # fmt: skip
def test_limits_that_cannot_work_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        World(**{"max_num_seqs": 4, **wrong})


# ------------------------------------------------------------------------------------------- the caller's duties


def test_calls_out_of_turn_are_noticed() -> None:
    w = world()
    w.add(request("a", [1]))
    with pytest.raises(RuntimeError, match="planned last"):
        w.scheduler.update(RunnerOutput(step=0), 0.0)
    plan = w.scheduler.schedule(0.0)
    with pytest.raises(LostStateError, match=r"step 1 was not brought to its end .*update is missing"):
        w.scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="planned last"):
        w.scheduler.update(RunnerOutput(step=plan.step + 1), 0.0)
    with pytest.raises(RuntimeError, match="not the planned rows"):
        w.scheduler.update(RunnerOutput(step=plan.step), 0.0)
    with pytest.raises(RuntimeError, match="should sample 1"):
        w.scheduler.update(RunnerOutput(step=plan.step, rows=[RowResult(row=0)]), 0.0)


@pytest.mark.parametrize("where", ["planner", "runner", "results"])
def test_after_a_step_that_failed_on_the_way_there_is_no_other(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are taken and rows given out by then; a further step over them could give somebody a wrong answer."""
    w = world()
    w.add(request("a", [1, 2, 3], max_tokens=5))
    w.step()
    method = {"planner": (Planner, "_keep_running"), "runner": (FakeRunner, "execute"), "results": (Results, "apply")}
    monkeypatch.setattr(*method[where], lambda *given: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        w.step()
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(LostStateError, match=r"step 2 was not brought to its end .* make a new one"):
            w.step()


def test_an_idle_scheduler_makes_empty_steps() -> None:
    w = world()
    plan = w.step()
    assert (plan.rows, plan.new, plan.forget) == ([], [], [])


# ------------------------------------------------------------------------------------------- events and figures


def test_events_tell_a_life_in_order() -> None:
    w = world(num_pages=6, page_size=2, max_num_seqs=2, caching=False)
    w.add(request("a", [1, 2], max_tokens=6))
    w.add(request("b", [3, 4], max_tokens=6))
    w.run()
    told = [e for e in w.events if isinstance(e, RequestQueued | RequestAdmitted | RequestPreempted | RequestFinished)]
    assert told == [
        RequestQueued("a", 2), RequestQueued("b", 2), RequestAdmitted("a", 0, 0, 0), RequestAdmitted("b", 0, 1, 0),
        RequestPreempted("b", 0), RequestFinished("a", 0, "length"), RequestAdmitted("b", 0, 0, 0),
        RequestFinished("b", 0, "length"),
    ]  # fmt: skip
    steps = [event for event in w.events if isinstance(event, StepMade)]
    assert steps[0] == StepMade(1, [("a", 0, 0, 2), ("b", 0, 0, 2)])


def test_figures_of_a_step() -> None:
    w = world(num_pages=33, page_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    w.add(request("a", list(range(10)), max_tokens=4))
    w.step()
    w.add(request("b", list(range(20, 26)), max_tokens=4))
    w.add(request("c", list(range(7)), max_tokens=4))
    w.step()
    stats = w.scheduler.stats(0.1, 0.2, 0.3, {"forward": 0.2})
    assert (stats.step, stats.num_rows, stats.tokens_prompt, stats.tokens_decode) == (2, 2, 6, 1)
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (2, 1, 7)
    assert (stats.pages_total, stats.pages_used, stats.pages_cached, stats.slots_used) == (32, 5, 0, 17)
    assert (stats.decide_s, stats.compute_s, stats.update_s, stats.parts) == (0.1, 0.2, 0.3, {"forward": 0.2})


def test_open_branches_and_unstarted_requests() -> None:
    w = world(max_num_seqs=1)
    w.add(request("a", [1], n=2, max_tokens=3))
    w.add(request("b", [1], max_tokens=3))
    w.step()
    assert w.scheduler.unstarted() == ["b"]
    assert w.scheduler.open_branches() == [("a", 0), ("a", 1), ("b", 0)]


# ------------------------------------------------------------------------------------------- modes to compare with


def test_a_static_batch_lets_nobody_in_before_all_have_ended() -> None:
    """S28, and it needs the whole first batch even if its prompts take several steps."""
    w = world(policy=StaticPolicy(3), max_num_seqs=3, max_num_batched_tokens=8)
    for name in range(6):
        w.add(request(name, list(range(6)), max_tokens=2 + 3 * (name % 3)))
    w.run()
    w.check_answers()
    order = [
        (type(event).__name__, event.request)
        for event in w.events
        if isinstance(event, RequestAdmitted | RequestFinished)
    ]
    last_of_first = max(order.index(("RequestFinished", name)) for name in "012")
    first_of_second = min(order.index(("RequestAdmitted", name)) for name in "345")
    assert last_of_first < first_of_second
    assert [name for kind, name in order[:last_of_first] if kind == "RequestAdmitted"] == ["0", "1", "2"]


def test_pages_hold_more_requests_than_reservations_do() -> None:
    """S11: the same memory, the same requests; how many run at once, and how many slots lie idle."""

    def most_running(*, reserved: bool) -> tuple[int, float]:
        w = world(num_pages=65, page_size=4, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=64,
                  reserved=reserved, caching=False)  # fmt: skip
        for name in range(64):
            w.add(request(name, [name, 1, 2], max_tokens=8 + name % 5))
        most, filled = 0, []
        while w.scheduler.has_work:
            w.step()
            stats = w.scheduler.stats(0, 0, 0, {})
            most = max(most, stats.running)
            if stats.pages_used:
                filled.append(stats.slots_used / (stats.pages_used * 4))
        w.check_answers()
        return most, sum(filled) / len(filled)

    paged, reserved = most_running(reserved=False), most_running(reserved=True)
    assert reserved[0] == 4
    assert paged[0] >= 5 * reserved[0]
    assert paged[1] > 0.7
    assert reserved[1] < 0.2


def test_a_reservation_that_can_never_fit_is_refused() -> None:
    w = world(num_pages=10, page_size=4, max_model_len=64, reserved=True)
    with pytest.raises(InvalidRequest, match=r"16 pages .* 9;"):
        w.scheduler.add(request("a", [1]), 0.0)


def test_default_limits_are_sound() -> None:
    Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096).check()
