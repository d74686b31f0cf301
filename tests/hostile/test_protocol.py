"""F10, F13 at their sizes: attacks on the protocol without a socket between, so that many cost little.

The real protocol, application, scheduler and page pool in this process; what comes from a connection is handed to the
protocol piece by piece, what is written is kept. Every client leaves as soon as nothing is being answered.
"""

import asyncio
import random
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from attacker import KEY, WRONG_KEY, judge, statuses
from http_support import MODEL, text_tools, until
from scripted_server import make_client
from test_crowds import WALL_LIMIT_S, Place, books_agree, held
from test_http_bytes import SECRET_TEXT, attack_of, requests
from test_time_to_refuse import CASES

from sayfa.base.config import ServerOptions
from sayfa.server import strict_json
from sayfa.server.app import create_app
from sayfa.server.serve import make_server

QUICK_TURNS = 200
"""Of the event loop: what is not answered by then waits for a thread, and is looked at more rarely."""
HANG_LIMIT_S = 2.0
"""Of CPU time, so that a machine may stand still. A hang lasts for ever here: nobody ticks the limits of silence."""


HELD_LIMIT_S = 0.050
"""How long a refusal may hold up all others, in CPU time."""
PIECE_BYTES = 64 << 10
"""What the kernel hands over at once."""


class Wire(asyncio.Transport):
    """The server's end of a connection that is no socket."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 5), "sockname": ("192.0.2.2", 80)})
        self.received = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        if not self.closed:
            self.received += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


def make_place() -> Place:
    """A server that has everything but a listening socket."""
    client = make_client()
    options = ServerOptions(
        port=0, log_requests=False, api_key=[KEY], cors_origins=["https://a.example"], allowed_hosts=["localhost"]
    )
    app = create_app(client, text_tools(), options, [MODEL], "0")
    server = make_server(app, options)
    server.config.load()
    return Place(0, client, app.state.context, server)


async def visit(place: Place, pieces: list[bytes]) -> bytes:
    """One connection from its beginning to its end; give what it was answered."""
    wire = Wire()
    config = place.server.config
    protocol = config.http_protocol_class(config=config, server_state=place.server.server_state, app_state={})
    protocol.connection_made(wire)
    for piece in pieces:
        if not wire.closed:
            protocol.data_received(piece)
        await asyncio.sleep(0)

    def rests() -> bool:
        return wire.closed or protocol._in_body or protocol._running is None or protocol._running.response_complete

    for _ in range(QUICK_TURNS):
        if rests():
            break
        await asyncio.sleep(0)
    start_s = time.process_time()
    while not rests():
        assert time.process_time() - start_s < HANG_LIMIT_S, f"no answer to {b''.join(pieces)[:600]!r}"
        await asyncio.sleep(0.001)
    protocol.connection_lost(None)
    return bytes(wire.received)


async def storm(seed: int, count: int, at_once: int = 12) -> dict[int, int]:
    """Send `count` attacks; give how often each status came. Afterwards nothing is held."""
    rng, seeds = random.Random(seed), requests()
    seen: dict[int, int] = {}
    todo = iter(range(count))
    place = make_place()

    async def sender() -> None:
        for _ in todo:
            pieces = attack_of(rng, seeds)
            received = await visit(place, pieces)
            judge(received, b"".join(pieces))
            for status in statuses(received):
                seen[status] = seen.get(status, 0) + 1

    await asyncio.gather(*(sender() for _ in range(at_once)))
    await until(lambda: not any(held(place).values()), WALL_LIMIT_S)
    assert books_agree(place.context)
    page = place.context.metrics.render()
    assert not [secret for secret in (KEY, WRONG_KEY, SECRET_TEXT) if secret.encode() in page]
    place.context.pool.shutdown()
    return seen


@pytest.mark.timeout(600)
async def test_f10_damaged_requests_by_the_thousand(caplog: pytest.LogCaptureFixture) -> None:
    """10,000: only known statuses, no leak, no end without an answer, nothing held afterwards, nothing told in logs."""
    caplog.set_level("ERROR", "uvicorn.error")  # thousands of times that a request was invalid
    seen = await storm(1, 10_000)
    assert seen.get(200, 0) >= 300, seen
    assert seen.get(400, 0) >= 5000, seen
    lines = [record.getMessage() for record in caplog.records]
    assert not [line for line in lines if any(secret in line for secret in (KEY, WRONG_KEY, SECRET_TEXT))]
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_f10_damaged_requests_at_length(caplog: pytest.LogCaptureFixture) -> None:
    """100,000."""
    caplog.set_level("ERROR", "uvicorn.error")
    print("answers by status:", await storm(2, 100_000))
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


async def longest_held(place: Place, data: bytes) -> float:
    """Send one request; give the longest CPU time for which nothing else had its turn in the event loop."""
    turns = [time.thread_time()]

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            turns.append(time.thread_time())

    task = asyncio.create_task(others())
    await asyncio.sleep(0)
    received = await visit(place, [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)])
    task.cancel()
    judge(received, data[:2000])
    assert statuses(received)[0] in (400, 401, 413, 414, 415, 431), received[:400]
    return max(after - before for before, after in pairwise(turns))


async def test_f13_no_hostile_request_holds_the_others_up() -> None:
    """What streams feel of a refusal: the event loop is theirs again within the limit, whatever has come."""
    place = make_place()
    for name, case in CASES.items():
        data = case.make()
        held_s = min([await longest_held(place, data) for _ in range(2)])  # the first may pay for what is new
        assert held_s < HELD_LIMIT_S, f"{name} holds the loop for {held_s * 1000:.0f} ms"
    place.context.pool.shutdown()


async def test_f13_long_bodies_are_parsed_in_one_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's speed: the loop's thread reads none, and no second one keeps the memory of the longest."""
    parse, threads = strict_json.parse, []

    def noted(body: bytes) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return parse(body)

    monkeypatch.setattr(strict_json, "parse", noted)
    place = make_place()
    await longest_held(place, CASES["T15 an array of 4 million"].make())
    data = CASES["T15 nested 100,000 deep"].make()
    await asyncio.gather(*(longest_held(place, data) for _ in range(8)))
    assert len(threads) == 9
    assert len(set(threads)) == 1, "several threads read"
    assert threads[0] != threading.get_ident(), "the loop's thread reads"
    place.context.reader.shutdown()
