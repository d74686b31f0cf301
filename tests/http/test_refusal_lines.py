"""Who is turned away before any books are open leaves one line in the request log, without a key, and a flood few.

T16, T23, T28.
"""

import asyncio
import json
import logging
import random
from typing import Any

import pytest
from http_support import SayingEngine, serving
from test_leaving import live

from sayfa.base.errors import Unauthorized
from sayfa.base.log import JsonFormatter, TextFormatter
from sayfa.server import connection, refusals
from sayfa.server.errors import StatusError
from sayfa.server.refusals import MAX_LINES, MAX_PATH_CHARS, SPAN_S, Attempt, Refusals
from world.loop import VirtualClock, VirtualLoop

KEY = "right-" + "k" * 26
WRONG_KEY = "wrong-Zq7Xw9Vr3Ty5Ub1Nm"
Log = pytest.LogCaptureFixture


@pytest.fixture
def log(caplog: Log) -> Log:
    caplog.set_level(logging.INFO, "sayfa")
    return caplog


def told(log: Log) -> list[dict[str, Any]]:
    """The lines of the request log, as a collector gets them."""
    return [json.loads(JsonFormatter().format(line)) for line in log.records if line.name == refusals.log.name]


def parts_of(secret: str) -> list[str]:
    return [secret[start : start + 6] for start in range(len(secret) - 5)]


RIGHT = {"authorization": f"Bearer {KEY}"}
AT_THE_EDGE: list[tuple[int, str, dict[str, Any]]] = [
    (401, "/v1/models", {"headers": {"authorization": f"Bearer {WRONG_KEY}"}}),
    (401, f"/v1/models?api_key={WRONG_KEY}", {}),
    (401, "/v1/chat/completions", {"method": "POST", "json": {}, "headers": {"x-api-key": WRONG_KEY}}),
    (403, "/v1/models", {"headers": {**RIGHT, "host": "evil.example"}}),
    (404, "/nothing", {"headers": RIGHT}),
    (405, "/v1/models", {"method": "DELETE", "headers": RIGHT}),
    (414, "/" + "a" * 9000, {"headers": RIGHT}),
    (431, "/v1/models", {"headers": {**RIGHT, "x-big": WRONG_KEY * 2000}}),
    (400, "/tokenize", {"method": "POST", "json": {"model": "tiny"}, "headers": RIGHT}),
]


@pytest.mark.parametrize(("status", "path", "sent"), AT_THE_EDGE)
async def test_each_refusal_at_the_edge_leaves_one_line(log: Log, status: int, path: str, sent: dict[str, Any]) -> None:
    async with serving(api_key=[KEY]) as (client, _):
        response = await client.request(**{"method": "GET", "url": path, **sent})
    assert response.status_code == status
    [line] = told(log)
    shown = path.partition("?")[0]
    shown = shown if len(shown) <= MAX_PATH_CHARS else shown[:MAX_PATH_CHARS] + "…"
    assert line["message"] == f"refused:{response.json()['error']['code']} {status} {shown}"
    held = {"request_id": response.headers["x-request-id"], "client": "127.0.0.1"}
    assert line | held | {"method": sent.get("method", "GET")} == line
    assert TextFormatter().format(log.records[-1]).endswith(f" client=127.0.0.1 request_id={line['request_id']}")
    for secret in (KEY, WRONG_KEY):
        assert not [part for part in parts_of(secret) if part in json.dumps(line)]


async def test_no_line_is_written_where_requests_are_not_logged(log: Log) -> None:
    async with serving(api_key=[KEY], log_requests=False) as (client, _):
        assert (await client.get("/v1/models")).status_code == 401
    assert told(log) == []


async def test_who_is_served_or_asks_for_health_leaves_no_line_of_a_refusal(log: Log) -> None:
    async with serving(api_key=[KEY]) as (client, app):
        app.state.context.draining = True
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/v1/models", headers=RIGHT)).status_code == 200
    assert told(log) == []


LONG = b"x" * 9000
ON_CONNECTIONS = [
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "refused:malformed_http 400 -", "-"),
    (b"GET /v1/%s HTTP/1.1\r\n" % LONG, f"refused:uri_too_long 414 /v1/{'x' * 96}…", "GET"),
    (b"POST /a?k=%s HTTP/1.1\r\nx: %s\r\n\r\n" % (WRONG_KEY.encode(), 5 * LONG), "refused:headers_too_large 431 /a",
     "POST"),
    (b"GET http://me:%s@evil.example/ HTTP/1.1\r\n\r\n" % WRONG_KEY.encode(), "refused:malformed_http 400 -", "GET"),
    (b"GET /a HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", "refused:malformed_http 400 /a", "GET"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message", "method"), ON_CONNECTIONS)
async def test_each_refusal_on_a_connection_leaves_one_line(log: Log, data: bytes, message: str, method: str) -> None:
    """And no warning of the server library beside it."""
    async with live(SayingEngine()) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        await reader.read()
        writer.close()
    [line] = told(log)
    expected = {"message": message, "method": method, "request_id": "-", "client": "127.0.0.1"}
    assert line | expected == line
    assert not [part for part in parts_of(WRONG_KEY) if part in json.dumps(line)]
    assert [record for record in log.records if record.levelno >= logging.WARNING] == []


async def test_of_a_request_that_is_over_nothing_is_told_when_the_next_one_is_refused(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty line begins no request, and yet has to be followed by one in time."""
    monkeypatch.setattr(connection, "HEADER_TIME_LIMIT_S", 0.05)
    async with live(SayingEngine()) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b'"}')
        writer.write(b"\r\n")
        assert b"408" in await reader.read()
        writer.close()
    assert [line["message"] for line in told(log)] == ["refused:request_timeout 408 -"]


async def test_a_connection_too_many_leaves_a_line(log: Log) -> None:
    async with live(SayingEngine(), max_connections=1) as (port, _):
        writers = [(await asyncio.open_connection("127.0.0.1", port)) for _ in range(2)]
        await writers[1][0].read()
        for _, writer in writers:
            writer.close()
    assert [line["message"] for line in told(log)] == ["refused:too_many_connections 503 -"]


@pytest.mark.parametrize("seed", range(5))
def test_a_flood_leaves_few_lines_and_its_number(log: Log, seed: int) -> None:
    """At any rate: lines and counts together are the refusals, and no second has more than the limit allows."""
    rng = random.Random(seed)
    clock = VirtualClock()
    loop = VirtualLoop(clock)
    noted = Refusals(True)
    written_s: list[float] = []
    num_refused = rng.randrange(500, 2000)

    class Stamping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written_s.append(clock.monotonic())

    async def flood() -> None:
        for _ in range(num_refused):
            noted.note(Attempt(), StatusError(rng.choice((414, 431))))
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.001, 0.1, 3.0 if rng.random() < 0.1 else 0.0)))
        await asyncio.sleep(SPAN_S)

    handler = Stamping()
    refusals.log.addHandler(handler)
    try:
        loop.run_until_complete(flood())
    finally:
        refusals.log.removeHandler(handler)
        loop.close()
    counts = [line["left_out"] for line in told(log) if "left_out" in line]
    assert len(written_s) - len(counts) + sum(counts) == num_refused
    assert min(counts) >= 1
    for code in ("uri_too_long", "headers_too_large"):
        assert any(f" {code}: " in line["message"] for line in told(log) if "left_out" in line)
    num_spans = (written_s[-1] - written_s[0]) / SPAN_S + 1
    assert len(written_s) <= (MAX_LINES + 1) * num_spans


@pytest.mark.parametrize("seed", range(20))
def test_no_path_breaks_or_forges_a_line(log: Log, seed: int) -> None:
    rng = random.Random(seed)
    junk = bytes(rng.choice((10, 13, 27, 0, 32, 0x7F, 0x85, 0xE2, rng.randrange(256))) for _ in range(300))
    attempt = Attempt("127.0.0.1", junk, b"/" + junk + b" client=192.0.2.1", "id")
    asyncio.run(_noted(attempt))
    [line] = log.records
    for form in (TextFormatter(), JsonFormatter()):
        text = form.format(line)
        assert text.isprintable()
        assert len(text) < 400
        assert "192.0.2.1" not in text.partition("?")[0]
    *rest, path = line.getMessage().split(" ")
    assert rest == ["refused:invalid_api_key", "401"]
    assert path.startswith("/")


@pytest.mark.parametrize(
    "path", [b"/bearer", b"/x-api-key", b"/api_key/", b"/sk-", b"/a/sk-" + b"a" * 90, b"/Bearer=:"]
)
def test_no_path_makes_the_log_hide_who_it_was(log: Log, path: bytes) -> None:
    """What looks like a key is hidden, and so is what stands behind such words; that must not help the caller."""
    asyncio.run(_noted(Attempt("192.0.2.1", b"GET", path, "id-0123456789")))
    [line] = log.records
    for form in (TextFormatter(), JsonFormatter()):
        text = form.format(line)
        assert [
            word for word in ("refused:invalid_api_key 401 /", "192.0.2.1", "id-0123456789") if word not in text
        ] == []


async def _noted(attempt: Attempt) -> None:
    Refusals(True).note(attempt, Unauthorized("no", code="invalid_api_key"))
