"""Bounds on one HTTP connection, before any request exists: how many, how long, how large.

A thin layer over uvicorn's protocol, installed by `serve`. It adds what that lacks: a limit on header bytes and time,
errors in OpenAI's form for requests that cannot be parsed, and the news of a closed connection for a request that
runs while another one waits behind it on the same connection. Knows no routes.
"""

import asyncio
import logging
import re
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sayfa.base.errors import RequestError
from sayfa.server.edge import MAX_HEADER_BYTES, MAX_HEADERS, MAX_LINE_BYTES
from sayfa.server.errors import StatusError, body_bytes, headers_of, to_answer
from sayfa.server.gate import Gate
from sayfa.server.refusals import Attempt, Refusals

log = logging.getLogger("sayfa.server.connection")
log.setLevel(logging.ERROR)
"""In place of uvicorn's, which warns of each request that it cannot parse: a flood of them would fill the disk."""

HEADER_TIME_LIMIT_S = 10.0
MAX_SILENT_BYTES = 128 << 10
"""What may come without completing anything: the parser tells of a header or chunk only when its end is there."""
MAX_PIECES = 100_000
"""In how many pieces a body may come: one byte in each would cost a thousand times what the bytes do."""
LINGER_S = 2.0
MAX_LINGER_BYTES = 64 << 20
"""How long and how much a client that was answered before its body was there may go on sending: many read an answer
only when they have sent all."""
MAX_REFUSED = 64
"""How many refused connections may linger, so that their clients read why; further ones are closed at once."""
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 414: b"URI Too Long", 429: b"Too Many Requests",
            431: b"Headers Too Large", 503: b"Service Unavailable"}  # fmt: skip


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Subclasses have the `gate` that it must pass (see `behind`), and its `num_refused`.

    refusals: where each leaves its line.
    """

    gate: Gate
    refusals: Refusals
    num_refused = 0
    """Refused connections that are still open, of the subclass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = log
        self.url = b""
        self._header_bytes = self._num_fields = 0
        self._refusal: RequestError | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._lingered_bytes = 0
        self._running: RequestResponseCycle | None = None
        self._in_body = False
        self._silent_bytes = 0
        self._num_pieces = 0
        self._key: str | None = None
        self._entered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._key = self.gate.key(self.client[0] if self.client else None)
        error = self.gate.why_not(self._key)
        if error is None:
            self._entered = True
            self.gate.enter(self._key)
            self._arm()
            return
        type(self).num_refused += 1
        self._refuse(error, linger=self.num_refused <= MAX_REFUSED)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._entered:
            self.gate.leave(self._key)
        else:
            type(self).num_refused -= 1
        self._end_lingering()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > MAX_LINGER_BYTES:
                self.transport.close()
        if self._refusal is not None or self.transport.is_closing():
            return
        if not self._in_body:
            # Clients that offer HTTP/2 with each request want its answer; the parser would drop the body. What is not
            # found here, since it came in pieces or behind another request, is refused in `on_headers_complete`.
            head, blank, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"\r\nx-upgrade:", head) + blank + rest if _UPGRADE.search(head) else data
        self._silent_bytes += len(data)
        if self._header_timer is None and not self._in_body and not self._is_busy:
            self._arm()  # whatever comes ends the keep-alive time, also an empty line, which begins no request
        super().data_received(data)
        if self._silent_bytes > MAX_SILENT_BYTES:
            self._refuse(StatusError(431))
        if self._is_idle and self.timeout_keep_alive_task is None:
            # The rest of a body that was answered early ended the keep-alive time; no answer will begin it again.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # ------------------------------------------------------------------------------------------ the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._silent_bytes = 0
        self._header_bytes = self._num_fields = 0
        self._arm()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_LINE_BYTES:
            self._refuse(StatusError(414))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._refusal is not None:
            return  # the rest of what was read is parsed all the same; it shall cost nothing
        if not self._in_body:  # what stands behind a body is no header (RFC 9110, 6.5.1): no proxy looked at it as one
            super().on_header(name, value)
        self._silent_bytes = 0
        self._header_bytes += len(name) + len(value)
        self._num_fields += 1
        if self._header_bytes > MAX_HEADER_BYTES or self._num_fields > MAX_HEADERS:
            self._refuse(StatusError(431))

    def on_headers_complete(self) -> None:
        self._disarm()
        self._silent_bytes = self._num_pieces = 0
        if self._refusal is None and self._is_doubtful():
            self._refuse(StatusError(400, "This is not valid HTTP/1.1.", code="malformed_http"))
        if self._refusal is None and self.parser.should_upgrade():
            # The parser would take the body for the next request.
            message = "Other protocols are not served; send the request without its `Upgrade` field."
            self._refuse(StatusError(400, message, code="upgrade_not_served"))
        if self._refusal is None:
            self._in_body = True
            super().on_headers_complete()

    def _is_doubtful(self) -> bool:
        """Tell what the parser lets pass though a proxy before us may read it otherwise (RFC 9112, 3.2 and 6.1)."""
        version = self.parser.get_http_version()
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        return (
            version not in ("1.0", "1.1")
            or (bool(codings) and (codings != [b"chunked"] or version == "1.0"))
            or sum(name == b"host" for name, _ in self.headers) > 1
            or not self.url.startswith((b"/", b"*"))  # a whole address, or one to tunnel to: this is no proxy
        )

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        self._num_pieces += 1
        if self._num_pieces > MAX_PIECES:
            self._refuse(StatusError(400, f"The body came in more than {MAX_PIECES} pieces."))
        if self._refusal is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        self._in_body = False
        self.url = b""
        if self._refusal is None:
            self._end_lingering()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Of a body that was answered early (no key, no such route) the rest is parsed and thrown away.

        The connection then serves the next request. It closes when the rest is large or does not come.
        """
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._lingered_bytes = 0
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope["sayfa.hang_up"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] != "1.0" else _unframed(app, cycle))

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: the request was refused."""

    # ------------------------------------------------------------------------------------------ refusals

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, in the common form."""
        if self._refusal is None:
            self._refuse(StatusError(400, "This is not valid HTTP/1.1.", code="malformed_http"))

    @property
    def _is_busy(self) -> bool:
        """Whether an answer is awaited or being written."""
        return self._running is not None and not self._running.response_complete

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is under way and the next request may begin."""
        under_way = self._is_busy or self._in_body or self._header_timer is not None
        return not under_way and self._refusal is None and not self.transport.is_closing()

    def _end_lingering(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _refuse(self, error: RequestError, *, linger: bool = False) -> None:
        """Answer with an error and close. linger: only when the client has read it, or after LINGER_S.

        To close while something comes makes the kernel take the answer back. Requests that came whole before this one
        are answered, and the last of their answers closes.
        """
        if self._refusal is not None:
            return
        self._refusal = error
        self._disarm()
        self.gate.on_refused(error.code or "other")
        self.refusals.note(self._attempt(), error)
        if self._running is not None and self._is_busy and not self._in_body:
            (self.pipeline[0][0] if self.pipeline else self._running).keep_alive = False
            return
        answer = to_answer(error, "-")
        body = body_bytes(answer)
        lines = [b"HTTP/1.1 %d %b" % (answer.status, _PHRASES.get(answer.status, b"Error"))]
        lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
        lines += [f"{name}: {value}".encode() for name, value in headers_of(answer).items()]
        answered = self._linger_timer is not None
        if not self._is_busy and not answered:  # an answer must not be broken, nor be followed by another
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        if linger and self.transport.can_write_eof():
            self.transport.write_eof()
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _attempt(self) -> Attempt:
        """What is known of the request that is being read; the parser knows the method of one with a target."""
        client = self.client[0] if self.client else "-"
        return Attempt(client, self.parser.get_method(), self.url) if self.url else Attempt(client)

    def _arm(self) -> None:
        self._disarm()
        self._header_timer = self.loop.call_later(HEADER_TIME_LIMIT_S, self._header_time_is_up)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_time_is_up(self) -> None:
        limit = HEADER_TIME_LIMIT_S
        message = f"The request's headers did not arrive within {limit:.0f} seconds."
        self._refuse(StatusError(408, message, code="request_timeout"))


def _unframed(app: Any, cycle: RequestResponseCycle) -> Any:
    """Answer without chunks, which HTTP/1.0 does not know (RFC 9112, 6.1): the end is that of the connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer


def behind(gate: Gate, refusals: Refusals) -> type[BoundedProtocol]:
    """The protocol class for a server whose connections pass this gate."""
    return type("GatedProtocol", (BoundedProtocol,), {"gate": gate, "refusals": refusals, "num_refused": 0})
