"""Points that whole systems pass: one of four short histories is played with one armed point.

The histories are made so that each such point is passed: prompts that begin alike, branches, a pool that is too small,
a deadline that passes, a client that leaves, a full queue, a death, a drain that takes too long, readers behind.
"""

import asyncio
from collections import Counter
from typing import Any

import msgspec

from fakes.runner import Rule
from faults.kinds import KINDS, Kind
from sayfa.base.faults import armed
from world import play as world_play
from world.client_side import Answer
from world.history import Blow, Call, History, Setting
from world.laws import DEATH_CODES, Facts, Laws, demand
from world.loop import VirtualClock, VirtualLoop

ALIKE = [3, 8, 13, 18, 23 - 1, 4, 9, 14, 19]
LATE_S = 5.0
"""When the last call comes: after all that a fault may have led to."""


def call(at_s: float, seed: int, **facts: Any) -> Call:
    return Call(at_s=at_s, seed=seed, **{"prompt": ALIKE, "ignore_eos": True, "max_tokens": 5, **facts})


SETTING = Setting(num_pages=12, max_num_seqs=3, max_num_batched_tokens=12, max_model_len=40, max_queued_requests=2,
                  start_s=0.1, step_s=0.05)  # fmt: skip
MAIN = History(seed=1, setting=SETTING, events=[
    call(0.0, 64, n=2, stop=["é"], max_tokens=3), call(0.06, 66, prompt=[1, 2], leaves_after=2, max_tokens=12),
    call(0.06, 67, prompt=[6] * 9, deadline_s=0.3, max_tokens=20, ignore_eos=False),
    call(0.12, 65, prompt=[*ALIKE, 5], max_tokens=6, stream=False), call(0.13, 68, prompt=[2]), call(0.13, 75),
    Blow(at_s=0.9, kind="reset_cache"),
    call(1.0, 69, prompt=[7], more=[[8], [9]], max_tokens=2),
    call(1.4, 70, prompt=[11] * 17, max_tokens=2), call(1.6, 71, prompt=[12] * 17, max_tokens=2),
    call(1.9, 76, prompt=[13] * 15, max_tokens=12), call(1.9, 77, prompt=[14] * 15, max_tokens=12),
    call(2.8, 72, prompt=[4], spoil="raise"), call(2.8, 73, prompt=[10] * 9, max_tokens=4),
    call(LATE_S, 79, max_tokens=2),
])  # fmt: skip
DEATH = History(seed=2, setting=SETTING, events=[
    call(0.0, 64, max_tokens=12), Blow(at_s=0.1, kind="kill"), call(0.5, 65, max_tokens=2), Blow(at_s=1.0, kind="kill"),
    call(15.0, 66, max_tokens=2),
])  # fmt: skip
DRAIN = History(seed=3, setting=Setting(step_s=1.0, max_num_seqs=1), events=[
    call(0.0, 64, max_tokens=20), call(0.1, 65), Blow(at_s=2.5, kind="drain"), call(3.0, 66),
])  # fmt: skip
READERS = History(seed=4, setting=msgspec.structs.replace(SETTING, unread_tokens=2), events=[
    call(0.0, 64, read_s=0.4, max_tokens=9), call(0.1, 65, read_s=0.3, n=2), call(0.2, 66, prompt=[2], max_tokens=3),
    call(LATE_S, 79, max_tokens=2),
])  # fmt: skip
HISTORIES = {"main": MAIN, "death": DEATH, "drain": DRAIN, "readers": READERS}

BEFORE_BOOKS = ("server.edge", "server.auth", "server.books.open")
GIVES_UP = ("client.lost", "client.bury")
ONE_CODES = ("internal_error", "engine_error", "answer_lost", "step_failed", "numerical_error")


class ArmedLaws(Laws):
    """Laws of a history in which one point is armed; notes who was failed by it."""

    def __init__(self, history: History, rule: Rule, facts: Facts, name: str) -> None:
        super().__init__(history, rule, facts)
        self._name = name
        self.excused: list[Answer] = []

    def check_counts(self, answers: list[Answer], books: Counter[str]) -> None:
        if self._name == "server.metrics.keep":
            return
        if self._name in BEFORE_BOOKS:
            answers = [answer for answer in answers if answer.code != "internal_error"]
        super().check_counts(answers, books)

    def _is_punctual(self, call: Call) -> bool:
        return False  # the armed point may be one at which time passes

    def _has_cause(self, answer: Answer) -> bool:
        spoiled = answer.code == "step_failed" and answer.call.spoil
        if super()._has_cause(answer) and (answer.code not in ONE_CODES or spoiled):
            return True
        self.excused.append(answer)
        return answer.code in ONE_CODES


class ArmedWorld(world_play.World):
    """A world whose laws know that a point is armed."""

    def __init__(self, history: History, clock: VirtualClock, loop: VirtualLoop, name: str) -> None:
        super().__init__(history, clock, loop)
        self._name = name
        self._facts.faults.append(name)
        self._laws = ArmedLaws(history, self._rule, self._facts, name)
        if name in GIVES_UP:
            self._facts.faults.append("client.before_spawn")  # for which the engine may be given up
        if name == "client.send_abort":
            self._host.gone_s = lambda seed: None  # the engine was not told, and works on to the answer's end

    def _check_end(self) -> None:
        if self._name.startswith("core."):  # the audit after a fault finds what the fault left, as it should
            self._host.broken = [line for line in self._host.broken if not line.startswith("the engine ended by")]
        super()._check_end()

    def _check_books(self) -> None:
        if self._name != "server.metrics.keep":
            super()._check_books()


class Result:
    """What an armed history led to. passes: of the point. excused: calls that failed for it."""

    def __init__(self, outcome: world_play.Outcome | None, passes: int, excused: list[Answer]) -> None:
        self.answers = outcome.answers if outcome is not None else []
        self.started = outcome is not None
        self.passes = passes
        self.excused = excused

    def served(self) -> set[int]:
        return {answer.call.seed for answer in self.answers if answer.served}


def play(history: History, name: str, kind: str, nth: int) -> Result:
    """Play a history with one point armed. Raises ViolationError, or what broke."""
    clock = VirtualClock()
    loop = VirtualLoop(clock)
    what = Kind(lambda: clock.advance(7.0)) if kind == "delay" else KINDS[kind]
    asyncio.set_event_loop(loop)
    readers = world_play._patience_with_readers(history.setting.unread_tokens)
    with world_play._own_garbage(), readers, armed(name, what.action, alter=what.alter, nth=nth) as point:
        world = ArmedWorld(history, clock, loop, name)
        main = loop.create_task(world.run())
        try:
            outcome = loop.run_until_complete(main)
        except (RuntimeError, OSError) as error:
            world_play._sweep_up(loop, main)
            if "armed" not in repr(error) or world._client._link is not None:
                raise
            outcome = None  # the start failed, and said why
        except BaseException:
            world_play._sweep_up(loop, main)
            raise
        finally:
            asyncio.set_event_loop(None)
            loop.close()
    return Result(outcome, point.passes, world._laws.excused)


def baseline(history: History) -> set[int]:
    """Who is served when nothing happens."""
    return play(history, "hub.fetch", "raise", 1).served()


def judge(history: History, effect: str, result: Result, wanted: set[int]) -> None:
    """Demand that a fault had no other effect than it may have.

    effect: "none" (nobody notices), "one" (one request ends with an error), "engine" (the engine is started anew, who
    was with it is told so), "gives up" (the server ends, too), "delay" (the laws hold) or "start" (the start fails,
    a later one is repeated).
    """
    if not result.started:
        demand(effect == "start", "the start failed")
        return
    lost = wanted - result.served()
    failed = {answer.call.seed for answer in result.excused}
    if effect == "delay":
        demand(not failed, f"errors {[a.code for a in result.excused]}")
    elif effect == "none":
        demand(not lost and not failed, f"calls {lost} were harmed, {[a.code for a in result.excused]}")
    elif effect == "one":
        # A step that is made again in halves takes longer, and who comes meanwhile may find the queue full.
        lost -= {answer.call.seed for answer in result.answers if answer.code == "queue_full"}
        demand(len(failed) <= 1 and lost <= failed, f"calls {failed} failed, {lost} were not served")
    else:
        bad = [a.code for a in result.excused if a.code not in (*DEATH_CODES, "answer_lost")]
        demand(not bad, f"errors {bad}")
        if history is not DRAIN and effect != "gives up":
            last = max(result.answers, key=lambda answer: answer.call.at_s)
            demand(last.served or last.code in DEATH_CODES, f"the last call was not served: {last.code}")
