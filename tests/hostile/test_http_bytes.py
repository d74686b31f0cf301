"""F10, F30, T16, T20: no bytes on a connection make the server fail, hang, die, or tell about itself.

A real server process on loopback; requests of each route, damaged from a seed, cut, glued and pipelined. What it wrote
to its log is searched for secrets and for errors of ours at the end.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacker import HANG_LIMIT_S, KEY, WRONG_KEY, Server, cpu_s, exchange, judge, request, scripted_server, statuses
from damage import damaged

SECRET_TEXT = "canary-prompt-7d1f9be3"
WORDS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b"\xff\xfe",
    b": ",
    b"transfer-encoding: chunked\r\n",
    b"content-length: 5\r\n",
    b"content-length: 99999999999999999999\r\n",
    b"content-length: -1\r\n",
    b"host: evil.example\r\n",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/9.9",
    b"expect: 100-continue\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\n",
    b"connection: keep-alive\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"\r\n folded: x\r\n",
    b"GET ",
    b"CONNECT a:1 ",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"//",
    b"/%2e%2e/",
    b"*",
    b"http://evil.example/",
    b"?a=b#c",
    b"a" * 9000,
    b"x: y\r\n" * 120,
    b"content-encoding: gzip\r\n",
    b"content-type: text/plain\r\n",
    b"x-request-id: \x01\x02\r\n",
    b"null",
    b"1e999",
    b"[" * 100,
    b'"n":999999999,',
    f"authorization: Bearer {WRONG_KEY}\r\n".encode(),
]


def requests() -> list[bytes]:
    """One well-made request of each kind, with secrets in the places where users have them."""
    message = [{"role": "user", "content": f"say {SECRET_TEXT}"}]
    chat = {"model": "tiny", "messages": message, "max_tokens": 4}
    text = {"model": "tiny", "prompt": f"{SECRET_TEXT} and more", "max_tokens": 3, "logprobs": 1}
    return [
        request("GET", "/health"), request("GET", "/v1/models"), request("GET", "/metrics"), request("GET", "/nothing"),
        request("OPTIONS", "/v1/chat/completions", origin="https://a.example", access_control_request_method="POST"),
        request("POST", "/v1/chat/completions", chat), request("POST", "/v1/chat/completions", chat | {"stream": True}),
        request("POST", "/v1/completions", text), request("POST", "/v1/completions", text, chunked="yes"),
        request("POST", "/v1/completions", text | {"stream": True, "n": 2}),
        request("POST", "/tokenize", {"prompt": SECRET_TEXT}), request("POST", "/detokenize", {"tokens": [1, 2, 3]}),
        request("POST", "/v1/chat/completions", chat, key=WRONG_KEY), request("HEAD", "/health"),
        request("GET", "/health", close=False),
    ]  # fmt: skip


def attack_of(rng: random.Random, seeds: list[bytes]) -> list[bytes]:
    """One connection's bytes: a damaged request, sometimes two behind each other, in one to six pieces."""
    whole = damaged(rng, seeds, WORDS)
    if rng.random() < 0.2:
        whole += rng.choice(seeds)
    cuts = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.choice((0, 0, 1, 5))))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


async def storm(server: Server, seed: int, count: int, at_once: int = 12) -> dict[int, int]:
    """Send `count` attacks; give how often each status came."""
    rng, seeds = random.Random(seed), requests()
    seen: dict[int, int] = {}
    todo = iter(range(count))

    async def sender() -> None:
        for _ in todo:
            pieces = attack_of(rng, seeds)
            received = await exchange(server.port, pieces)
            judge(received, b"".join(pieces))
            for status in statuses(received):
                seen[status] = seen.get(status, 0) + 1

    await asyncio.gather(*(sender() for _ in range(at_once)))
    return seen


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("attacked")
    with scripted_server(
        folder, log_format="json", log_stats_interval=0.5, cors_origins=["https://a.example"]
    ) as running:
        yield running
    check_log(running.log)


def check_log(log: Path) -> None:
    """F30, T28: each line is one JSON object; none holds a key or a prompt, none tells of an error of ours."""
    lines = log.read_text().splitlines()
    for line in lines:
        data = json.loads(line)
        assert data["level"] in ("info", "warning"), line
    text = log.read_text()
    for secret in (KEY, WRONG_KEY, SECRET_TEXT):
        assert secret not in text, next(line for line in lines if secret in line)


async def alive(server: Server) -> None:
    """The server still answers a right request rightly, and its books and its metrics page are in order."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    received = await exchange(server.port, [request("POST", "/v1/chat/completions", body)], patience_s=HANG_LIMIT_S)
    assert statuses(received) == [200]
    page = await exchange(server.port, [request("GET", "/metrics")], patience_s=HANG_LIMIT_S)
    for secret in (KEY, WRONG_KEY, SECRET_TEXT):
        assert secret.encode() not in page

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^sayfa:{name}{{.*?}} (\S+)$", page.decode(), re.MULTILINE))

    assert total("requests_in_flight") == 0
    assert total("requests_received_total") == total("request_success_total") + total("admission_rejections_total")


@pytest.mark.parametrize("seed", range(4))
async def test_f10_damaged_connections(server: Server, seed: int) -> None:
    """1,000 damaged connections a seed: only known statuses, no leak, no hang, and alive afterwards."""
    seen = await storm(server, seed, 1000)
    assert seen.get(200, 0) >= 10, seen
    assert seen.get(400, 0) >= 100, seen
    await alive(server)
    assert len(server.log.read_text().splitlines()) > 20, "the log was not written"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10, 20))
async def test_f10_damaged_connections_at_length(server: Server, seed: int) -> None:
    await storm(server, seed, 10_000)
    await alive(server)


BODY = b'{"prompt": "a"}'
HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer " + KEY.encode()
HEAD += b"\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
STRICT: dict[str, bytes] = {
    "two lengths that differ": HEAD + b"content-length: 15\r\ncontent-length: 16\r\n\r\n" + BODY,
    "two lengths that agree": HEAD + b"content-length: 15\r\ncontent-length: 15\r\n\r\n" + BODY,
    "a list of lengths": HEAD + b"content-length: 15, 15\r\n\r\n" + BODY,
    "length and chunks": HEAD + b"content-length: 15\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 15\r\n\r\n0\r\n\r\n",
    "an unknown coding": HEAD + b"transfer-encoding: xchunked\r\n\r\n" + BODY,
    "chunked is not last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "gzip before chunked": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n",
    "length with a plus": HEAD + b"content-length: +15\r\n\r\n" + BODY,
    "length in hex": HEAD + b"content-length: 0xf\r\n\r\n" + BODY,
    "length below zero": HEAD + b"content-length: -15\r\n\r\n" + BODY,
    "length of 2^64": HEAD + b"content-length: 18446744073709551616\r\n\r\n" + BODY,
    "space before the colon": HEAD + b"content-length : 15\r\n\r\n" + BODY,
    "a folded header": HEAD + b"x: a\r\n b\r\ncontent-length: 15\r\n\r\n" + BODY,
    "a header without a name": HEAD + b": a\r\ncontent-length: 15\r\n\r\n" + BODY,
    "a NUL in a header": HEAD + b"x: a\x00b\r\ncontent-length: 15\r\n\r\n" + BODY,
    "a bare CR in a header": HEAD + b"x: a\rb\r\ncontent-length: 15\r\n\r\n" + BODY,
    "chunk size in 0x": CHUNKED + b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size below zero": CHUNKED + b"-f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size that wraps": CHUNKED + b"1000000000000000f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk longer than its size": CHUNKED + b"3\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "version 9": b"GET /health HTTP/9.9\r\nhost: localhost\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no method": b"/health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a NUL in the path": b"GET /hea\x00lth HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "TLS to a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "HTTP/2 at once": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
}
"""What two parsers may read differently: a proxy and this server must never disagree where a request ends (T16)."""


@pytest.mark.parametrize("name", STRICT)
async def test_t16_what_could_be_read_in_two_ways_is_refused(server: Server, name: str) -> None:
    """One answer, a 400 (or closed at once), and nothing behind it is taken for another request."""
    hidden = request("GET", "/v1/models")
    received = await exchange(server.port, [STRICT[name], hidden], patience_s=0.5)
    judge(received, STRICT[name])
    assert statuses(received) in ([400], []), received[:300]


ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "one header": (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ", b"y" * 65536),
    "one header's name": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"y" * 65536),
    "many headers": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"x: y\r\n" * 10_000),
    "the address": (b"GET /", b"a" * 65536),
    "the method": (b"", b"G" * 65536),
    "blank lines": (b"", b"\r\n" * 32768),
    "a chunk's extension": (CHUNKED + b"f;", b"a" * 65536),
    "trailers": (CHUNKED + b"0\r\n", b"x: y\r\n" * 10_000),
    "one trailer": (CHUNKED + b"0\r\nx: ", b"y" * 65536),
    "chunks of one byte": (CHUNKED, b"1\r\n \r\n" * 10_000),
    "a body without a length": (CHUNKED, b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "a body that nobody may send": (CHUNKED.replace(b"Bearer ", b"Bearer x"), b"10000\r\n" + b" " * 65536 + b"\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_t16_what_never_ends_is_cut_off_before_it_costs_anything(server: Server, name: str) -> None:
    """Up to 256 MiB of one thing: the server hangs up, and pays little CPU and no memory for it."""
    start, piece = ENDLESS[name]
    before_bytes, before_s = server.anon_bytes, cpu_s(server)

    def judge_cost() -> None:
        assert cpu_s(server) - before_s < 1.0
        assert server.anon_bytes - before_bytes < 16 << 20

    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(start)
    try:
        async with asyncio.timeout(HANG_LIMIT_S):
            for _ in range(4096):
                writer.write(piece)
                await writer.drain()
                judge_cost()  # at once: what grows with all that came would take minutes to its end
            raise AssertionError("the server took all of it")
    except ConnectionError:
        pass
    finally:
        writer.close()
    judge_cost()


HOSTS: dict[str, bytes] = {
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
    "two hosts, ours last": b"GET /health HTTP/1.1\r\nhost: evil.example\r\nhost: localhost\r\n\r\n",
    "the whole address of another host": b"GET http://evil.example/health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a tunnel": b"CONNECT evil.example:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", HOSTS)
async def test_t18_a_request_has_one_host_and_it_is_ours(server: Server, name: str) -> None:
    received = await exchange(server.port, [HOSTS[name]], patience_s=0.5)
    judge(received, HOSTS[name])
    assert statuses(received)[:1] in ([400], [403], [404]), received[:300]
