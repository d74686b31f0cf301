"""F13, T10-T16: a hostile request is refused before it costs anything, and costs nobody else anything.

A real server process; its CPU time is the kernel's own count in nanoseconds, so a busy machine does not matter. Small
requests may take 50 ms of CPU, bodies of megabytes what reading them takes (T15).
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from attacker import HANG_LIMIT_S, KEY, Server, cpu_s, exchange, judge, request, scripted_server, statuses

LIMIT_S = 0.050
BIG_LIMIT_S = 0.300
BIG_BYTES = 1 << 20
GROWTH_BYTES = 5 << 20
TIMES = 20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


class Case(NamedTuple):
    """A request and the statuses that refuse it."""

    make: Callable[[], bytes]
    refusals: tuple[int, ...] = (400,)


def chat(**fields: Any) -> Case:
    return Case(lambda: request("POST", CHAT, {"model": "tiny", "messages": MESSAGES, **fields}))


def text(**fields: Any) -> Case:
    return Case(lambda: request("POST", TEXT, {"model": "tiny", "prompt": "Hi", **fields}))


def raw(content: bytes, path: str = CHAT) -> Case:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return Case(lambda: head.encode() + content)


CASES: dict[str, Case] = {
    "T10 n of 5,000,000": chat(n=5_000_000),
    "T10 best_of of 10^9": text(best_of=10**9),
    "T10 top_logprobs of 10^9": chat(logprobs=True, top_logprobs=10**9),
    "T10 logprobs of -1": text(logprobs=-1),
    "T10 prompt_logprobs of 10^6": text(prompt_logprobs=10**6),
    "T10 max_tokens of 2^63": text(max_tokens=2**63),
    "T10 answers that multiply": text(prompt=["a"] * 256, n=16, max_tokens=255, logprobs=5),
    "T10 10,000 prompts": text(prompt=["a"] * 10_000),
    "T10 a million prompts": text(prompt=["a"] * 1_000_000),
    "T10 a million ids": text(prompt=[1] * 1_000_000),
    "T10 10,000 stop strings": chat(stop=["a"] * 10_000),
    "T10 a stop string of 100 KB": chat(stop="a" * 100_000),
    "T10 5,000 biases": chat(logit_bias={str(index): 1 for index in range(5_000)}),
    "T11 temperature NaN": raw(b'{"model": "tiny", "messages": [], "temperature": NaN}'),
    "T11 temperature 1e400": raw(b'{"model": "tiny", "messages": [], "temperature": 1e400}'),
    "T11 a seed of 10^60": text(seed=10**60),
    "T11 an id of 2^63": text(prompt=[2**63]),
    "T11 an id below 0": text(prompt=[-1]),
    "T11 true for a number": text(max_tokens=True),
    "T12 a grammar": text(guided_regex="(a+)+$"),
    "T12 a deep schema": chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
    "T13 tools": chat(tools=[{"type": "function", "function": {"name": "f"}}]),
    "T14 1 MB of a": text(prompt="a" * 1_000_000),
    "T14 9 MB of spaces": text(prompt=" " * 9_000_000),
    "T14 1 MB of combining marks": chat(messages=[{"role": "user", "content": "e\u0301" * 350_000}]),
    "T14 1 MB of refusal": chat(messages=[*MESSAGES, {"role": "assistant", "refusal": "a b " * 250_000}, *MESSAGES]),
    "T14 1 MB of names": chat(messages=[{"role": "user", "content": "x", "name": "a b " * 25_000}] * 10),
    "T14 19,000 messages of a letter": chat(messages=[{"role": "user", "content": "x"}] * 19_000),
    "T14 a million messages' worth of roles": chat(messages=MESSAGES * 9_000),
    "T15 nested 100,000 deep": raw(b"[" * 100_000),
    "T15 nested 10 MB deep": raw(b"[" * 9_999_999),
    "T15 objects 50,000 deep": raw(b'{"a":' * 50_000),
    "T15 100,000 keys": raw(json.dumps({str(index): 0 for index in range(100_000)}).encode()),
    "T15 one key 9,000 times": raw(b"{" + b'"a":1,' * 9_000 + b'"b":1}'),
    "T15 a number of 1 MB": raw(b'{"n":' + b"9" * 1_000_000 + b"}"),
    "T15 9 MB that are no UTF-8": raw(b"\xff" * 9_000_000),
    "T15 half a surrogate": raw(b'{"model": "\\ud800"}'),
    "T15 an open string of 9 MB": raw(b'{"a": "' + b"\\" * 9_000_000),
    "T15 a string of 9 MB of quotes": raw(b'{"a": [' + b"[]," * 70 + b'"' + b'\\"' * 4_500_000),
    "T15 a million strings": raw(b'{"a": [' + b'"",' * 1_000_000 + b"[" * 70),
    "T15 an array of 4 million": raw(b'{"a": [' + b"1," * 4_000_000 + b"1]"),
    "T15 60,000 wrong messages": chat(messages=[None] * 60_000),
    "T15 60,000 wrong parts": chat(messages=[{"role": "user", "content": [None] * 60_000}]),
    "T15 60,000 wrong stop strings": chat(stop=[1] * 60_000),
    "T15 60,000 wrong ids": text(allowed_token_ids=[True] * 60_000),
    "T15 9,990 wrong biases": text(logit_bias={str(index): "x" for index in range(9_990)}),
    "T15 9,990 wrong template options": chat(chat_template_kwargs={str(index): [] for index in range(9_990)}),
    "T16 too large by its length": Case(
        lambda: request("POST", CHAT, None, content_type="application/json", content_length=str(1 << 40)), (413,)
    ),
    "T16 headers of 1 MB": Case(lambda: request("GET", "/health", x="y" * 1_000_000), (431,)),
    "T16 10,000 headers": Case(lambda: request("GET", "/health", **{f"x{i}": "y" for i in range(10_000)}), (431,)),
    "T16 an address of 1 MB": Case(lambda: request("GET", "/" + "a" * 1_000_000), (414,)),
    "T16 gzip": Case(lambda: request("POST", CHAT, {"a": 1}, content_encoding="gzip"), (415,)),
    "T18 a key of 30 KB": Case(lambda: request("GET", "/v1/models", key="k" * 30_000), (401,)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with scripted_server(tmp_path_factory.mktemp("refusing")) as running:
        yield running


async def refuse(server: Server, case: Case) -> float:
    """Send one hostile request, and wait as long as it takes; give the CPU seconds that it cost the server."""
    data = case.make()
    before_s = cpu_s(server)
    received = await exchange(server.port, [data], patience_s=HANG_LIMIT_S, hang_limit_s=2 * HANG_LIMIT_S)
    spent_s = cpu_s(server) - before_s
    judge(received, data[:2000])
    assert statuses(received)[:1] in [[status] for status in case.refusals], (data[:200], received[:400])
    return spent_s


@pytest.mark.parametrize("name", CASES)
async def test_f13_a_hostile_request_is_refused_at_once(server: Server, name: str) -> None:
    """The dearest of 20 (5 for megabytes) is within the limit."""
    is_big = len(CASES[name].make()) > BIG_BYTES
    await refuse(server, CASES[name])
    for _ in range(5 if is_big else TIMES):
        spent_s = await refuse(server, CASES[name])
        assert spent_s < (BIG_LIMIT_S if is_big else LIMIT_S), f"{spent_s * 1000:.0f} ms of CPU"


async def test_f13_hostile_requests_leave_no_memory_behind(server: Server) -> None:
    """Once every kind has come a few times, another three rounds of all kinds add less than 5 MB.

    The least of three rounds counts: the allocator keeps the memory of a long body for the next one, or does not.
    """
    after: list[int] = []
    for _ in range(9):
        for case in CASES.values():
            await refuse(server, case)
        after.append(server.anon_bytes)
    assert min(after[6:]) - min(after[3:6]) < GROWTH_BYTES, after


async def test_f13_streams_go_on_while_hostile_requests_are_refused(server: Server) -> None:
    """16 streams run beside the hostile requests; each comes to its end with the text it has alone."""
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 60, "seed": 5, "ignore_eos": True, "stream": True}

    async def one() -> list[str]:
        return texts(await exchange(server.port, [request("POST", TEXT, body)], HANG_LIMIT_S, 2 * HANG_LIMIT_S))

    alone = await one()
    assert len(alone) == 60
    attack = asyncio.create_task(refuse_all(server))

    async def stream_on() -> int:
        count = 0
        while not attack.done():
            assert await one() == alone
            count += 1
        return count

    counts = await asyncio.gather(*(stream_on() for _ in range(16)))
    await attack
    assert min(counts) > 0


async def refuse_all(server: Server) -> None:
    for case in CASES.values():
        await refuse(server, case)


def texts(received: bytes) -> list[str]:
    """The pieces of text in a streamed completion that came to its end."""
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), received[-300:]
    lines = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    return [piece for line in lines for choice in json.loads(line[6:])["choices"] if (piece := choice["text"])]
