"""The whole: `sayfa serve smollm2` as a process, asked by the official client. B007, B022, B024, B067, R04, R08.

One server for all tests of this file but the last two, which end it.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import psutil
import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.real_model
MODEL = "smollm2"
START_LIMIT_S = 90.0


class Server:
    """A running `sayfa serve`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "sayfa", "serve", MODEL, "--port", "0", "--max-model-len", "1024",
                   "--kv-cache-memory", "256MiB", "--shutdown-timeout", "20"]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = self._find_url()

    def _find_url(self) -> str:
        assert self.process.stderr is not None
        deadline = time.monotonic() + START_LIMIT_S
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                return found[0]
            assert time.monotonic() < deadline, "".join(self.lines)
        raise AssertionError("the server ended: " + "".join(self.lines))

    def metric(self, name: str) -> float:
        """The value of one of our metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            for line in page.read().decode().splitlines():
                if line.startswith(f"sayfa:{name}{{"):
                    return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health/ready") as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def engine(self) -> psutil.Process:
        """The engine's process."""
        return psutil.Process(self.process.pid).children()[0]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.end()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    """The official client; one a test, since each test has an event loop of its own."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def until(condition: Callable[[], bool], limit_s: float) -> None:
    """Ask again until it holds."""
    deadline = time.monotonic() + limit_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def greedy(client: AsyncOpenAI, prompt: str, count: int = 24) -> str:
    """A greedy continuation."""
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=count, temperature=0)
    return answer.choices[0].text


PROMPTS = [f"Item {i}: the capital of country number {i * 7} is" for i in range(12)]


async def test_a_known_answer(client: AsyncOpenAI) -> None:
    """The model says what it is known to say."""
    assert "Paris" in await greedy(client, "The capital of France is")
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be short."}, *ask("Capital of France?")],
        temperature=0,
        max_tokens=30,
    )
    assert "Paris" in (answer.choices[0].message.content or "")


async def test_b024_alone_and_in_company(client: AsyncOpenAI) -> None:
    """B024: greedy texts are the same alone and all at once."""
    alone = [await greedy(client, prompt) for prompt in PROMPTS]
    assert await asyncio.gather(*(greedy(client, prompt) for prompt in PROMPTS)) == alone


async def test_b007_streamed_equals_plain(client: AsyncOpenAI) -> None:
    """B007: text, counts and reason, with an end by length, by the end token and by a stop string."""
    for extra in ({"max_tokens": 17}, {"max_tokens": 200}, {"max_tokens": 60, "stop": ["a"]}):
        wishes: dict[str, Any] = {"model": MODEL, "messages": ask("Say hello."), "temperature": 0, **extra}
        plain = await client.chat.completions.create(**wishes)
        text, usage, reason = "", None, None
        options = {"include_usage": True}
        async for chunk in await client.chat.completions.create(**wishes, stream=True, stream_options=options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        assert text == plain.choices[0].message.content
        assert reason == plain.choices[0].finish_reason
        assert usage is not None
        assert plain.usage is not None
        assert usage.completion_tokens == plain.usage.completion_tokens
        assert usage.prompt_tokens == plain.usage.prompt_tokens


async def test_b022_answers_with_a_seed_differ_and_repeat(client: AsyncOpenAI) -> None:
    """B022: n answers of one seed differ from each other, are the same each time, and the first is that of n = 1."""

    async def texts(n: int) -> list[str]:
        answer = await client.completions.create(
            model=MODEL, prompt="Once upon a time", n=n, seed=7, temperature=1, max_tokens=16
        )
        return [choice.text for choice in answer.choices]

    first = await texts(4)
    assert len(set(first)) == 4
    assert await texts(4) == first
    assert (await texts(1))[0] == first[0]


async def test_scoring_adds_up(client: AsyncOpenAI) -> None:
    """B037: a scored prompt gives the values that generation gave; offsets walk through the text."""
    made = await client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=1, echo=True
    )
    text, values = made.choices[0].text, made.choices[0].logprobs
    assert values is not None
    scored = await client.completions.create(model=MODEL, prompt=text, max_tokens=0, logprobs=1, echo=True)
    again = scored.choices[0].logprobs
    assert again is not None
    assert again.tokens == values.tokens
    assert again.text_offset == values.text_offset
    assert again.token_logprobs is not None
    assert again.token_logprobs[1:] == pytest.approx((values.token_logprobs or [])[1:], abs=0.05)


@pytest.mark.parametrize("streamed", [False, True])
async def test_b067_r04_leaving_frees_pages_and_rows(server: Server, client: AsyncOpenAI, streamed: bool) -> None:
    """B067, R04: after clients leave, nothing runs, and no page is in use but cached ones."""
    reader_tasks = [
        asyncio.create_task(leave_after(server, streamed, 0.15 * i)) for i in range(4)
    ]  # fmt: skip
    await asyncio.gather(*reader_tasks)
    await until(lambda: server.metric("num_requests_running") == 0 and server.metric("requests_in_flight") == 0, 5.0)
    await greedy(client, "One more step", 2)  # figures are told with a step
    assert server.metric("num_requests_waiting") == 0
    assert server.metric("kv_cache_usage_perc") == 0


async def leave_after(server: Server, streamed: bool, delay_s: float) -> None:
    """Ask for a long answer and close the connection."""
    port = int(server.url.rsplit(":", 1)[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"model": MODEL, "messages": ask("Tell a long story."), "max_tokens": 800, "stream": streamed, "n": 2}
    content = json.dumps({**body, "ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    await asyncio.sleep(delay_s)
    writer.transport.abort()


async def test_the_engine_killed_is_told_and_mended(server: Server, client: AsyncOpenAI) -> None:
    """kill -9: a running stream ends with one error, and the server is ready again by itself."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=ask("Tell a long story."), max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )

    async def read() -> None:
        killed = False
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content and not killed:
                killed = True
                server.engine().kill()

    with pytest.raises(openai.APIError):
        await asyncio.wait_for(read(), 10)
    await until(server.is_ready, START_LIMIT_S)
    assert await greedy(client, "The capital of France is", 3)
    assert server.metric("engine_restarts_total") == 1


async def test_r08_sigterm_finishes_what_runs_and_ends_with_0(server: Server, client: AsyncOpenAI) -> None:
    """R08: the running answer is complete, the exit code is 0, nothing is left behind."""
    engine = server.engine()
    running = asyncio.create_task(greedy(client, "Count: one, two, three,", 200))
    await until(lambda: server.metric("num_requests_running") >= 1, 10.0)
    server.process.send_signal(signal.SIGTERM)
    assert len(await running) > 50
    assert await asyncio.to_thread(server.process.wait, 30) == 0
    assert not engine.is_running()
