"""Write a stream of server-sent events, and notice when its reader leaves or stops reading.

`EventStream` is the response of every streamed route. It holds back the status line until the first event is there
(so a refusal is still a proper 503) but not longer than `START_WAIT_S`. Knows bytes and HTTP; knows no tokens.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sayfa.base.clock import AwakeClock
from sayfa.base.faults import fault
from sayfa.server.errors import ErrorAnswer, body_bytes, headers_of

log = logging.getLogger("sayfa.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
START_WAIT_S = 1.0
SLOW_SEND_LIMIT_S = 10.0

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def wait_until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Send `events` one by one; each item is one or more whole `data: …` lines ending in a blank line.

    explain: called with the exception that ends the stream, of `events` or of ours; what the client is then told.
    streams: the set that a watchdog walks for readers that stopped reading (see `sweep`).
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        explain: Callable[[Exception], ErrorAnswer],
        streams: "set[EventStream]",
        clock: AwakeClock,
    ) -> None:
        super().__init__()
        self._clock = clock
        self._events = events
        self._explain = explain
        self._streams = streams
        self._work: asyncio.Task[None] | None = None
        self._comment: asyncio.Task[None] | None = None
        self._send: Send | None = None
        self._hang_up: Callable[[], None] | None = None
        self._started = False
        self.sending_since_s: float | None = None
        self.last_sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._hang_up = scope.get("sayfa.hang_up")
        self._streams.add(self)
        self._work = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(wait_until_gone(receive))
        try:
            await asyncio.wait({self._work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(self)
            ending = [task for task in (self._work, gone, self._comment) if task is not None]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
        if not self._work.cancelled():
            self._work.result()

    def give_up(self) -> None:
        """End a stream whose reader stopped reading; its request is aborted by the end of `events`.

        The connection goes with it: closing it politely would keep what is unsent until the reader reads.
        """
        if self._hang_up is not None:
            self._hang_up()
        elif self._work is not None:
            self._work.cancel()

    def keep_alive(self) -> None:
        """Begin to send a comment, if the stream has begun and nothing is being sent.

        In a task of its own: who does not read it may wait, but not the watch over the other streams.
        """
        if self._started and self.sending_since_s is None and self._send is not None:
            fault("server.stream.keep_alive")
            self.sending_since_s = self._clock.monotonic()
            self._comment = asyncio.create_task(self._write(self._send, KEEP_ALIVE))

    async def _pump(self, send: Send) -> None:
        events = self._events
        try:
            await self._put(send, await self._first(send))
            async for event in events:
                await self._put(send, event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:
            await self._fail(send, error)
        finally:
            await events.aclose()

    async def _first(self, send: Send) -> bytes:
        """Wait for the first event, b"" if there is none; begin the response with it, or without after START_WAIT_S."""
        waiting = asyncio.ensure_future(anext(self._events, b""))
        try:
            await asyncio.wait({waiting}, timeout=START_WAIT_S)
            if not waiting.done():
                await self._begin(send)
            event = await waiting
        finally:
            waiting.cancel()
            # The events can only be closed when nobody waits for one any more, and an error that came in the moment in
            # which the client left is to be seen by somebody.
            await asyncio.gather(waiting, return_exceptions=True)
        if not self._started:
            await self._begin(send)
        return event

    async def _begin(self, send: Send) -> None:
        fault("server.stream.begin")
        self._started = True
        self.last_sent_s = self._clock.monotonic()
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})

    async def _put(self, send: Send, event: bytes) -> None:
        fault("server.stream.send")
        await self._write(send, event)

    async def _write(self, send: Send, event: bytes) -> None:
        self.sending_since_s = self.last_sent_s = self._clock.monotonic()
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self.sending_since_s = None

    async def _fail(self, send: Send, error: Exception) -> None:
        answer = self._explain(error)
        body = body_bytes(answer)
        if self._started:
            await self._write(send, b"data: " + body + b"\n\n" + DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), value.encode()) for name, value in headers_of(answer).items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def sweep(streams: set[EventStream], keep_alive_s: float, clock: AwakeClock, tick_s: float = 1.0) -> None:
    """Watch all streams, for ever: end those that cannot be written to, keep quiet ones alive (0 = never).

    One task for all streams, so that a token costs no timer. It is also what ticks `clock`.
    """
    while True:
        await asyncio.sleep(tick_s)
        clock.tick()
        for stream in list(streams):
            try:
                _look_at(stream, keep_alive_s, clock.monotonic())
            except Exception:  # of one stream, or of our own: the others are looked at all the same
                log.exception("looking after a stream failed")


def _look_at(stream: EventStream, keep_alive_s: float, now_s: float) -> None:
    fault("server.sweep")
    if stream.sending_since_s is not None and now_s - stream.sending_since_s > SLOW_SEND_LIMIT_S:
        stream.give_up()
    elif keep_alive_s and now_s - stream.last_sent_s >= keep_alive_s:
        stream.keep_alive()
