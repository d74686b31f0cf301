"""Hand each request its outputs: one mailbox a request, filled once a step, read by whoever asked for it.

Used by both clients (`wire.client` beside an engine process, `engine.inproc` without one), so that they end, fail and
bound streams alike. One event loop, no locks. Must not know where outputs come from.

Invariants: a mailbox is in `_open` exactly as long as its reader may still be given something; after the last branch
has finished, or after `fail`, it takes nothing more.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from sayfa.base.clock import Clock
from sayfa.base.errors import EngineError, InvalidRequest, Overloaded, RateLimited, RequestError
from sayfa.base.faults import fault
from sayfa.base.messages import EngineOutput, Refused, Request

MAX_UNREAD_TOKENS = 1000
"""A reader that is further behind than this is slow ..."""
SLOW_READER_LIMIT_S = 10.0
"""... and loses its request if it stays so for this long, in seconds."""


class _Mailbox:
    """What one request has been given and has not read yet."""

    __slots__ = ("branches_left", "error", "outputs", "request", "slow_since_s", "started", "unread_tokens", "waiter")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outputs: deque[EngineOutput] = deque()
        self.branches_left = max(1, request.params.n)
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.unread_tokens = 0
        self.slow_since_s: float | None = None
        self.started = False

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class RequestStreams:
    """All open mailboxes of a client, by request id.

    abort: called with the id of a request whose reader left or is too slow, once.
    """

    def __init__(self, clock: Clock, abort: Callable[[str], None]) -> None:
        self._clock = clock
        self._abort = abort
        self._open: dict[str, _Mailbox] = {}

    def __len__(self) -> int:
        """Requests whose answers are not complete."""
        return len(self._open)

    def requests(self) -> list[Request]:
        """The requests whose answers are not complete, oldest first."""
        return [box.request for box in self._open.values()]

    async def read(self, request: Request, send: Callable[[Request], None]) -> AsyncIterator[EngineOutput]:
        """Send a request and yield its outputs until every branch has finished.

        Raises what the engine answered: InvalidRequest, Overloaded, EngineDead. A reader that leaves early, in whatever
        way, aborts the request. Raises InvalidRequest if the id is in use.
        """
        if request.id in self._open:
            raise InvalidRequest(f"the request id {request.id!r} is in use; choose another one.", param="request_id")
        box = _Mailbox(request)
        self._open[request.id] = box
        try:
            send(request)
            while True:
                while box.outputs:
                    output = box.outputs.popleft()
                    box.unread_tokens -= len(output.tokens)
                    yield output
                if box.error is not None:
                    raise box.error
                if box.branches_left == 0:
                    return
                box.waiter = asyncio.get_running_loop().create_future()
                await box.waiter
        finally:
            if self._open.get(request.id) is box:
                del self._open[request.id]
                self._abort(request.id)

    def deliver(self, outputs: list[EngineOutput]) -> None:
        """Put a step's outputs into their mailboxes. Outputs of requests that nobody reads any more are dropped."""
        now_s = self._clock.monotonic()
        for output in outputs:
            box = self._open.get(output.id)
            if box is None:
                continue
            fault("streams.deliver")
            box.started = True
            box.outputs.append(output)
            box.unread_tokens += len(output.tokens)
            if output.finish is not None:
                box.branches_left -= 1
                if box.branches_left == 0:
                    del self._open[output.id]
            if box.unread_tokens > MAX_UNREAD_TOKENS:
                self._watch_slow(box, now_s)
            else:
                box.slow_since_s = None
            box.wake()

    def refuse(self, refused: Refused) -> None:
        """End a request that the engine did not take, with the error that `kind` names."""
        error: RequestError
        if refused.kind == "invalid":
            error = InvalidRequest(refused.message, param=refused.param, code=refused.code)
        else:
            make = RateLimited if refused.kind == "limited" else Overloaded
            error = make(refused.message, param=refused.param, code=refused.code, retry_after_s=refused.retry_after_s)
        self.fail(refused.id, error)

    def fail(self, request_id: str, error: Exception) -> None:
        """End one request with an error; its reader still gets what was delivered before."""
        box = self._open.pop(request_id, None)
        if box is not None:
            box.error = error
            box.wake()

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """End every open request, each with an error object of its own."""
        for request_id in list(self._open):
            self.fail(request_id, make_error())

    def close(self, request_id: str) -> None:
        """Forget a request that the caller aborts itself; its reader sees the end of the stream."""
        box = self._open.pop(request_id, None)
        if box is not None:
            box.branches_left = 0
            box.wake()

    def _watch_slow(self, box: _Mailbox, now_s: float) -> None:
        if box.slow_since_s is None:
            box.slow_since_s = now_s
        elif now_s - box.slow_since_s > SLOW_READER_LIMIT_S and box.branches_left:
            message = f"the answer was not read for {SLOW_READER_LIMIT_S:.0f} seconds and was given up"
            box.outputs.clear()
            self.fail(box.request.id, EngineError(message, code="slow_reader"))
            self._abort(box.request.id)
