"""Play a history: the real application, client, supervisor, engine loop, engine and scheduler in one thread.

`play(history)` returns what happened or raises `ViolationError` with the first law that was broken. The laws:

1. Each call ends exactly once, as served, refused, expired, aborted or failed; nobody is left waiting.
2. What is served is what the oracle says; what is cut short is a beginning of it.
3. Each failure has a cause in the history: nobody fails for another one's fault, nothing expires early.
4. Each refusal that says "later" says when (Retry-After).
5. The books of the server agree with what its callers saw.
6. At the end nothing is left: pages, rows, streams, watches, tasks, processes.
And after each turn of the engine those of `world.engine_side`.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

from sayfa.base.config import ServerOptions
from sayfa.base.errors import EngineDead
from sayfa.base.faults import armed
from sayfa.server.app import create_app
from sayfa.server.context import TextTools
from sayfa.server.serve import Ending
from sayfa.wire.process_client import ProcessClient
from sayfa.wire.supervisor import MAX_RESTARTS
from world.client_side import KEYS, MODEL, Answer, Caller, Letters, make_rule, oracle, prompts_of
from world.engine_side import Host
from world.history import Blow, Call, History
from world.loop import VirtualClock, VirtualLoop
from world.runner import PAGE_SIZE, DeathError

PATIENCE_S = 900.0
"""Longer than all deadlines, back-offs and limits of a history together; who still waits then waits for ever."""
LATER = (429, 503)
DEATH_CODES = ("engine_dead", "shutdown", "starting", "draining", "server_overloaded")


class ViolationError(AssertionError):
    """A law was broken."""


class Outcome:
    """What a history led to. digest: equal for equal runs. counts: calls by ending. turns: of the engine loop."""

    def __init__(self, answers: list[Answer], turns: int) -> None:
        self.answers = answers
        self.turns = turns
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
        self._begun_s = clock.monotonic()
        self._stalls: list[tuple[float, float]] = []
        self._faults: list[str] = []
        self._drained_s: float | None = None
        self._absences: list[list[float]] = [[self._begun_s, math.inf]]
        self._stack = contextlib.ExitStack()
        self._disk = FullDisk()
        self.answers: list[Answer] = []
        self._open: Counter[int] = Counter()
        self._gone_s: dict[int, float] = {}
        self._host.gone_s = lambda seed: None if self._open[seed] else self._gone_s.get(seed)

    # ------------------------------------------------------------------------------------------- the play

    async def run(self) -> Outcome:
        """Play it and check the laws."""
        self._client = client = ProcessClient(["engine"], b"{}", self._clock, self._host.spawn)
        tools = TextTools(Letters(), None)  # type: ignore[arg-type]
        options = ServerOptions(api_key=KEYS, log_stats_interval=0.0, vllm_metric_names=False, shutdown_timeout=5.0)
        app = create_app(client, tools, options, [MODEL], "0", clock=self._clock, rng=self._rnd)
        self._context = context = app.state.context
        self._ending = Ending(SimpleNamespace(should_exit=False), client, context)  # type: ignore[arg-type]
        client.on_state(self._ending.engine_changed)
        client.on_state(self._note_state)
        with self._stack, self._disk:
            await client.start()
            async with app.router.lifespan_context(app):
                await self._let_start()
                await self._play_events(app)
                self._check_books()
                await self._end_well()
        self._check_end()
        for answer in self.answers:
            self._check_answer(answer)
        self._check_counts()
        return Outcome(self.answers, self._host.turns)

    def _note_state(self, state: str) -> None:
        """Note when there is no engine: a call that meets such a time may fail for it."""
        now_s = self._loop.time()
        if state == "ready":
            self._absences[-1][1] = now_s
        elif self._absences[-1][1] != math.inf:
            self._absences.append([now_s, math.inf])

    async def _let_start(self) -> None:
        """Wait for the engine, unless something keeps it from starting in time."""
        hard = ("kill", "no_start", "drain", "sigterm", "freeze")
        if not any(isinstance(event, Blow) and event.kind in hard for event in self._history.events[:1]):
            await self._client.wait_ready()

    async def _play_events(self, app: Any) -> None:
        tasks = []
        begun_s = self._loop.time()
        for event in self._history.events:
            await self._sleep_until(begun_s + event.at_s)
            if isinstance(event, Call):
                answer = Answer(event, self._loop.time())
                self.answers.append(answer)
                tasks.append(asyncio.ensure_future(self._call(app, answer)))
            else:
                self._blow(event)
        if tasks:
            limit_s = self._loop.time() + PATIENCE_S + sum(seconds for _, seconds in self._stalls)
            _, waiting = await asyncio.wait(tasks, timeout=limit_s - self._loop.time())
            self._demand(not waiting, f"{len(waiting)} calls still wait after {PATIENCE_S} s")
        for task in tasks:
            task.result()

    async def _call(self, app: Any, answer: Answer) -> None:
        seed = answer.call.seed
        self._open[seed] += 1
        here = True

        def gone() -> None:
            nonlocal here
            self._open[seed] -= here
            here = False
            self._gone_s[seed] = self._loop.time()

        try:
            await Caller(app, answer, gone).run()
        finally:
            gone()

    async def _sleep_until(self, at_s: float) -> None:
        if self._loop.time() < at_s:
            moment = self._loop.create_future()
            self._loop.call_at(at_s, moment.set_result, None)
            await moment

    async def _end_well(self) -> None:
        """Let the engine come to rest, then end everything as SIGTERM does."""
        if self._drained_s is None:
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
        if state == "failed" or "sigterm" in self._faults:
            enough = len(self._host.deaths_s) > MAX_RESTARTS or "client.before_spawn" in self._faults
            self._demand(enough or state != "failed", "the engine was given up too early")
            return
        try:
            await asyncio.wait_for(self._client.wait_ready(), PATIENCE_S)
        except (TimeoutError, EngineDead):
            self._demand(len(self._host.deaths_s) > MAX_RESTARTS, "no engine came back")

    # ------------------------------------------------------------------------------------------- blows

    def _blow(self, blow: Blow) -> None:
        process, now_s = self._host.current, self._loop.time()
        match blow.kind:
            case "kill" if process is not None:
                process.kill()
            case "raise" | "die":
                self._faults.append(blow.point)
                self._stack.enter_context(armed(blow.point, _ACTIONS[blow.kind, blow.point[:6]], nth=blow.nth))
            case "freeze" if process is not None:
                process.frozen_until_s = now_s + blow.seconds
                self._stalls.append((now_s, blow.seconds))
            case "stall":
                self._stalls.append((now_s, blow.seconds))
                self._clock.advance(blow.seconds)
            case "garble" if process is not None:
                self._faults.append("garble")
                process.garble()
            case "wall":
                self._clock.jump_wall(blow.seconds)
            case "slow_link" if process is not None:
                process.slow_down(blow.seconds)
            case "reset_cache":
                self._client.reset_cache()
            case "preempt" if process is not None and process.engine is not None:
                self._preempt(process.engine, blow.nth)
            case "no_start":
                self._host.no_starts += blow.nth
            case "full_disk":
                self._disk.fill()
                self._loop.call_later(blow.seconds, self._disk.empty)
            case "scrape":
                self._check_books()
            case "drain":
                self._drain()
            case "sigterm" if process is not None:
                process.sigterm()
                self._faults.append("sigterm")

    def _preempt(self, engine: Any, nth: int) -> None:
        running = engine._scheduler._roster.running
        if running and engine._scheduler._plan is None:
            engine._scheduler.preempt(running[nth % len(running)].id, engine._clock.monotonic())

    def _drain(self) -> None:
        if self._drained_s is None:
            self._drained_s = self._loop.time()
        self._ending.asked()

    # ------------------------------------------------------------------------------------------- laws

    def _demand(self, holds: bool, law: str) -> None:
        if not holds:
            raise ViolationError(law)

    def _check_answer(self, answer: Answer) -> None:
        call = answer.call
        answer.understand()
        took_s = answer.ended_s - answer.started_s
        name = f"call {call.seed} ({answer.status}, {answer.code})"
        if answer.status in LATER:
            seconds = answer.headers.get("retry-after", "")
            self._demand(seconds.isdigit() and 1 <= int(seconds) <= 121, f"{name}: Retry-After is {seconds!r}")
        for branch, text in answer.texts.items():
            self._check_text(answer, branch, text, name)
        if answer.left:
            leaves = call.leaves_s is not None or call.leaves_after is not None
            self._demand(leaves, f"{name}: was left alone")
            return
        if not answer.closed:
            self._demand(call.stops_after is not None, f"{name}: the answer never ended")
            return
        if call.deadline_s is not None and self._is_punctual(call):
            limit_s = max(call.deadline_s, call.body_s) + self._late_s
            self._demand(took_s <= limit_s, f"{name}: took {took_s:.3f} s of {call.deadline_s}")
        if answer.served:
            self._demand(
                sorted(answer.reasons) == list(range(call.n * len(prompts_of(call)))),
                f"{name}: ended choices {answer.reasons}",
            )
        else:
            self._demand(self._has_cause(answer), f"{name}: there is no cause for this; {answer.message}")

    def _is_punctual(self, call: Call) -> bool:
        """Whether nothing in this history may delay the end of a call beyond its deadline."""
        kinds = {event.kind for event in self._history.events if isinstance(event, Blow)}
        slow = bool(kinds & {"freeze", "stall", "slow_link", "no_start"})
        return not slow and not call.read_s and call.stops_after is None

    @property
    def _late_s(self) -> float:
        """A deadline is seen at the next step; its news travels to the caller. A failed step is computed in halves."""
        setting = self._history.setting
        fails = any(not isinstance(e, Call) or e.spoil == "raise" for e in self._history.events)
        num_steps = 3 + (2 * setting.max_num_seqs if fails else 0)
        return num_steps * setting.step_s + 4 * setting.latency_s + 0.05

    def _check_text(self, answer: Answer, branch: int, text: str, name: str) -> None:
        call = answer.call
        tokens, wanted, reason = oracle(call, branch, self._rule, self._history.setting.max_model_len)
        if branch not in answer.reasons:
            self._demand(wanted.startswith(text), f"{name}/{branch}: {text!r} is no beginning of {wanted!r}")
        elif (text, answer.reasons[branch]) != (wanted, reason):
            capacity = (self._history.setting.num_pages - 1) * PAGE_SIZE
            num_prompt = len(prompts_of(call)[branch // call.n])
            filled = num_prompt + len(tokens) >= capacity and wanted.startswith(text)
            cut = filled and answer.reasons[branch] == "length"
            self._demand(cut, f"{name}/{branch}: {text!r} {answer.reasons[branch]}, should be {wanted!r} {reason}")

    def _has_cause(self, answer: Answer) -> bool:
        """Whether the history explains why this call was not served."""
        call, code = answer.call, answer.code or ""
        absent = any(begun <= answer.ended_s and answer.started_s <= ended for begun, ended in self._absences)
        drained = self._drained_s is not None and answer.ended_s >= self._drained_s
        took_s = answer.ended_s - answer.started_s
        match code:
            case "deadline_exceeded":
                return call.deadline_s is not None and took_s >= call.deadline_s - 1e-6
            case "deadline_unreachable":
                return call.deadline_s is not None
            case "invalid_api_key":
                return call.tenant < 0
            case "model_not_found":
                return call.bad == "model"
            case "context_length_exceeded":
                return len(call.prompt) + call.max_tokens > self._history.setting.max_model_len
            case "exceeds_page_pool":
                return len(call.prompt) >= (self._history.setting.num_pages - 1) * PAGE_SIZE
            case "quarantined":
                return self._died_twice(call)
            case "numerical_error":
                return call.spoil == "nan"
            case "step_failed":
                return call.spoil == "raise" or any(point.startswith("runner.") for point in self._faults)
            case "slow_reader":
                return bool(call.read_s) or call.stops_after is not None
            case "share_of_queue_full":
                return answer.status == 429 or call.stream
            case "queue_full":
                return True  # the bound is checked after each turn; see also the overload test
            case "answer_lost":
                return "garble" in self._faults
            case "engine_error":
                return "engine.add.before_queue" in self._faults
            case "internal_error":
                return "client.before_send" in self._faults
            case _ if code in DEATH_CODES:
                return absent or drained or "sigterm" in self._faults
        return bool(call.bad) and answer.status == 400

    def _died_twice(self, call: Call) -> bool:
        return len(self._host.deaths_s) >= 2

    def _check_books(self) -> None:
        books = self._books()
        total = books["ended"] + books["rejected"] + books["in_flight"]
        self._demand(books["received"] == total, f"the books do not balance: {books}")
        self._demand(min(books.values(), default=0) >= 0, f"a figure is negative: {books}")

    def _books(self) -> Counter[str]:
        metrics = self._context.metrics
        books: Counter[str] = Counter()
        names = {
            "sayfa:requests_received_total": "received", "sayfa:request_success_total": "ended",
            "sayfa:admission_rejections_total": "rejected", "sayfa:requests_in_flight": "in_flight",
        }  # fmt: skip
        for family in metrics._registry.collect():
            for sample in family.samples:
                if sample.name in names:
                    books[names[sample.name]] += int(sample.value)
                    if sample.name == "sayfa:request_success_total":
                        books[sample.labels["finished_reason"]] += int(sample.value)
        return books

    def _check_counts(self) -> None:
        """The server's figures against what the callers saw. Who left may be booked as anything, but once."""
        books = self._books()
        own = [answer for answer in self.answers if answer.call.tenant >= 0]
        draining = [answer for answer in own if answer.status == 503 and answer.code == "draining"]
        refused_early = [answer for answer in draining if answer.message.startswith("The server")]
        num_left = sum(not answer.closed for answer in own)
        seen = Counter(ending_of(answer) for answer in own if answer.closed)
        low, high = len(own) - len(refused_early), len(own)
        self._demand(low <= books["received"] <= high, f"{books['received']} received, {low} to {high} were sent")
        self._demand(books["in_flight"] == 0, f"{books['in_flight']} are in flight at the end")
        served = books["stop"] + books["length"]
        self._demand(
            seen["served"] <= served <= seen["served"] + num_left,
            f"{served} served by the books, {seen['served']} by those who stayed; {books} {seen}",
        )
        self._demand(books["deadline"] >= seen["expired"], f"{books} {seen}: deadlines")
        self._demand(books["abort"] <= num_left, f"{books} {seen}: aborted without a client that left")

    def _check_end(self) -> None:
        client, context = self._client, self._context
        self._demand(len(client._streams) == 0, "a stream is open")
        self._demand(not context.admissions._watched, "an admission is watched")
        self._demand(not context.streams, "an event stream is kept")
        self._demand(not client._tasks, f"the client has tasks: {client._tasks}")
        alive = [process.pid for process in self._host.processes if not process.task.done()]
        self._demand(not alive, f"engine processes are alive: {alive}")
        for process in self._host.processes:
            error = None if process.task.cancelled() else process.task.exception()
            if error is not None:
                raise ViolationError(f"the engine process broke: {error!r}") from error
        self._demand(not self._host.broken, "; ".join(self._host.broken))
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        self._demand(not left, f"tasks are left: {left}")
        self._demand(not self._loop.complaints, "; ".join(self._loop.complaints))


def ending_of(answer: Answer) -> str:
    """served, refused, expired, left or failed."""
    if not answer.closed or answer.left:
        return "left"
    if answer.code is None:
        return "served"
    if answer.code == "deadline_exceeded":
        return "expired"
    begun = any(answer.texts.values())
    refused = answer.status in (400, 401, 404, 429, 503) or (answer.status == 200 and answer.code in DEATH_CODES)
    return "refused" if refused and not begun else "failed"


class FullDisk(logging.Handler):
    """The log's sink. While the disk is full, each line that is written raises ENOSPC, as a real handler's stream."""

    def __init__(self) -> None:
        super().__init__()
        self._is_full = False
        self.lost = 0

    def fill(self) -> None:
        self._is_full = True

    def empty(self) -> None:
        self._is_full = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.format(record)
            if self._is_full:
                raise OSError(28, "No space left on device")
        except OSError:
            self.lost += 1  # what logging.Handler.handleError does when it may not raise

    def __enter__(self) -> "FullDisk":
        self._log = logging.getLogger("sayfa")
        self._before = (self._log.handlers[:], self._log.propagate, self._log.level)
        self._log.handlers[:] = [self]
        self._log.propagate = False
        self._log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.handlers[:], self._log.propagate, level = self._before
        self._log.setLevel(level)


def _raise() -> None:
    raise RuntimeError("armed")


def _raise_os_error() -> None:
    raise OSError("armed")


def _die() -> None:
    raise DeathError


_ACTIONS = {
    **{("raise", part): _raise for part in ("engine", "runner", "proces")},
    **{("die", part): _die for part in ("engine", "runner", "proces")},
    ("raise", "client"): _raise_os_error,
    ("die", "client"): _raise_os_error,
}


def play(history: History) -> Outcome:
    """Play a history to its end. Raises ViolationError, or what broke."""
    clock = VirtualClock()
    loop = VirtualLoop(clock)
    asyncio.set_event_loop(loop)
    main = loop.create_task(World(history, clock, loop).run())
    try:
        return loop.run_until_complete(main)
    except BaseException:
        _sweep_up(loop, main)
        raise
    finally:
        asyncio.set_event_loop(None)
        loop.close()


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
