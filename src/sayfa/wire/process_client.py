"""The client that keeps an engine process alive behind the EngineClient protocol.

`cli` makes one and hands it to the server's event loop. It is told a command line and settings as bytes; it must not
know what an engine is made of, nor HTTP.

    starting ──Hello──▸ ready ──▸ draining ──▸ dead (ended as asked)
       │  ▲               │
       │  └──back-off── dead ◂── the process ended
       └────────────────▸ failed (cannot start, or died too often: the server should end)
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

from sayfa.base.clock import Clock
from sayfa.base.errors import EngineDead, Overloaded
from sayfa.base.faults import fault
from sayfa.base.log import logger
from sayfa.base.messages import (
    Abort,
    Add,
    Drain,
    EngineInfo,
    EngineOutput,
    Failed,
    FromEngine,
    Hello,
    Outputs,
    Pause,
    Pong,
    Refused,
    Request,
    ResetCache,
    Starting,
    StepStats,
    ToEngine,
)
from sayfa.wire.client import ClientState, Health, check_serving
from sayfa.wire.codec import MalformedMessageError, decode_from_engine, encode
from sayfa.wire.link import Child, EngineProcess, Link
from sayfa.wire.sockets import frame
from sayfa.wire.streams import RequestStreams
from sayfa.wire.supervisor import Quarantine, RestartPolicy, ending_words
from sayfa.wire.watch import PING_INTERVAL_S, Watch

log = logger("wire")

EXIT_WAIT_S = 2.0
"""How long an engine may take to end after its connection is closed, before it is killed."""


class ProcessClient:
    """Starts an engine process, talks to it, and starts the next one when it dies.

    The process is told its descriptor as the last argument; the first frame it gets is `config`. Invariant: at most one
    process of ours is alive.
    """

    def __init__(
        self,
        command: list[str],
        config: bytes,
        clock: Clock,
        spawn: Callable[[list[str], bytes], Child] = EngineProcess.spawn,
    ) -> None:
        """command: the engine's command line, without the descriptor. config: opaque here, JSON for the engine.

        spawn: starts a command and sends it its first frame; may raise OSError.
        """
        self._spawn = spawn
        self._command = command
        self._config = config
        self._clock = clock
        self._watch = Watch(clock)
        self._state: ClientState = "starting"
        self._info: EngineInfo | None = None
        self._latest: StepStats | None = None
        self._process: Child | None = None
        self._link: Link | None = None
        self._failure: Failed | None = None
        self._closing = False
        self._ended_for = ""
        self._streams = RequestStreams(
            self._watch.awake, self._send_abort, lambda name, on: self._send(Pause([name], on))
        )
        self._restarts = RestartPolicy(clock)
        self._quarantine = Quarantine(clock)
        self._outputs_callbacks: list[Callable[[Outputs], None]] = []
        self._progress_callbacks: list[Callable[[str, float], None]] = []
        self._state_callbacks: list[Callable[[ClientState], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # --------------------------------------------------------------------------------------- what can be asked

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def latest(self) -> StepStats | None:
        return self._latest

    @property
    def failure(self) -> Failed | None:
        """Why the engine cannot be had, once `state` is "failed"; the server ends with its exit code."""
        return self._failure

    @property
    def pid(self) -> int | None:
        """Process id of the engine that runs now."""
        return self._process.pid if self._process is not None else None

    def health(self) -> Health:
        alive = self._link is not None and self._state in ("ready", "draining")
        return self._watch.health(alive, len(self._streams) > 0)

    def on_outputs(self, callback: Callable[[Outputs], None]) -> None:
        self._outputs_callbacks.append(callback)

    def on_progress(self, callback: Callable[[str, float], None]) -> None:
        """Call `callback(phase, done)` as a starting engine tells how far it is."""
        self._progress_callbacks.append(callback)

    def on_state(self, callback: Callable[[ClientState], None]) -> None:
        """Call `callback` at each change of `state`."""
        self._state_callbacks.append(callback)

    # --------------------------------------------------------------------------------------- life of the process

    def spawn(self) -> None:
        """Start the process now, without an event loop, so that it loads while the caller still imports."""
        fault("client.before_spawn")
        self._process = self._spawn(self._command, frame(self._config))
        self._watch.note_start()

    async def start(self) -> None:
        """Attach to the process (after spawning it if `spawn` was not called). Returns at once; see `wait_ready`."""
        if self._process is None:
            self.spawn()
        await self._attach()
        self._run(self._ping)

    async def wait_ready(self) -> EngineInfo:
        """Return when the engine serves. Raises EngineDead with the engine's own sentence if it never will."""
        while True:
            if self._state == "ready" and self._info is not None:
                return self._info
            if self._state == "failed" or self._closing:
                raise EngineDead(self._failure.message if self._failure else "the engine was closed")
            self._changed.clear()
            await self._changed.wait()

    async def drain(self, limit_s: float) -> None:
        if self._state != "ready":  # nothing runs that could be finished
            await self.close()
            return
        self._set_state("draining")
        fault("client.drain")
        self._send(Drain(limit_s))
        deadline_s = self._clock.monotonic() + limit_s + EXIT_WAIT_S
        while self._link is not None and self._clock.monotonic() < deadline_s:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, deadline_s - self._clock.monotonic())):
                    await self._changed.wait()

    async def close(self) -> None:
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._streams.fail_all(_cut_off if self._state == "draining" else lambda: EngineDead("the engine was closed"))
        if self._process is not None:
            await self._process.end(EXIT_WAIT_S)
            self._process = None  # not before it has ended: whoever is cancelled here leaves the rest to the next call
        self._set_state("dead" if self._failure is None else "failed")

    # --------------------------------------------------------------------------------------- requests

    async def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        check_serving(self._state)
        self._quarantine.check(request)
        outputs = self._streams.read(request, self._send_request)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def abort(self, request_id: str, branches: list[int] | None = None) -> None:
        if branches is None:
            self._streams.close(request_id)
        self._send_abort(request_id, branches)

    def reset_cache(self) -> None:
        """Let the engine forget all cached pages that nobody uses."""
        self._send(ResetCache())

    def _send_request(self, request: Request) -> None:
        fault("client.before_send")
        if len(self._streams) == 1:
            self._watch.moved()  # this is the only one: an idle engine owes no progress until now
        self._send(Add(request))

    def _send_abort(self, request_id: str, branches: list[int] | None = None) -> None:
        fault("client.send_abort")
        self._send(Abort([request_id], branches))

    def _send(self, message: ToEngine) -> None:
        if self._link is not None:
            fault("client.encode")
            self._link.send(encode(message))

    # --------------------------------------------------------------------------------------- what the engine says

    def _received(self, payload: bytes) -> None:
        fault("client.decode")
        try:
            message = decode_from_engine(payload)
        except MalformedMessageError as error:
            log.error("the engine sent a message that cannot be read, open requests are ended: %s", error)
            self._streams.lose_all()
            return
        self._handle(message)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                self._handle_outputs(message)
            case Refused():
                fault("client.refused")
                self._streams.refuse(message)
            case Pong():
                fault("client.pong")
                self._watch.note_pong(message)
            case Hello(info=info):
                fault("client.hello")
                self._info = info
                self._watch.moved()
                self._restarts.note_ready()
                self._set_state("ready")
            case Starting(phase=phase, done=done):
                fault("client.progress")
                self._watch.note_phase(phase, done)
                for progress in self._progress_callbacks:
                    progress(phase, done)
            case Failed():
                self._failure = message

    def _handle_outputs(self, message: Outputs) -> None:
        fault("client.before_deliver")
        self._watch.moved()
        if message.stats is not None:
            self._latest = message.stats
        self._streams.note_admitted(message.events)
        self._streams.deliver(message.outputs)
        for callback in self._outputs_callbacks:
            try:
                fault("client.figures")
                callback(message)
            except Exception:  # figures must never touch a request
                log.exception("a callback for step figures failed")

    async def _ping(self) -> None:
        while True:
            self._watch.awake.tick()
            try:
                self._look_after()
            except Exception:  # the next second is another try; a server must not end for want of a look
                log.exception("looking after the engine failed")
            await asyncio.sleep(PING_INTERVAL_S)

    def _look_after(self) -> None:
        """Ask a serving engine for its progress, look at a loading one; who stands still says why, or is ended."""
        process = self._process
        if self._state in ("ready", "draining"):
            fault("client.ping")
            self._send(self._watch.ping())
            act, finding = self._watch.look_at_steps(len(self._streams) > 0)
        elif self._state == "starting" and process is not None:
            act, finding = self._watch.look_at_load(process.signs())
        else:
            return
        if process is not None and act == "ask":
            asked = self._watch.can_be_asked
            log.error("the engine %s%s", finding, "; its state follows" if asked else "")
            if asked:
                process.ask_for_state()
        elif process is not None and act == "end":
            log.error("the engine %s; it is ended and started anew", finding)
            self._ended_for = f"it {finding}"
            process.kill()

    # --------------------------------------------------------------------------------------- death

    async def _attach(self) -> None:
        if self._process is not None:
            fault("client.attach")
            self._link = await self._process.attach(self._received, self._lost)

    def _lost(self) -> None:
        """Answer every open stream at once, then find out how the process ended and start the next."""
        if self._closing or self._link is None:
            return
        self._link = self._latest = None
        try:
            self._act_on_loss()
        except Exception as error:
            log.exception("the end of the engine could not be dealt with")
            self._streams.fail_all(EngineDead)
            self._give_up(f"the end of the engine could not be dealt with: {error}")

    def _act_on_loss(self) -> None:
        fault("client.lost")
        if self._state == "draining":
            self._streams.fail_all(_cut_off)
            self._run(self._bury)
            return
        running = self._streams.running()
        self._streams.fail_all(EngineDead)
        self._quarantine.note_death(running)
        if self._failure is not None and self._info is None:  # no engine of ours has ever served: none will
            self._run(self._bury)
            self._set_state("failed")
            return
        self._set_state("dead")
        self._run(self._restart)

    async def _bury(self) -> int | None:
        fault("client.bury")
        process = self._process
        code = await process.end(EXIT_WAIT_S) if process is not None else None
        self._process = None
        self._changed.set()
        return code

    async def _restart(self) -> None:
        """Start the next process after the back-off; give up when there were too many starts, failed ones included."""
        code = await self._bury()
        reason = self._failure.message if self._failure is not None else self._ended_for or ending_words(code)
        self._ended_for = ""
        while True:
            delay_s = self._restarts.next_delay_s()
            if delay_s is None:
                self._give_up(f"the engine process ended too often ({reason}); giving up")
                return
            log.error("the engine process ended (%s); starting the next one in %.0f s", reason, delay_s)
            self._failure = None
            await asyncio.sleep(delay_s)
            try:
                fault("client.restart")
                self.spawn()
                await self._attach()
            except Exception as error:  # no memory or no process numbers left, for now
                reason = f"it could not be started: {error}"
                await self._bury()
                continue
            self._set_state("starting")
            return

    def _set_state(self, state: ClientState) -> None:
        if state != self._state:
            self._state = state
            for callback in self._state_callbacks:
                callback(state)
        self._changed.set()

    def _run(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _logged(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await work()
        except Exception as error:
            log.exception("supervising the engine failed")
            self._give_up(f"the engine could not be started again: {error}")

    def _give_up(self, message: str) -> None:
        log.error(message)
        self._failure = Failed(message, exit_code=1)
        self._set_state("failed")


def _cut_off() -> Overloaded:
    """What open streams are told when a drain is not waited for: nothing failed, another server may answer."""
    return Overloaded("the server shut down before the answer was complete", code="draining", retry_after_s=5)
