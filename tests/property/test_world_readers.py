"""T17, F09: readers that are slow or stop, on virtual time: they are paused, and nobody else notices.

The real server, wire, engine loop and scheduler; what a mailbox may hold is a few tokens here, so that short answers
show what long ones do.
"""

import asyncio
from collections import Counter, defaultdict
from itertools import count, pairwise
from typing import Any

import msgspec
import pytest

from sayfa.core.scheduler import Scheduler
from sayfa.engine.engine import Engine
from sayfa.wire import streams
from world.client_side import Caller
from world.history import Call, History, Setting, on_grid, random_history
from world.play import Outcome, play

STEP_S = 0.02
UNREAD = 20
LIMIT_S = streams.SLOW_READER_LIMIT_S
NUM_DEAF = 500
SETTING = Setting(
    num_pages=120, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=220, max_queued_requests=1000,
    policy="fair", step_s=STEP_S, latency_s=0.001, start_s=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    "first", [*range(0, 100, 25), *(pytest.param(first, marks=pytest.mark.slow) for first in range(100, 2000, 25))]
)
def test_t17_pauses_change_no_answer_and_break_no_law(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random histories in which every third reader is slow or stops, and three unread tokens are too many."""
    monkeypatch.setattr(streams, "MAX_UNREAD_TOKENS", 3)
    seen = count_pauses(monkeypatch)
    for seed in range(first, first + 25):
        history = random_history(seed)
        events = [
            msgspec.structs.replace(event, read_s=(0.0, 0.05, 0.3)[event.seed % 3], stream=True)
            if isinstance(event, Call) and event.stops_after is None
            else event
            for event in history.events
        ]
        play(msgspec.structs.replace(history, events=events))
    assert min(seen["paused"], seen["resumed"]) >= 5, "hardly anybody was paused: this shows nothing"


def count_pauses(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the pauses that had an effect."""
    seen: Counter[str] = Counter()
    pause = Scheduler.pause

    def counted(self: Scheduler, request_id: str, on: bool) -> bool:
        done = pause(self, request_id, on)
        seen["paused" if on else "resumed"] += done
        return done

    monkeypatch.setattr(Scheduler, "pause", counted)
    return seen


def normal_calls() -> list[Call]:
    """Twenty calls of one key, two at a time."""
    return [
        Call(at_s=on_grid(1.0 + 0.5 * index), seed=10_000 + index, prompt=[index % 20, 3], max_tokens=40,
             ignore_eos=True, tenant=0)
        for index in range(20)
    ]  # fmt: skip


def deaf_calls() -> list[Call]:
    """They come within two seconds, read the first event, and stop. Each would say 200 tokens."""
    return [
        Call(at_s=on_grid(index * 0.004), seed=index, prompt=[index % 20, index % 7], max_tokens=200, ignore_eos=True,
             tenant=1, stops_after=1)
        for index in range(NUM_DEAF)
    ]  # fmt: skip


def run(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, dict[int, list[float]]]:
    """Play these calls; return the outcome and, by call, when its events came."""
    times_s: dict[int, list[float]] = defaultdict(list)
    take_time = Caller._take_time

    async def noted(self: Caller) -> None:
        times_s[self._call.seed].append(self._clock_s())  # type: ignore[attr-defined]
        await take_time(self)

    audit, turns = Engine.audit, count()

    def seldom(self: Engine) -> None:
        if next(turns) % 20 == 0:
            audit(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "audit", seldom)
        patch.setattr(Caller, "_clock_s", lambda self: asyncio.get_running_loop().time(), raising=False)
        patch.setattr(Caller, "_take_time", noted)
        outcome = play(History(seed=0, setting=SETTING, events=sorted(calls, key=lambda call: call.at_s)))
    return outcome, times_s


def note_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect how long each request was paused in the engine before it was ended there, in seconds."""
    paused_s: dict[str, float] = {}
    held_s: list[float] = []
    pause, abort = Scheduler.pause, Scheduler.abort

    def noted_pause(self: Scheduler, request_id: str, on: bool) -> bool:
        paused_s.setdefault(request_id, asyncio.get_running_loop().time())
        return pause(self, request_id, on)

    def noted_abort(self: Scheduler, request_id: str, *rest: Any) -> bool:
        if request_id in paused_s and request_id in self._roster.requests:
            held_s.append(asyncio.get_running_loop().time() - paused_s[request_id])
        return abort(self, request_id, *rest)

    monkeypatch.setattr(Scheduler, "pause", noted_pause)
    monkeypatch.setattr(Scheduler, "abort", noted_abort)
    return held_s


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def gaps_of(times_s: dict[int, list[float]]) -> list[float]:
    return [b - a for times in times_s.values() for a, b in pairwise(times)]


def test_f09_500_readers_that_stop_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held for each stays at the limit, all is free after 10 s and a step, others' p99 token time <= 1.2x."""
    monkeypatch.setattr(streams, "MAX_UNREAD_TOKENS", UNREAD)
    most_unread: Counter[str] = Counter()
    put = streams._Mailbox.put

    def measured(self: streams._Mailbox, output: object) -> None:
        put(self, output)  # type: ignore[arg-type]
        most_unread[self.request.id] = max(most_unread[self.request.id], self.unread_tokens)

    monkeypatch.setattr(streams._Mailbox, "put", measured)
    _, alone_s = run(normal_calls(), monkeypatch)
    held_s = note_pauses(monkeypatch)
    outcome, beside_s = run([*normal_calls(), *deaf_calls()], monkeypatch)
    normal = [answer for answer in outcome.answers if answer.call.tenant == 0]
    assert all(answer.served for answer in normal)
    normal_s = {seed: times for seed, times in beside_s.items() if seed >= 10_000}
    assert len(gaps_of(normal_s)) > 300
    assert p99(gaps_of(normal_s)) <= 1.2 * p99(gaps_of(alone_s))
    assert max(most_unread.values()) <= UNREAD + 4, "the engine went on for a reader that is behind"
    assert len(held_s) == NUM_DEAF, f"{len(held_s)} of {NUM_DEAF} were paused and ended"
    assert max(held_s) <= LIMIT_S + 2 * STEP_S
