"""T16: what a proxy in front could read otherwise: other protocols, fields behind a body, answers without a length.

Each law holds wherever the network cuts the bytes.
"""

import asyncio
import json
import re
from itertools import pairwise

import pytest
from http_support import SayingEngine, text_body
from test_leaving import live

HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
"""A request that lies in a body."""
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


async def ask(port: int, pieces: list[bytes]) -> bytes:
    """Send pieces, each after the server had its turn; give all that comes back until the connection ends or rests."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.transport.set_write_buffer_limits(0)
    received = b""
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        for _ in range(20):
            await asyncio.sleep(0)
    try:
        async with asyncio.timeout(0.3):
            while data := await reader.read(65536):
                received += data
    except TimeoutError:
        pass
    finally:
        writer.close()
    return received


def cut(data: bytes, *places: int) -> list[bytes]:
    borders = [0, *places, len(data)]
    return [data[start:end] for start, end in pairwise(borders)]


def upgrading(name: bytes, body: bytes = HIDDEN) -> tuple[bytes, int]:
    """A request that offers another protocol under this spelling, and where the spelling begins."""
    head = b"POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\nconnection: Upgrade\r\n" % len(body)
    return head + name + b": h2c\r\n\r\n" + body, len(head)


@pytest.mark.parametrize("name", [b"upgrade", b"Upgrade", b"UPGRADE", b"uPGRADE"])
async def test_a_body_belongs_to_its_request_whatever_protocol_is_offered(name: bytes) -> None:
    """It was read as the next request: behind a proxy that shares connections, an answer for somebody else."""
    data, at = upgrading(name)
    end = data.index(b"\r\n\r\n") + 4
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    ways = [cut(data), cut(data, end), cut(data, at), cut(data, at + 3), cut(data, at + 3, end), cut(data, at, end)]
    async with live(SayingEngine()) as (port, _):
        for pieces in ways:
            statuses = STATUS.findall(await ask(port, pieces))
            assert statuses == [b"400"], pieces
        for pieces in (cut(get + data), cut(get + data, len(get) + end)):
            statuses = STATUS.findall(await ask(port, pieces))
            assert statuses in ([b"200", b"400"], [b"200"]), pieces


async def test_who_offers_another_protocol_is_answered_as_http_or_told_that_it_is_not_served() -> None:
    data, at = upgrading(b"Upgrade", json.dumps({"tokens": [1, 2]}).encode())
    async with live(SayingEngine()) as (port, _):
        assert STATUS.findall(await ask(port, cut(data))) == [b"200"]
        refused = await ask(port, cut(data, at + 3))
        assert STATUS.findall(refused) == [b"400"]
        assert b"without its `Upgrade` field" in refused


TRAILED = [  # (fields in the head, field behind the body, status)
    (b"host: localhost\r\ncontent-type: application/json\r\n", b"authorization: Bearer right\r\n", b"401"),
    (b"host: localhost\r\nauthorization: Bearer right\r\n", b"content-type: application/json\r\n", b"415"),
    (b"authorization: Bearer right\r\ncontent-type: application/json\r\n", b"host: localhost\r\n", b"403"),
]


@pytest.mark.parametrize(("head", "trailer", "status"), TRAILED)
async def test_what_stands_behind_a_body_is_no_header(head: bytes, trailer: bytes, status: bytes) -> None:
    """It was one if it came with the rest: no proxy strips a key there, or looks for a host."""
    body = json.dumps(text_body()).encode()
    start = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n" + head + b"\r\n"
    data = start + b"%x\r\n%b\r\n0\r\n" % (len(body), body) + trailer + b"\r\n"
    async with live(SayingEngine(), api_key=["right"], allowed_hosts=["localhost"]) as (port, _):
        for place in (None, len(start), len(data) - len(trailer) - 2):
            received = await ask(port, cut(data) if place is None else cut(data, place))
            assert STATUS.findall(received)[:1] == [status], (place, received[:300])


async def test_fields_behind_a_body_are_bounded_as_headers_are() -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    async with live(SayingEngine()) as (port, context):
        await ask(port, [start + b"a: b\r\n" * 200 + b"\r\n"])
        assert 'reason="headers_too_large"' in context.metrics.render().decode()


@pytest.mark.parametrize("kind", ["stream", "plain"])
async def test_an_answer_to_http_1_0_has_no_chunks(kind: str) -> None:
    """That version does not know them: a stream ends with the connection, everything else tells its length."""
    body = json.dumps(text_body(stream=kind == "stream")).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"connection: keep-alive\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with live(SayingEngine("Hello world")) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        received = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    top, _, content = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top.lower()
    assert b"connection: close" in top.lower()
    if kind == "plain":
        assert f"content-length: {len(content)}".encode() in top.lower()
        assert json.loads(content)["choices"]
    else:
        assert content.startswith(b"data: {")
        assert content.endswith(b"data: [DONE]\n\n")
        assert all(json.loads(line[6:]) for line in content.split(b"\n\n")[:-2])
