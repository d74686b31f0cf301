"""Hand each request its outputs: one mailbox a request, filled once a step, read by whoever asked for it.

Used by both clients (`wire.process_client` beside an engine process, `engine.inproc` without one), so that they end,
fail and bound streams alike. One event loop, no locks. Must not know where outputs come from.

A reader that is behind pauses its request: the engine computes nothing more of it until most is read, and it is ended
if that takes too long. So a mailbox holds no more than its limit and what was on its way.

Invariants: a mailbox is in `_open` exactly as long as its reader may still be given something; after the last branch
has finished, or after `fail`, it takes nothing more. A timer runs exactly for those that are open and paused.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from sayfa.base.clock import Clock
from sayfa.base.errors import EngineError, InvalidRequest, Overloaded, RateLimited, RequestError
from sayfa.base.faults import fault
from sayfa.base.messages import EngineOutput, Event, Refused, Request, RequestAdmitted

MAX_UNREAD_TOKENS = 1000
MAX_UNREAD_BYTES = 256 << 10
"""A request is paused while its reader is further behind than either of these ..."""
RESUME_SHARE = 0.9
"""... until no more than this part of both is unread. Near 1, so that who reads slowly but steadily is never ended."""
SLOW_READER_LIMIT_S = 10.0
"""A request that stays paused for this long, in seconds, is ended."""
_OUTPUT_BYTES, _TOKEN_BYTES, _SCORE_BYTES, _CHOICE_BYTES = 240, 36, 230, 68
"""What unread outputs cost in this process, about: each, and for each token, scored position and listed choice."""


class _Mailbox:
    """What one request has been given and has not read yet."""

    __slots__ = (
        "branches_left", "error", "has_run", "outputs", "paused_since_s", "request", "timer", "unread_bytes",
        "unread_tokens", "waiter",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outputs: deque[EngineOutput] = deque()
        self.branches_left = max(1, request.params.n)
        self.error: Exception | None = None
        self.has_run = False
        self.waiter: asyncio.Future[None] | None = None
        self.unread_tokens = 0
        self.unread_bytes = 0
        self.paused_since_s: float | None = None
        self.timer: asyncio.TimerHandle | None = None

    def put(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        self.unread_tokens += len(output.tokens)
        self.unread_bytes += _bytes_of(output)

    def take(self) -> EngineOutput:
        output = self.outputs.popleft()
        self.unread_tokens -= len(output.tokens)
        self.unread_bytes -= _bytes_of(output)
        return output

    def is_behind(self, share: float = 1.0) -> bool:
        """Whether more than this part of either limit is unread."""
        return self.unread_tokens > share * MAX_UNREAD_TOKENS or self.unread_bytes > share * MAX_UNREAD_BYTES

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class RequestStreams:
    """All open mailboxes of a client, by request id.

    abort: called with the id of a request whose reader left or is too slow, once. pause: called with the id of a
    request whose reader is behind, and True; when it has caught up, with False.
    """

    def __init__(self, clock: Clock, abort: Callable[[str], None], pause: Callable[[str, bool], None]) -> None:
        self._clock = clock
        self._abort = abort
        self._pause = pause
        self._open: dict[str, _Mailbox] = {}

    def __len__(self) -> int:
        """Requests whose answers are not complete."""
        return len(self._open)

    def running(self) -> list[Request]:
        """The open requests that the engine has begun, oldest first: those that only wait in its queue are not among
        them. All, if it has told of none.
        """
        begun = [box.request for box in self._open.values() if box.has_run]
        return begun or [box.request for box in self._open.values()]

    def note_admitted(self, events: list[Event]) -> None:
        """Take from a message's events whom the engine has begun.

        The server's books look at the same events for an answer of several requests of ours. To tell each admission on
        would make every client's protocol wider, to save them one look at each event.
        """
        for event in events:
            if type(event) is RequestAdmitted and (box := self._open.get(event.request)) is not None:
                box.has_run = True

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
                    output = box.take()
                    if box.paused_since_s is not None and not box.is_behind(RESUME_SHARE):
                        self._resume(box)
                    yield output
                if box.error is not None:
                    raise box.error
                if box.branches_left == 0:
                    return
                box.waiter = asyncio.get_running_loop().create_future()
                await box.waiter
        finally:
            if self._open.get(request.id) is box:
                self._remove(request.id)
                self._abort(request.id)

    def deliver(self, outputs: list[EngineOutput]) -> None:
        """Put a step's outputs into their mailboxes. Outputs of requests that nobody reads any more are dropped."""
        behind: dict[str, _Mailbox] = {}
        for output in outputs:
            box = self._open.get(output.id)
            if box is None:
                continue
            fault("streams.deliver")
            box.put(output)
            if output.finish is not None:
                box.branches_left -= 1
                if box.branches_left == 0:
                    self._remove(output.id)
            if box.branches_left and box.paused_since_s is None and box.is_behind():
                behind[output.id] = box
            box.wake()
        for box in behind.values():
            if box.branches_left:
                self._hold(box)

    def refuse(self, refused: Refused) -> None:
        """End a request that the engine did not take, with the error that `kind` names."""
        error: RequestError
        if refused.kind == "invalid":
            error = InvalidRequest(refused.message, param=refused.param, code=refused.code)
        else:
            make = RateLimited if refused.kind == "limited" else Overloaded
            code = "draining" if refused.kind == "draining" else refused.code
            error = make(refused.message, param=refused.param, code=code, retry_after_s=refused.retry_after_s)
        self.fail(refused.id, error)

    def fail(self, request_id: str, error: Exception) -> None:
        """End one request with an error; its reader still gets what was delivered before."""
        box = self._remove(request_id)
        if box is not None:
            box.error = error
            box.wake()

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """End every open request, each with an error object of its own."""
        for request_id in list(self._open):
            self.fail(request_id, make_error())

    def lose_all(self) -> None:
        """End and abort all after a message that nobody could read: each may lack what it held, or wait for ever."""
        for request_id in list(self._open):
            self.fail(request_id, EngineError("a part of the answer was lost", code="answer_lost"))
            self._abort(request_id)

    def close(self, request_id: str) -> None:
        """Forget a request that the caller aborts itself; its reader sees the end of the stream."""
        box = self._remove(request_id)
        if box is not None:
            box.branches_left = 0
            box.wake()

    def _remove(self, request_id: str) -> _Mailbox | None:
        box = self._open.pop(request_id, None)
        if box is not None:
            box.stop_timer()
        return box

    def _hold(self, box: _Mailbox) -> None:
        """Pause a request, and see after the limit whether it still is."""
        box.paused_since_s = self._clock.monotonic()
        box.timer = asyncio.get_running_loop().call_later(SLOW_READER_LIMIT_S, self._look_at, box)
        self._pause(box.request.id, True)

    def _resume(self, box: _Mailbox) -> None:
        box.paused_since_s = None
        box.stop_timer()
        if self._open.get(box.request.id) is box:
            self._pause(box.request.id, False)

    def _look_at(self, box: _Mailbox) -> None:
        """End a request that has been paused for the limit on our clock, which does not count our own stalls."""
        if box.paused_since_s is None:
            return
        left_s = SLOW_READER_LIMIT_S - (self._clock.monotonic() - box.paused_since_s)
        if left_s > 0:
            box.timer = asyncio.get_running_loop().call_later(max(left_s, 0.01), self._look_at, box)
            return
        message = f"the answer was not read for {SLOW_READER_LIMIT_S:.0f} seconds and was given up"
        box.outputs.clear()
        self.fail(box.request.id, EngineError(message, code="slow_reader"))
        self._abort(box.request.id)


def _bytes_of(output: EngineOutput) -> int:
    """About what an output costs while it is kept."""
    size = _OUTPUT_BYTES + _TOKEN_BYTES * len(output.tokens)
    for scores in (output.logprobs, output.prompt_logprobs):
        if scores:
            size += sum(_SCORE_BYTES + _CHOICE_BYTES * len(score.top_ids) for score in scores)
    return size
