"""T16: how many connections there may be, from whom, and how long each part of one may take.

Live ones come from addresses of 127.0.0.0/8, which counts as one trusted machine unless a test takes that away.
"""

import asyncio
import itertools
import json
import os
import random
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from http_support import SayingEngine, chat_body, until
from test_leaving import live, metric, raw_request

from sayfa.base.config import ServerOptions
from sayfa.base.errors import ConfigError
from sayfa.server import body, connection, gate, serve
from sayfa.server.gate import Gate

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def make_gate(most: int = 100, of_one: int = 3, trusted: tuple[str, ...] = ()) -> tuple[Gate, list[str]]:
    refused: list[str] = []
    return Gate(most, of_one, trusted, refused.append), refused


async def connect(port: int, address: str = "127.0.0.1") -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    _writers.append(writer)
    return reader, writer


_writers: list[asyncio.StreamWriter] = []


@pytest.fixture(autouse=True)
async def _all_are_closed() -> AsyncIterator[None]:
    yield
    for writer in _writers:
        writer.transport.abort()
    _writers.clear()
    await asyncio.sleep(0)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Ask for health on an open connection and leave it open."""
    writer.write(HEALTH)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    await reader.readexactly(length)
    return int(head.split(b" ", 2)[1])


@asynccontextmanager
async def public(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[tuple[int, Any]]:
    """A live server that trusts not even its own machine."""
    monkeypatch.setattr(gate, "LOOPBACK", ())
    async with live(SayingEngine(), **options) as (port, context):
        yield port, context


# ------------------------------------------------------------------------------------------------- the gate alone


@pytest.mark.parametrize("seed", range(20))
def test_t16_random_comings_and_goings_are_counted_by_address(seed: int) -> None:
    """One more enters exactly if fewer than the limits are there; the counts of an empty server are empty."""
    rnd = random.Random(seed)
    door, _ = make_gate(most=12, of_one=3, trusted=("10.0.0.0/8",))
    addresses = [
        "192.0.2.1",
        "192.0.2.2",
        "2001:db8::1",
        "2001:db8::2",
        "2001:db8:0:1::1",
        "10.1.2.3",
        "127.0.0.9",
        None,
    ]
    names = {"2001:db8::2": "2001:db8::1", "10.1.2.3": None, "127.0.0.9": None}
    here: list[str | None] = []
    for _ in range(300):
        if here and rnd.random() < 0.45:
            address = here.pop(rnd.randrange(len(here)))
            door.leave(door.key(address))
        else:
            address = rnd.choice([*addresses, None])
            counts = Counter(names.get(other or "", other) for other in here)
            name = names.get(address or "", address)
            full = len(here) >= 12
            crowded = name is not None and counts[name] >= 3
            error = door.why_not(door.key(address))
            assert (error.status if error else None) == (503 if full else 429 if crowded else None)
            if error is None:
                door.enter(door.key(address))
                here.append(address)
        door.check()
    for address in here:
        door.leave(door.key(address))
    assert (door.num_open, door._open_of) == (0, {})


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::ffff:127.0.0.1", None),
        ("2001:db8::abcd", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("127.9.9.9", None),
        ("::1", None),
        ("", None),
        ("/tmp/socket", None),
    ],
)
def test_t16_what_an_address_counts_under(address: str, key: str | None) -> None:
    """IPv4 written as IPv6 is the same one; a whole /64 is one machine; loopback is not counted."""
    assert make_gate()[0].key(address) == key


def test_a_proxy_that_is_no_address_stops_the_start() -> None:
    """The sentence names the flag and what was given."""
    with pytest.raises(ConfigError, match=r"--trusted-proxies proxy\.local"):
        serve.bind(ServerOptions(port=0, trusted_proxies=["proxy.local"]))
    with pytest.raises(ConfigError, match=r"--trusted-proxies 10\.0\.0\.1/8"):
        make_gate(trusted=("10.0.0.1/8",))


@pytest.mark.parametrize(
    ("limits", "most", "raised"),
    [
        ((1024, 4096), 100, None), ((1024, 1 << 20), 4096, 4160), ((256, 1024), 4096, 1024), ((-1, -1), 4096, None),
        ((256, -1), 4096, 4160),
    ],
)  # fmt: skip
def test_no_more_connections_are_taken_than_there_are_descriptors(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], most: int, raised: int | None
) -> None:
    """The soft limit is raised as far as needed and allowed; what is still missing is told."""
    calls: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: calls.append(pair[0]))
    assert gate.within_descriptors(most) == min(most, (raised or most + 64) - 64)
    assert calls == ([raised] if raised else [])


def test_where_no_more_descriptors_are_to_be_had_fewer_connections_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit stays as it is; the server says how many it takes, and takes one at least."""
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: pytest.fail("there is nothing to raise"))
    for limit, taken in ((1024, 960), (64, 1), (10, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert gate.within_descriptors(4096) == taken
        assert f"may open {limit} descriptors: {taken} connections" in caplog.text


def test_the_gate_s_check_sees_counts_that_contradict_each_other() -> None:
    for damage in ({"192.0.2.1": 3}, {"192.0.2.1": 0}, {"192.0.2.1": 1, "192.0.2.2": -1}):
        door, _ = make_gate(most=12, of_one=3)
        for key in ("192.0.2.1", None):
            door.enter(key)
        door.check()
        door._open_of = damage
        with pytest.raises(RuntimeError, match="2 connections are open"):
            door.check()


# ------------------------------------------------------------------------------------------------- live connections


async def test_t16_one_address_cannot_take_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth of one address is 429 with Retry-After and closed; others get in; one that leaves makes room."""
    async with public(monkeypatch, max_connections_per_address=3) as (port, context):
        held = [await connect(port, "127.0.0.2") for _ in range(3)]
        for pair in held:
            assert await ask(*pair) == 200
        head, _, text = (await _ask_at_once(port, "127.0.0.2")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: " in head
        assert b"\r\nconnection: close" in head
        assert json.loads(text)["error"]["code"] == "too_many_connections_of_address"
        assert await ask(*await connect(port, "127.0.0.3")) == 200
        assert 'reason="too_many_connections_of_address"' in context.metrics.render().decode()
        assert metric(context, "connections_refused_total") == 1
        assert metric(context, "requests_received_total") == 0
        held[0][1].close()
        await until_served(lambda: connect(port, "127.0.0.2"))


async def _ask_at_once(port: int, address: str) -> bytes:
    """Send a request before the server has seen the connection; an answer must not be lost for that."""
    sock = socket.create_connection(("127.0.0.1", port), 5, (address, 0))
    sock.sendall(raw_request(chat_body()))
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock)
    _writers.append(writer)
    return await asyncio.wait_for(reader.read(), 5)


async def until_served(come: Callable[[], Any]) -> None:
    """Come again until one is let in: the server hears of an end a moment later."""
    async with asyncio.timeout(5):
        while True:
            reader, writer = await come()
            if await ask(reader, writer) == 200:
                return


async def test_t16_trusted_addresses_count_in_all_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may bring as many as there are; the limit in all holds for it, too: 503."""
    options = {"max_connections_per_address": 1, "max_connections": 5, "trusted_proxies": ["127.0.0.7"]}
    async with public(monkeypatch, **options) as (port, context):
        held = [await connect(port, "127.0.0.7") for _ in range(5)]
        for pair in held:
            assert await ask(*pair) == 200
        reader, _ = await connect(port, "127.0.0.7")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 503 ")
        assert 'reason="too_many_connections"' in context.metrics.render().decode()


async def test_t16_a_crowd_beyond_the_limit_is_told_so_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 come where 10 may: each reads its refusal or an end; few are kept until they leave; who is in is served."""
    monkeypatch.setattr(connection, "LINGER_S", 60.0)
    async with public(monkeypatch, max_connections=10) as (port, context):
        held = [await connect(port) for _ in range(10)]
        for pair in held:
            assert await ask(*pair) == 200
        before = len(os.listdir("/proc/self/fd"))
        crowd = await asyncio.gather(*(connect(port) for _ in range(300)))
        answers = await asyncio.wait_for(asyncio.gather(*(_rest(reader) for reader, _ in crowd)), 10)
        assert all(not answer or answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
        assert sum(bool(answer) for answer in answers) >= connection.MAX_REFUSED
        assert len(os.listdir("/proc/self/fd")) <= before + 300 + connection.MAX_REFUSED
        for pair in held:
            assert await ask(*pair) == 200
        assert metric(context, "connections_refused_total") == 300
        for _, writer in [*held, *crowd]:
            writer.close()
        await until_served(lambda: connect(port))


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_t16_a_connection_without_a_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle after an answer: the keep-alive time; an empty line, which begins no request, has the headers' time."""
    monkeypatch.setattr(serve, "KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(connection, "HEADER_TIME_LIMIT_S", 0.4)
    async with live(SayingEngine()) as (port, context):
        reader, writer = await connect(port)
        assert await ask(reader, writer) == 200
        assert await asyncio.wait_for(reader.read(), 5) == b""
        reader, writer = await connect(port)
        assert await ask(reader, writer) == 200
        writer.write(b"\r\n")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 408 ")
        assert metric(context, "connections_refused_total") == 1


def test_t16_the_times_are_those_of_the_threat_model() -> None:
    """Headers 10 s, bodies 30 s with a least rate, keep-alive 75 s."""
    assert (connection.HEADER_TIME_LIMIT_S, body.BODY_TIME_LIMIT_S, serve.KEEP_ALIVE_S) == (10, 30, 75)
    assert (body.BODY_GRACE_S, body.MIN_BODY_BYTES_PER_S) == (10, 1024)


@pytest.mark.parametrize(
    ("bytes_at_once", "limit_s", "status"),
    [(1, 30.0, 408), (2000, 30.0, 200), (2000, 0.2, 408)],
    ids=["drips", "slow but steady", "steady but over the limit"],
)
async def test_t16_a_body_has_a_least_rate_and_a_limit(
    monkeypatch: pytest.MonkeyPatch, bytes_at_once: int, limit_s: float, status: int
) -> None:
    """A tenth of a second, and one second more for each 10,000 bytes: a drip ends soon, a slow line does not."""
    monkeypatch.setattr(body, "BODY_GRACE_S", 0.1)
    monkeypatch.setattr(body, "MIN_BODY_BYTES_PER_S", 10_000)
    monkeypatch.setattr(body, "BODY_TIME_LIMIT_S", limit_s)
    data = raw_request(chat_body(user="x" * 6000)).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    start = data.index(b"\r\n\r\n") + 4
    async with live(SayingEngine()) as (port, context):
        reader, writer = await connect(port)
        writer.write(data[: start + 3000])
        reading = asyncio.ensure_future(reader.read())
        for number, at in enumerate(range(start + 3000, len(data), bytes_at_once)):
            assert number < 60, "a body that drips is waited for"
            await asyncio.wait({reading}, timeout=0.15)
            if reading.done():
                break
            writer.write(data[at : at + bytes_at_once])
        answer = await asyncio.wait_for(reading, 10)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        assert status == 200 or b"request_timeout" in answer
        await until(lambda: metric(context, "requests_in_flight") == 0)


# ------------------------------------------------------------------------------- answers before the body was there


EARLY = [
    (b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer right\r\n", b"404"),
    (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer wrong\r\n", b"401"),
    (b"POST /v1/completions HTTP/1.1\r\nhost: elsewhere.example\r\n", b"403"),
    (b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"200"),
]


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """One answer with its length; the status comes back."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    await asyncio.wait_for(reader.readexactly(length), 5)
    return head.split(b" ", 2)[1]


async def test_a_connection_goes_on_after_an_answer_that_came_before_the_body() -> None:
    """Clients that send head and body apart read 404 or 401 before the body is out; their next request is served."""
    content = b"0123456789abcdefghij"
    framed = {
        b"content-length: 20\r\n\r\n": content,
        b"transfer-encoding: chunked\r\n\r\n": b"14\r\n" + content + b"\r\n0\r\n\r\n",
    }
    async with live(SayingEngine(), api_key=["right"]) as (port, _):
        reader, writer = await connect(port)
        for (head, status), (framing, body), cut in itertools.product(EARLY, framed.items(), (0, 1, 10, 19)):
            writer.write(head + framing + body[:cut])
            assert await answer_of(reader) == status
            writer.write(body[cut:] + HEALTH)
            assert await answer_of(reader) == b"200"


async def test_head_is_answered_as_get_without_the_body() -> None:
    """RFC 9110, 9.1 and 9.3.2: the same status and length, and the connection serves the next request."""
    async with live(SayingEngine()) as (port, _):
        reader, writer = await connect(port)
        for path in (b"/health", b"/v1/models", b"/v1/models/nobody"):
            heads = []
            for method in (b"GET", b"HEAD"):
                writer.write(HEALTH.replace(b"GET /health", method + b" " + path))
                head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).lower()
                heads.append((head.split(b"\r\n")[0], head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
                if method == b"GET":
                    await reader.readexactly(int(heads[0][1]))
            assert heads[0] == heads[1], (path, heads)


async def test_a_connection_with_nothing_after_an_early_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest that never comes has its time; once it came, the keep-alive time runs, as after any answer."""
    monkeypatch.setattr(serve, "KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    async with live(SayingEngine()) as (port, _):
        for rest in (b"", b"x" * 19, b"x" * 20):
            reader, writer = await connect(port)
            writer.write(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20\r\n\r\n")
            assert await answer_of(reader) == b"404"
            writer.write(rest)
            assert await asyncio.wait_for(reader.read(), 5) == b""


@pytest.mark.parametrize("rest", [b"zz\r\n", b"1\r\nx\r\n" * 400, b"f" * 40_000])
async def test_a_bad_rest_of_an_answered_body_gets_no_second_answer(
    monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    """Not HTTP, too many pieces, a chunk's length without an end: a second answer would be taken for the next one's."""
    monkeypatch.setattr(connection, "MAX_PIECES", 100)
    monkeypatch.setattr(connection, "MAX_SILENT_BYTES", 10_000)
    async with live(SayingEngine()) as (port, _):
        reader, writer = await connect(port)
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        assert await answer_of(reader) == b"404"
        writer.write(rest)
        assert await asyncio.wait_for(_rest(reader), 5) == b""


async def test_an_answer_to_a_client_that_waits_to_send_its_body_ends_the_connection() -> None:
    """Expect: 100-continue and a refusal: whether the body follows is the client's choice, so nothing else may."""
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n"
    async with live(SayingEngine()) as (port, _):
        reader, writer = await connect(port)
        writer.write(head % b"/nowhere" + b"content-length: 20\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert b"\r\nconnection: close\r\n" in answer
        reader, writer = await connect(port)
        content = json.dumps(chat_body()).encode()
        writer.write(head % b"/v1/chat/completions" + b"content-length: %d\r\n\r\n" % len(content))
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(content)
        assert await answer_of(reader) == b"200"
