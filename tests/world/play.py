"""Play a history: the real application, client, supervisor, engine loop, engine and scheduler in one thread.

`play(history)` returns what happened or raises `ViolationError` with the first law that was broken. The laws:

1. Each call ends exactly once, as served, refused, expired, aborted or failed; nobody is left waiting.
2. What is served is what the oracle says; what is cut short is a beginning of it.
3. Each failure has a cause in the history: nobody fails for another one's fault, nothing expires early, no engine is
   replaced that nothing befell.
4. Each refusal that says "later" says when (Retry-After).
5. The books of the server agree with what its callers saw.
6. At the end nothing is left: pages, rows, streams, watches, tasks, processes.
And after each turn of the engine those of `world.engine_side`.
"""

import asyncio
import contextlib
import gc
import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from sayfa.base.config import ServerOptions
from sayfa.base.errors import EngineDead
from sayfa.base.faults import armed
from sayfa.engine.engine import Engine
from sayfa.server.app import create_app
from sayfa.server.context import TextTools
from sayfa.server.serve import Ending
from sayfa.wire import streams
from sayfa.wire.process_client import ProcessClient
from sayfa.wire.supervisor import MAX_RESTARTS
from world.client_side import KEYS, MODEL, Answer, Caller, Conversation, Letters, make_rule
from world.engine_side import Host, WorldProcess
from world.harm import ACTIONS, LogOnDisk
from world.history import Blow, Call, History, Setting
from world.laws import Facts, Laws, ViolationError, demand, ending_of
from world.loop import VirtualClock, VirtualLoop
from world.seen import Seen, phase_of

PATIENCE_S = 900.0
"""Longer than all deadlines, back-offs and limits of a history together; who still waits then waits for ever."""

DEADLY = ("kill", "raise", "die", "freeze", "garble", "no_start", "hang_load", "slow_load", "sigterm")
"""Blows after which there may be another engine than the first."""
_BOOKS = {
    "requests_received": "received", "request_success": "ended", "admission_rejections": "rejected",
    "requests_in_flight": "in_flight",
}  # fmt: skip
"""Metrics by which the server's books must balance, and what they are called here."""


class Outcome:
    """What a history led to.

    digest: equal for equal runs. counts: calls by ending. turns: of the engine loop. seen: how often what happened.
    """

    def __init__(self, answers: list[Answer], turns: int, seen: Seen) -> None:
        self.answers = answers
        self.turns = turns
        self.seen = seen
        self.counts = Counter(ending_of(answer) for answer in answers)
        lines = [
            f"{a.call.seed} {a.status} {a.code} {a.started_s:.6f} {a.ended_s:.6f} {a.left} {sorted(a.texts.items())}"
            for a in answers
        ]
        self.digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class World:
    """One history while it plays."""

    def __init__(self, history: History, clock: VirtualClock, loop: VirtualLoop) -> None:
        self._history = history
        self._clock = clock
        self._loop = loop
        self._rnd = random.Random(f"accidents {history.seed}")
        self._rule = make_rule()
        calls = {event.seed: event for event in history.events if isinstance(event, Call)}
        self._host = Host(clock, self._rnd, history.setting, self._rule, calls)
        self._seen = self._host.seen
        self._begun_s = clock.monotonic()
        self._stalls: list[tuple[float, float]] = []
        self._facts = Facts(absences=[[self._begun_s, math.inf]], deaths_s=self._host.deaths_s)
        self._laws = Laws(history, self._rule, self._facts)
        self._stack = contextlib.ExitStack()
        self._log = LogOnDisk()
        self.answers: list[Answer] = []
        self._callers: dict[Caller, Call] = {}
        self._host.after_turn = self._let_leave
        self._open: Counter[int] = Counter()
        self._gone_s: dict[int, float] = {}
        self._host.gone_s = lambda seed: None if self._open[seed] else self._gone_s.get(seed)

    # ------------------------------------------------------------------------------------------- the play

    async def run(self) -> Outcome:
        """Play it and check the laws."""
        self._client = client = ProcessClient(["engine"], b"{}", self._clock, self._host.spawn)
        tools = TextTools(Letters(), Conversation())  # type: ignore[arg-type]
        options = ServerOptions(api_key=KEYS, log_stats_interval=0.0, vllm_metric_names=False, shutdown_timeout=5.0)
        app = create_app(client, tools, options, [MODEL], "0", clock=self._clock, rng=self._rnd)
        self._context = context = app.state.context
        self._ending = Ending(SimpleNamespace(should_exit=False), client, context)  # type: ignore[arg-type]
        client.on_state(self._ending.engine_changed)
        client.on_state(lambda state: self._facts.note_state(state, self._loop.time()))
        with self._stack, self._log:
            await client.start()
            async with app.router.lifespan_context(app):
                await self._let_start()
                await self._play_events(app)
                self._check_books()
                await self._end_well()
        self._seen.note("a log line lost to a full disk", self._log.disk.num_refused)
        self._seen.note("engine given up", self._client.state == "failed")
        gc.collect()  # so that what nobody will ever look at complains now, and not in another history
        self._check_end()
        for answer in self.answers:
            self._laws.check_answer(answer)
            self._seen.note_answer(answer)
        self._laws.check_counts(self.answers, self._books())
        return Outcome(self.answers, self._host.turns, self._seen)

    async def _let_start(self) -> None:
        """Wait for the engine, unless something keeps it from starting in time."""
        hard = ("kill", "no_start", "hang_load", "slow_load", "drain", "sigterm", "freeze")
        if not any(isinstance(event, Blow) and event.kind in hard for event in self._history.events[:1]):
            await self._client.wait_ready()

    async def _play_events(self, app: Any) -> None:
        tasks = []
        begun_s = self._loop.time()
        for event in self._history.events:
            await self._sleep_until(begun_s + event.at_s)
            if isinstance(event, Call):
                answer = Answer(event, self._loop.time())
                same = bool(self.answers) and self.answers[-1].started_s == answer.started_s
                self._seen.note("calls at the same moment", same)
                self.answers.append(answer)
                tasks.append(asyncio.ensure_future(self._call(app, answer)))
            else:
                self._blow(event)
        if tasks:
            limit_s = self._loop.time() + PATIENCE_S + sum(seconds for _, seconds in self._stalls)
            _, waiting = await asyncio.wait(tasks, timeout=limit_s - self._loop.time())
            demand(not waiting, f"{len(waiting)} calls still wait after {PATIENCE_S} s")
        for task in tasks:
            task.result()

    async def _call(self, app: Any, answer: Answer) -> None:
        seed = answer.call.seed
        self._seen.note_call(answer.call)
        self._seen.note("a retry", seed in self._open)
        self._open[seed] += 1
        here = True

        def left(caller: Caller) -> None:
            self._seen.note(f"left while {self._phase_of(caller, answer.call)}")
            gone()

        def gone() -> None:
            nonlocal here
            self._open[seed] -= here
            here = False
            self._gone_s[seed] = self._loop.time()

        try:
            caller = Caller(app, answer, left, self._history.setting.thread_s)
            self._callers[caller] = answer.call
            await caller.run()
        finally:
            self._callers.pop(caller, None)
            gone()

    def _phase_of(self, caller: Caller, call: Call) -> str:
        return caller.place or phase_of(self._host.branches_of(call.seed), self._loop.num_jobs > 0)

    def _let_leave(self) -> None:
        """Whoever hangs up in a phase in which the engine has his call now does so."""
        for caller, call in list(self._callers.items()):
            if call.leaves_in and self._phase_of(caller, call) == call.leaves_in:
                caller.leave()

    async def _sleep_until(self, at_s: float) -> None:
        if self._loop.time() < at_s:
            moment = self._loop.create_future()
            self._loop.call_at(at_s, moment.set_result, None)
            await moment

    async def _end_well(self) -> None:
        """Let the engine come to rest, then end everything as SIGTERM does."""
        if self._facts.drained_s is None:
            await self._come_back()
            for _ in range(500):
                process = self._host.current
                if process is None or process.engine is None or not process.engine.has_work:
                    break
                await asyncio.sleep(1.0)
            else:
                raise ViolationError("the engine works on though nobody waits for anything")
            self._drain()
        await asyncio.wait_for(self._ending._drain, PATIENCE_S)  # type: ignore[arg-type]
        await self._client.close()
        await asyncio.sleep(5.0)  # what was on its way arrives

    async def _come_back(self) -> None:
        """R09: after any deaths there is an engine again, or it was given up for the number of them."""
        state = self._client.state

        def enough() -> bool:
            """A start that fails before there is a process is an attempt, too, and no death."""
            return len(self._facts.deaths_s) > MAX_RESTARTS or "client.before_spawn" in self._facts.faults

        if state == "failed" or "sigterm" in self._facts.faults:
            demand(enough() or state != "failed", "the engine was given up too early")
            return
        try:
            await asyncio.wait_for(self._client.wait_ready(), PATIENCE_S)
        except (TimeoutError, EngineDead):
            demand(enough(), "no engine came back")

    # ------------------------------------------------------------------------------------------- blows

    def _blow(self, blow: Blow) -> None:
        process, now_s = self._host.current, self._loop.time()
        match blow.kind:
            case "kill" if process is not None:
                process.die()
            case "raise" | "die":
                self._facts.faults.append(blow.point)
                self._stack.enter_context(armed(blow.point, ACTIONS[blow.kind, blow.point[:6]], nth=blow.nth))
            case "freeze" if process is not None:
                self._seen.note("a standstill of the engine")
                process.frozen_until_s = now_s + blow.seconds
                self._stalls.append((now_s, blow.seconds))
            case "stall":
                self._stalls.append((now_s, blow.seconds))
                self._seen.note("a standstill of all")
                self._clock.advance(blow.seconds)
            case "garble" if process is not None:
                self._facts.faults.append("garble")
                process.garble()
            case "wall":
                self._seen.note("calendar forward" if blow.seconds > 0 else "calendar back")
                self._clock.jump_wall(blow.seconds)
            case "slow_link" if process is not None:
                self._seen.note("a slow link")
                process.slow_down(blow.seconds)
            case "reset_cache":
                holds = process is not None and process.engine is not None
                cached = process.engine._scheduler.cache.pool.num_cached if holds else 0
                self._seen.note("cached pages forgotten on demand", bool(cached))
                self._client.reset_cache()
            case "preempt" if process is not None and process.engine is not None:
                self._preempt(process, process.engine, blow.nth)
            case "no_start":
                self._host.starts += ["dies"] * blow.nth
            case "hang_load" | "slow_load":
                self._host.starts += ["hangs"] * blow.nth if blow.kind == "hang_load" else ["slow"]
                if process is not None:
                    process.die()
            case "full_disk":
                self._log.disk.is_full = True
                self._loop.call_later(blow.seconds, self._log.disk.empty)
            case "scrape":
                self._check_books()
            case "drain":
                self._drain()
            case "sigterm" if process is not None:
                self._seen.note("engine told to end")
                process.sigterm()
                self._facts.faults.append("sigterm")

    def _preempt(self, process: WorldProcess, engine: Engine, nth: int) -> None:
        running = engine._scheduler._roster.running
        if running and engine._scheduler._plan is None:
            name = running[nth % len(running)].id
            process.num_forced += engine._scheduler.preempt(name, engine._clock.monotonic())
            self._seen.note("preempted on demand")

    def _drain(self) -> None:
        if self._facts.drained_s is None:
            self._facts.drained_s = self._loop.time()
            self._seen.note("drained with work", len(self._client._streams) > 0)
        self._ending.asked()

    # ------------------------------------------------------------------------------------------- laws

    def _check_books(self) -> None:
        books = self._books()
        total = books["ended"] + books["rejected"] + books["in_flight"]
        demand(books["received"] == total, f"the books do not balance: {books}")
        demand(min(books.values(), default=0) >= 0, f"a figure is negative: {books}")

    def _books(self) -> Counter[str]:
        books: Counter[str] = Counter()
        for metric, name in _BOOKS.items():
            for family in self._context.metrics._families[metric].collect():
                for sample in family.samples:
                    books[name] += int(sample.value)
                    if name == "ended":
                        books[sample.labels["finished_reason"]] += int(sample.value)
        return books

    def _check_end(self) -> None:
        client, context = self._client, self._context
        demand(len(client._streams) == 0, "a stream is open")
        demand(not context.admissions._watched, "an admission is watched")
        demand(not context.streams, "an event stream is kept")
        demand(not client._tasks, f"the client has tasks: {client._tasks}")
        alive = [process.pid for process in self._host.processes if not process.task.done()]
        demand(not alive, f"engine processes are alive: {alive}")
        for process in self._host.processes:
            error = None if process.task.cancelled() else process.task.exception()
            if error is not None:
                raise ViolationError(f"the engine process broke: {error!r}") from error
        demand(not self._host.broken, "; ".join(self._host.broken))
        deadly = any(
            e.spoil in ("die", "raise") if isinstance(e, Call) else e.kind in DEADLY for e in self._history.events
        )
        befell = deadly or bool(self._facts.faults)
        demand(befell or len(self._host.processes) == 1, "an engine was replaced though nothing befell it")
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        demand(not left, f"tasks are left: {left}")
        demand(not self._loop.complaints, "; ".join(self._loop.complaints))


def play(history: History) -> Outcome:
    """Play a history to its end. Raises ViolationError, or what broke."""
    clock = VirtualClock()
    loop = VirtualLoop(clock, history.setting.thread_s)
    asyncio.set_event_loop(loop)
    with _own_garbage(), _patience_with_readers(history.setting.unread_tokens):
        main = loop.create_task(World(history, clock, loop).run())
        try:
            return loop.run_until_complete(main)
        except BaseException:
            _sweep_up(loop, main)
            raise
        finally:
            asyncio.set_event_loop(None)
            loop.close()


@contextlib.contextmanager
def _own_garbage() -> Iterator[None]:
    """Let collections see only what is made from here on.

    A history's own collection then costs as much as the history is large, however much the process has imported, and
    what another test left behind does not complain in this one.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _patience_with_readers(unread_tokens: int) -> Iterator[None]:
    """Let readers be behind by so many tokens, where the history says another number than the package."""
    before = streams.MAX_UNREAD_TOKENS
    if unread_tokens != Setting().unread_tokens:
        streams.MAX_UNREAD_TOKENS = unread_tokens
    try:
        yield
    finally:
        streams.MAX_UNREAD_TOKENS = before


def _sweep_up(loop: VirtualLoop, main: "asyncio.Task[Any]") -> None:
    """Cancel what a broken world left, so that the next one begins clean."""
    for _ in range(5):
        tasks = [task for task in asyncio.all_tasks(loop) if task is not main or not task.done()]
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        with contextlib.suppress(BaseException):
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
