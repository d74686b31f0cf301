"""The EngineClient protocol without a process: the engine steps inside the event loop of its caller.

It blocks the loop for as long as a step takes, which is why servers use `wire.process_client`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from sayfa.base.clock import Clock, SystemClock
from sayfa.base.errors import EngineDead
from sayfa.base.messages import EngineInfo, EngineOutput, Outputs, Request, StepStats
from sayfa.engine.engine import Engine
from sayfa.wire.client import ClientState, Health, check_serving
from sayfa.wire.streams import RequestStreams


class InprocClient:
    """Drives one engine: a task steps as long as there is work, and is started again by the next request."""

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self._engine = engine
        self._state: ClientState = "ready"
        self._latest: StepStats | None = None
        self._callbacks: list[Callable[[Outputs], None]] = []
        self._streams = RequestStreams(clock or SystemClock(), self._abort_in_engine, self._pause_in_engine)
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def info(self) -> EngineInfo | None:
        return self._engine.info

    @property
    def latest(self) -> StepStats | None:
        return self._latest

    async def start(self) -> None:
        """Nothing to start: the engine is there."""

    async def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        check_serving(self._state)
        outputs = self._streams.read(request, self._add)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def abort(self, request_id: str, branches: list[int] | None = None) -> None:
        if branches is None:
            self._streams.close(request_id)
        self._engine.abort([request_id], branches)
        self._keep_stepping()

    async def drain(self, limit_s: float) -> None:
        self._state = "draining"
        for refused in self._engine.refuse_waiting():
            self._streams.refuse(refused)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._rest()
        self._streams.deliver(self._engine.end_all("the server shut down before the answer was complete").outputs)

    async def close(self) -> None:
        self._state = "dead"
        if self._task is not None:
            self._task.cancel()
        self._streams.fail_all(lambda: EngineDead("the engine was closed"))

    def on_outputs(self, callback: Callable[[Outputs], None]) -> None:
        self._callbacks.append(callback)

    def health(self) -> Health:
        pong = self._engine.pong(0)
        return Health(self._state in ("ready", "draining"), pong.since_step_s, pong.busy, pong.expected_step_s)

    def _add(self, request: Request) -> None:
        self._engine.add(request)
        self._keep_stepping()

    def _abort_in_engine(self, request_id: str) -> None:
        self._engine.abort([request_id])
        self._keep_stepping()

    def _pause_in_engine(self, request_id: str, on: bool) -> None:
        self._engine.pause([request_id], on)
        self._keep_stepping()

    async def _rest(self) -> None:
        """Return when no request is left; one that is paused goes on when its reader does."""
        while self._engine.has_requests:
            if self._task is not None:
                await asyncio.wait({self._task})
            await asyncio.sleep(0.01)

    def _keep_stepping(self) -> None:
        if self._state != "dead" and self._engine.has_work and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._step_while_busy())

    async def _step_while_busy(self) -> None:
        try:
            while self._engine.has_work:
                message = self._engine.step()
                self._latest = message.stats
                self._streams.deliver(message.outputs)
                for callback in self._callbacks:
                    callback(message)
                await asyncio.sleep(0)
        except Exception:
            self._state = "dead"
            self._streams.fail_all(EngineDead)
            raise
