"""FakeEngineClient: the EngineClient protocol without an engine, for tests of the server.

Each request gets the tokens that `script(request, branch)` returns, one a step, and then finishes. It can be told to
refuse, to be slow, to fail a request, and to die.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from sayfa.base.clock import SystemClock
from sayfa.base.errors import EngineDead, Overloaded
from sayfa.base.messages import (
    EngineInfo,
    EngineOutput,
    MemoryPlan,
    Outputs,
    Refused,
    Request,
    RequestTimes,
    StepStats,
)
from sayfa.wire.client import ClientState, Health
from sayfa.wire.streams import RequestStreams

Script = Callable[[Request, int], list[int]]


def make_info(**changes: object) -> EngineInfo:
    """An EngineInfo of a small made-up model; `changes` replace fields."""
    facts: dict[str, object] = {
        "model": "fake", "architecture": "llama", "dtype": "float32", "kv_dtype": "float32", "vocab_size": 1000,
        "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_queued_requests": 16,
        "max_queued_tokens": 4096, "prefix_caching": True, "threads": 1, "isa": "none",
        "memory": MemoryPlan(weights_bytes=1, pages_bytes=2, buffers_bytes=3, margin_bytes=4, num_pages=64,
                             page_size=16, bytes_per_page=1024),
        "ops": {"linear": "native"}, "phases": [("imports", 0.1)], "pid": 1,
    }  # fmt: skip
    return EngineInfo(**{**facts, **changes})  # type: ignore[arg-type]


def echo_prompt(request: Request, branch: int) -> list[int]:
    """The default script: the prompt again, up to max_tokens, moved by the branch's number."""
    limit = request.params.max_tokens if request.params.max_tokens is not None else 16
    return [(token + branch) % 1000 for token in (request.prompt * (1 + limit // max(1, len(request.prompt))))[:limit]]


class FakeEngineClient:
    """Scripted engine. `aborted`, `paused` (which stops nothing here), `requests`: what the server did.

    hold: an unset event stops all progress.
    """

    def __init__(self, script: Script = echo_prompt, **info: object) -> None:
        self._script = script
        self.state: ClientState = "ready"
        self.info: EngineInfo | None = make_info(**info)
        self.latest: StepStats | None = None
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.aborted_branches: list[tuple[str, int]] = []
        self.paused: list[tuple[str, bool]] = []
        self.drained: float | None = None
        self.closed = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.refuse_with: Callable[[Request], Refused | None] = lambda request: None
        self.since_step_s = 0.0
        self.expected_step_s = 0.01
        self._callbacks: list[Callable[[Outputs], None]] = []
        self._streams = RequestStreams(SystemClock(), self._note_abort, self._note_pause)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Nothing to start."""

    async def generate(self, request: Request) -> AsyncIterator[EngineOutput]:
        if self.state == "draining":
            raise Overloaded("the server is shutting down", retry_after_s=5)
        if self.state != "ready":
            raise EngineDead()
        outputs = self._streams.read(request, self._take)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    def abort(self, request_id: str, branches: list[int] | None = None) -> None:
        if branches is not None:
            self.aborted_branches += [(request_id, branch) for branch in branches]
            return
        self._streams.close(request_id)
        self._note_abort(request_id)

    async def drain(self, limit_s: float) -> None:
        self.state = "draining"
        self.drained = limit_s
        while len(self._streams):  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def close(self) -> None:
        self.closed = True
        self._streams.fail_all(EngineDead)
        for task in self._tasks.values():
            task.cancel()

    def on_outputs(self, callback: Callable[[Outputs], None]) -> None:
        self._callbacks.append(callback)

    def health(self) -> Health:
        return Health(self.state in ("ready", "draining"), self.since_step_s, len(self._streams) > 0,
                      self.expected_step_s)  # fmt: skip

    def die(self) -> None:
        """End every stream as an engine's death does."""
        self.state = "dead"
        self._streams.fail_all(EngineDead)

    def _note_pause(self, request_id: str, on: bool) -> None:
        self.paused.append((request_id, on))

    def _note_abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def _take(self, request: Request) -> None:
        self.requests.append(request)
        self._tasks[request.id] = asyncio.ensure_future(self._play(request))

    async def _play(self, request: Request) -> None:
        refused = self.refuse_with(request)
        if refused is not None:
            self._streams.refuse(refused)
            return
        answers = [self._script(request, branch) for branch in range(request.params.n)]
        for step in range(max(1, *map(len, answers))):
            await self.hold.wait()
            await asyncio.sleep(0)
            self._deliver([self._output(request, branch, answer, step) for branch, answer in enumerate(answers)
                           if step < max(1, len(answer))])  # fmt: skip
        self._tasks.pop(request.id, None)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        self._streams.deliver(outputs)
        for callback in self._callbacks:
            callback(Outputs(outputs=outputs))

    def _output(self, request: Request, branch: int, answer: list[int], step: int) -> EngineOutput:
        ends = set(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            ends |= set(request.params.eos_token_ids)
        token = answer[step] if answer else None
        last = step + 1 >= len(answer)
        stopped = token is not None and token in ends
        closing = {"num_prompt": len(request.prompt), "finish": "stop" if stopped else "length",
                   "stop_token": token if stopped else None,
                   "times": RequestTimes(queue_s=0.0, prefill_s=0.001, decode_s=0.001, preempted=0)}  # fmt: skip
        tokens = [] if token is None or stopped else [token]
        return EngineOutput(id=request.id, branch=branch, tokens=tokens, **(closing if last else {}))  # type: ignore[arg-type]
