"""The outermost layer: what is checked for every request before any route sees it, and what every answer gets.

In this order: size of the request line and headers, Host, browser preflight, key, drain. It also gives each request an
id (the client's own, or one of ours), which its answer and its lines in the log carry, turns every exception that
nobody caught into a 500 that says nothing of us, and closes books that were left open. A refusal that has no books gets
its line in the log here. Installed by `app`; plain ASGI, since a token passes through here. Knows no routes' meaning.
"""

import re
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sayfa.base.access import is_loopback
from sayfa.base.faults import fault
from sayfa.server.auth import Guard
from sayfa.server.books import Record
from sayfa.server.context import ServerContext
from sayfa.server.errors import StatusError, error_response, log_bug
from sayfa.server.refusals import Attempt

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10
MAX_LINE_BYTES = 8 << 10
MAX_ECHOED_ID = 64
_NOT_IN_ID = re.compile(rb"[^A-Za-z0-9._:-]")
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def allowed_hosts(listed: Sequence[str], bind_host: str) -> frozenset[str] | None:
    """Host names that are accepted; None for any. On a loopback address only its own, which stops DNS rebinding."""
    if "*" in listed:
        return None
    if listed:
        return frozenset(host.lower() for host in listed)
    return frozenset((*_LOOPBACK_HOSTS, bind_host)) if is_loopback(bind_host) else None


class Edge:
    """ASGI middleware around the whole application.

    hosts: accepted Host names, None for any. origins: web origins that may call from a browser.
    """

    def __init__(
        self, app: ASGIApp, context: ServerContext, guard: Guard, hosts: frozenset[str] | None, origins: Sequence[str]
    ) -> None:
        self._app = app
        self._context = context
        self._guard = guard
        self._hosts = hosts
        self._origins = {origin.encode() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets here
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, value)
        request_id = _given_id(headers) or self._context.new_hex()
        scope["sayfa.request_id"] = request_id
        added = self._added_headers(headers, request_id)
        started = asked_for_body = False

        async def receive_noted() -> Message:
            nonlocal asked_for_body
            asked_for_body = True
            return await receive()

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *added]
                unasked = b"expect" in headers and not asked_for_body  # nobody knows whether the body will come
                if self._context.draining or unasked:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            fault("server.edge")
            self._check(scope, headers)
            if self._is_preflight(scope, headers):
                await _send_empty(send_with_headers, self._preflight_headers())
                return
            scope["sayfa.tenant"] = self._guard.tenant_of(scope)
            if scope["method"] == "POST":
                self._context.check_draining()
            await self._app(scope, receive_noted, send_with_headers)
        except ClientDisconnect:
            return  # it left before its request was complete: nobody is there to be answered
        except Exception as error:
            if started:
                raise
            log_bug(error, request_id)
            if "sayfa.record" not in scope:
                self._context.refusals.note(Attempt.of(scope), error)
            response = error_response(error, request_id)
            await response(scope, receive, send_with_headers)
        finally:
            record = scope.get("sayfa.record")
            if isinstance(record, Record):
                record.close("abort")

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > MAX_LINE_BYTES:
            raise StatusError(414)
        pairs = scope["headers"]
        if len(pairs) > MAX_HEADERS or sum(len(name) + len(value) for name, value in pairs) > MAX_HEADER_BYTES:
            raise StatusError(431)
        if self._hosts is not None:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in self._hosts:
                raise StatusError(
                    403, "This Host name is not served here; see --allowed-hosts.", code="host_not_allowed"
                )

    # --------------------------------------------------------------------------------------------- answers' headers

    def _added_headers(self, headers: dict[bytes, bytes], request_id: str) -> list[tuple[bytes, bytes]]:
        added = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
        origin = headers.get(b"origin")
        if self._origins:
            added.append((b"vary", b"origin"))
            if origin is not None and (origin in self._origins or b"*" in self._origins):
                # Never with credentials: a key is sent by the page itself, not by the browser.
                added.append((b"access-control-allow-origin", origin if origin in self._origins else b"*"))
                added.append((b"access-control-expose-headers", b"x-request-id, retry-after"))
        return added

    def _is_preflight(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        return bool(self._origins and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers)

    def _preflight_headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", b"*, authorization, content-type"),
            (b"access-control-max-age", b"600"),
        ]


def _given_id(headers: dict[bytes, bytes]) -> str:
    """The id that the client gave its request, without what could harm a log or a header; "" if there is none."""
    given = headers.get(b"x-request-id", b"")[: 4 * MAX_ECHOED_ID]
    return _NOT_IN_ID.sub(b"", given)[:MAX_ECHOED_ID].decode("ascii")


async def _send_empty(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
