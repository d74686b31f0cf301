"""Laws over real sockets: a client that leaves frees everything, one that stops reading is given up.

B010, B067, R04, R19, T16, T17.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from http_support import MODEL, SayingEngine, chat_body, ids_of, text_tools, until

from sayfa.base.config import ServerOptions
from sayfa.server import connection, sse
from sayfa.server.app import create_app
from sayfa.server.serve import bind, make_server


@asynccontextmanager
async def live(engine: SayingEngine, **options: Any) -> AsyncIterator[tuple[int, Any]]:
    """The app behind its own server on a free loopback port."""
    settings = ServerOptions(port=0, **options)
    app = create_app(engine, text_tools(), settings, [MODEL], "0")
    sock = bind(settings)
    server = make_server(app, settings)
    task = asyncio.create_task(server.serve([sock]))
    await until(lambda: server.started)
    try:
        yield sock.getsockname()[1], app.state.context
    finally:
        engine.hold.set()
        server.should_exit = True
        await task


def raw_request(body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


def endless() -> SayingEngine:
    """An engine with much to say that waits for the test before each token."""
    engine = SayingEngine(lambda request, branch: ids_of("Hello" * 200))
    engine.hold.clear()
    return engine


def metric(context: Any, name: str) -> float:
    """The sum of a metric's values over its labels."""
    lines = [line for line in context.metrics.render().decode().splitlines() if line.startswith(f"sayfa:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def books_agree(context: Any) -> bool:
    """R19: received = ended + rejected + in flight."""
    ended = metric(context, "request_success_total") + metric(context, "admission_rejections_total")
    return metric(context, "requests_received_total") == ended + metric(context, "requests_in_flight")


LEAVINGS = ["close", "reset", "half-close then close"]


async def leave(writer: asyncio.StreamWriter, how: str) -> None:
    """Three ways in which clients go."""
    if how == "reset":
        writer.transport.abort()
        return
    if how.startswith("half"):
        writer.write_eof()
    writer.close()


@pytest.mark.parametrize("how", LEAVINGS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 4])
async def test_b067_r04_a_client_that_leaves_aborts_its_work(how: str, streamed: bool, n: int) -> None:
    """B067, R04: plain or streamed, before or after the first token: the engine hears one abort, the books agree."""
    engine = endless()
    async with live(engine) as (port, context):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw_request(chat_body(stream=streamed, n=n)))
        await until(lambda: len(engine.requests) == 1)
        await leave(writer, how)
        await until(lambda: engine.aborted == [engine.requests[0].id], 2.0)
        await until(lambda: metric(context, "requests_in_flight") == 0)
        assert books_agree(context)
        assert not context.streams


@pytest.mark.parametrize("how", LEAVINGS)
async def test_leaving_in_the_middle_of_a_stream(how: str) -> None:
    """B010: five streams closed after their first text; tokens are counted, the outcome is abort, and sums agree."""
    engine = endless()
    async with live(engine) as (port, context):
        for number in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw_request(chat_body(stream=True)))
            await until(lambda wanted=number + 1: len(engine.requests) == wanted)
            engine.hold.set()
            await reader.readuntil(b"Hello")
            engine.hold.clear()
            await leave(writer, how)
            await until(lambda wanted=number + 1: len(engine.aborted) == wanted, 2.0)
        await until(lambda: metric(context, "requests_in_flight") == 0)
        assert metric(context, "generation_tokens_total") == metric(context, "request_generation_tokens_sum")
        assert metric(context, "request_success_total") == 5
        assert 'finished_reason="abort"' in context.metrics.render().decode()
        assert books_agree(context)


@pytest.mark.parametrize("part", ["nothing", "half of the headers", "half of the body"])
async def test_leaving_before_the_request_is_complete(part: str) -> None:
    """R04: nothing stays behind, and nothing reaches the engine."""
    engine = SayingEngine()
    request = raw_request(chat_body())
    size = {"nothing": 0, "half of the headers": 40, "half of the body": len(request) - 20}[part]
    async with live(engine) as (port, context):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request[:size])
        await writer.drain()
        if part == "half of the body":
            await until(lambda: metric(context, "requests_received_total") == 1)
        writer.close()
        await until(lambda: metric(context, "requests_in_flight") == 0)
        assert books_agree(context)
    assert engine.requests == []


async def test_a_request_that_waits_behind_another_does_not_hide_that_the_client_left() -> None:
    """Two requests on one connection, the second one waiting: closing it aborts the first."""
    engine = endless()
    async with live(engine) as (port, context):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw_request(chat_body()) + raw_request(chat_body()))
        await until(lambda: len(engine.requests) == 1)
        writer.close()
        await until(lambda: len(engine.aborted) == 1, 2.0)
        await until(lambda: metric(context, "requests_in_flight") == 0)


async def test_t17_a_reader_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """T17: when a stream cannot be written to for the limit, it is ended and its work aborted; others go on."""
    monkeypatch.setattr(sse, "SLOW_SEND_LIMIT_S", 0.2)
    engine = SayingEngine("Hello world " * 20)
    async with live(engine) as (port, context):
        sockets = []
        body = {"model": MODEL, "prompt": ["x"] * 4, "n": 4, "max_tokens": 200, "ignore_eos": True, "stream": True}
        for _ in range(10):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", port))
            sock.sendall(raw_request({**body, "logprobs": 5}, "/v1/completions"))
            sockets.append(sock)
        await until(lambda: metric(context, "requests_received_total") == 10, 20.0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw_request(chat_body()))
        assert b'"finish_reason":"stop"' in await reader.readuntil(b'"stop"')
        writer.close()
        await until(lambda: metric(context, "requests_in_flight") == 0, 40.0)
        assert books_agree(context)
        page = context.metrics.render().decode()
        aborted = next(line for line in page.splitlines() if line.startswith("sayfa:") and '"abort"' in line)
        assert float(aborted.rsplit(" ", 1)[1]) >= 10
        for sock in sockets:
            sock.close()


async def test_t16_slow_or_broken_headers_are_refused_in_the_common_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """T16: headers that never end are 408, what is no HTTP is 400, too many connections are 503: JSON each time."""
    monkeypatch.setattr(connection, "HEADER_TIME_LIMIT_S", 0.2)
    engine = SayingEngine()
    async with live(engine, max_connections=2) as (port, _):
        cases = {
            b"GET /health HTTP/1.1\r\nhost: localhost\r\n": 408,
            b"\x16\x03\x01 hello\r\n\r\n": 400,
            b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: " + b"y" * 40_000 + b"\r\n\r\n": 431,
            b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n": 414,
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n": 400,
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n"
            b"\r\n": 400,
        }
        for sent, status in cases.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status), (sent[:40], head)
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            writer.close()
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        for _, other in (*held, (reader, writer)):
            other.close()


async def test_a_body_that_names_no_length_is_counted_while_it_arrives() -> None:
    """A chunked body over the limit is 413 before its end."""
    async with live(SayingEngine(), max_body_bytes=2048) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                     b"transfer-encoding: chunked\r\n\r\n")  # fmt: skip
        for _ in range(4):
            writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_a_quiet_stream_is_kept_alive_if_asked() -> None:
    """--sse-keep-alive-interval: a comment line while nothing is said; clients skip comments."""
    engine = endless()
    async with live(engine, sse_keep_alive_interval=0.5) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw_request(chat_body(stream=True)))
        assert b": keep-alive\n\n" in await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 5)
        writer.close()


async def test_a_request_for_another_protocol_is_answered_as_http() -> None:
    """Some clients offer `Upgrade: h2c` with each request; body and answer are not lost."""
    async with live(SayingEngine()) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        upgrade = b"\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAA\r\n\r\n"
        writer.write(raw_request(chat_body()).replace(b"\r\n\r\n", upgrade, 1))
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
        writer.close()


@pytest.mark.parametrize("when", ["before the first token", "after it"])
async def test_leaving_is_no_error_of_ours(when: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client that goes leaves no traceback in the log: it is a usual thing."""
    engine = endless()
    async with live(engine) as (port, context):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw_request(chat_body(stream=True)))
        await until(lambda: len(engine.requests) == 1)
        if when == "after it":
            engine.hold.set()
            await reader.readuntil(b"Hello")
        writer.close()
        await until(lambda: metric(context, "requests_in_flight") == 0)
        await until(lambda: not context.streams)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
