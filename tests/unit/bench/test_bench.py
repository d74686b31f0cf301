"""The bench: its client counts what a server sends, however the bytes are cut; its figures are what their names say."""

import asyncio
import contextlib
import json
import random
import sys

import pytest

from sayfa.base.errors import ConfigError, EngineError
from sayfa.bench.client import CompletionClient, parse_url
from sayfa.bench.launch import LaunchedServer, free_port
from sayfa.bench.load import run_workload
from sayfa.bench.paging import compare_paging, request_mix
from sayfa.bench.report import median_of, percentile, table
from sayfa.bench.workloads import WORKLOADS, Workload, choose

TINY = Workload(name="tiny", requests=7, at_once=3, shared=2, own=3, out=4, about="for tests")


class Stub:
    """A completions server whose events are cut into pieces at random; counts how many requests are there at once."""

    def __init__(self, seed=0, status=200, error_at=None, usage=True, chunked=True, *, cut_at=None):
        self.rng = random.Random(seed)
        self.status, self.error_at, self.usage, self.chunked = status, error_at, usage, chunked
        self.cut_at = cut_at
        self.bodies = []
        self.now = self.most = 0

    def events(self, body):
        for index in range(body["max_tokens"]):
            if index == self.error_at:
                yield {"error": {"message": "broke"}}
                return
            yield {
                "choices": [{"text": "é" * (index % 2), "finish_reason": None}]
            }  # every second token is half a character
        yield {"choices": [{"text": "", "finish_reason": "length"}]}
        if self.usage:
            counts = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}
            yield {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 2}}}

    async def handle(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        self.now += 1
        self.most = max(self.most, self.now)
        if head.startswith("GET /v1/models"):
            data = json.dumps({"data": [{"id": "stub"}]}).encode()
        else:
            self.bodies.append(json.loads(body))
            lines = [f"data: {json.dumps(event)}\n\n" for event in self.events(self.bodies[-1])]
            data = "".join([*lines, ": comment\n\n", "data: [DONE]\n\n"]).encode()[: self.cut_at]
        kind = "Transfer-Encoding: chunked" if self.chunked else "Connection: close"
        writer.write(f"HTTP/1.1 {self.status} X\r\n{kind}\r\n\r\n".encode())
        while data:
            cut = self.rng.randint(1, 40)
            piece, data = data[:cut], data[cut:]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n" if self.chunked and self.cut_at is None else b"")
        self.now -= 1
        writer.close()


@contextlib.asynccontextmanager
async def serving(stub):
    server = await asyncio.start_server(stub.handle, "127.0.0.1", 0)
    async with server:
        yield CompletionClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "key", "stub")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("chunked", [True, False])
async def test_tokens_are_counted_however_the_stream_is_cut(seed, chunked):
    async with serving(Stub(seed, chunked=chunked)) as client:
        answer = await client.complete("p", 9)
        assert await client.first_model() == "stub"
    assert (answer.num_output, answer.num_prompt, answer.num_cached, answer.counted) == (9, 5, 2, "usage")
    assert len(answer.gaps_s) == 8
    assert answer.finish == "length"
    assert 0 < answer.ttft_s <= answer.e2e_s
    assert answer.e2e_s == pytest.approx(answer.ttft_s + sum(answer.gaps_s))


async def test_a_server_without_usage_is_counted_by_its_chunks():
    async with serving(Stub(usage=False)) as client:
        answer = await client.complete("p", 4)
    assert (answer.num_output, answer.counted, answer.num_prompt) == (4, "chunks", None)


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        (Stub(status=503), "HTTP 503"),
        (Stub(error_at=2), "broke"),
        (Stub(error_at=0), "broke"),
        (Stub(cut_at=200), "in the middle"),
    ],
)
async def test_a_failure_is_an_error_and_never_a_figure(stub, words):
    async with serving(stub) as client:
        with pytest.raises(EngineError, match=words):
            await run_workload(client, TINY, runs=1, warm_up=0, seed=1, progress=lambda *_: None)


async def test_a_workload_sends_each_prompt_once_and_no_more_than_its_width_at_a_time():
    stub = Stub()
    async with serving(stub) as client:
        told = []
        result = await run_workload(client, TINY, runs=2, warm_up=1, seed=3, progress=lambda *news: told.append(news))
    prompts = [body["prompt"] for body in stub.bodies]
    assert sorted(prompts[:3]) == sorted(TINY.prompts(3, -1)[:3]), "the warm-up is one wave"
    assert sorted(prompts[3:]) == sorted(TINY.prompts(3, 0) + TINY.prompts(3, 1))
    assert stub.most == TINY.at_once
    assert told[-1] == ("tiny run 2 of 2", 7, 7)
    assert result.median.requests == 7
    assert result.median.tokens_out == 28
    assert "tiny" in table([result])[1]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in stub.bodies)


def test_prompts_are_the_same_for_a_seed_and_new_in_each_run():
    for workload in WORKLOADS.values():
        first = workload.prompts(1, 0)
        assert first == workload.prompts(1, 0)
        assert len(first) == workload.requests
        assert not set(first) & set(workload.prompts(1, 1))
        assert not set(first) & set(workload.prompts(2, 0))
        assert {len(prompt.split()) for prompt in first} == {workload.shared + workload.own}
        starts = {tuple(prompt.split()[: workload.shared]) for prompt in first}
        assert len(starts) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(seed):
    rng = random.Random(seed)
    values = [rng.random() for _ in range(rng.randint(1, 300))]
    for point in (50, 95, 99, 100):
        value = percentile(values, point)
        assert value in values
        assert sum(v <= value for v in values) >= point / 100 * len(values)
        assert sum(v < value for v in values) < point / 100 * len(values)
    assert percentile([], 50) == 0


@pytest.mark.parametrize("text", ["load9", "load8:0", "load8:x", "load8:-1", ""])
def test_a_wrong_workload_is_refused(text):
    with pytest.raises(ConfigError):
        choose([text], 3)


def test_workloads_are_chosen_in_order_with_their_runs():
    assert [(w.name, runs) for w, runs in choose(["prefix:5", "single"], 3)] == [("prefix", 5), ("single", 3)]
    assert len(choose([], 3)) == len(WORKLOADS)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "http://x:y", "http://a..b"])
def test_a_wrong_address_is_refused(url):
    with pytest.raises(ConfigError):
        parse_url(url)


@pytest.mark.parametrize("url", ["http://me:secret@h/v1", "secret@h", "http://h/v1?key=secret", "http://h/v1#secret"])
def test_an_address_with_a_secret_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_addresses():
    assert parse_url("127.0.0.1:81") == ("127.0.0.1", 81, False, "", None)
    assert parse_url("https://h/a/v1/") == ("h", 443, True, "/a", None)
    assert parse_url("http+unix:///x/y").uds == "/x/y"
    assert parse_url("http://[::1]:81/v1").host == "::1"
    assert parse_url("http://[::1]:81/v1").authority == "[::1]:81"
    assert parse_url("http://h/v1").authority == "h:80"


@pytest.mark.parametrize(
    "answer",
    [
        b"transfer-encoding: chunked\r\n\r\nzz\r\n", b"x: " + b"y" * (5 << 20), b"a: b\r\n\r\n" + b"\xff" * 9,
        b"transfer-encoding: chunked\r\n\r\n9\r\n{", b"a: b\r\n\r\n" + b"[" * 100_000,
        b'a: b\r\n\r\ndata: {"error": ' + b"[" * 100_000 + b"\n\n",
    ],
)  # fmt: skip
async def test_an_answer_that_cannot_be_read_is_told_in_words(answer):
    async def talk(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + answer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    client = CompletionClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m")
    async with server:
        for send in (client.first_model(), client.complete("a", 1)):
            with pytest.raises((EngineError, OSError)):
                await send


async def test_a_server_that_cannot_start_is_told_with_its_own_words(tmp_path):
    server = LaunchedServer([sys.executable, "-c", "import sys; sys.exit('no such model')"], tmp_path / "log")
    try:
        with pytest.raises(EngineError, match="no such model"):
            await server.ready(CompletionClient(f"http://127.0.0.1:{free_port()}"), 30)
    finally:
        server.stop()
    with pytest.raises(EngineError, match="cannot be started"):
        LaunchedServer(["/nowhere/server"], tmp_path / "log")


@pytest.mark.parametrize("seed", range(3))
def test_the_same_memory_holds_clearly_more_requests_with_pages(seed):
    """S11: the gain of paging is measured; S28: static batching is there to compare with."""
    paged, contiguous, static = compare_paging(160, 16_384, 2048, seed, lambda *_: None)
    assert paged.held_mean > 2 * contiguous.held_mean
    assert paged.tokens_s > contiguous.tokens_s > static.tokens_s
    assert paged.wasted_share < 0.1 < contiguous.wasted_share
    assert contiguous.held_peak <= 16_384 // 2048
    for result in (paged, contiguous, static):
        assert result.filled_share + result.wasted_share + result.idle_share == pytest.approx(1, abs=0.001)


@pytest.mark.parametrize("count", [10, 40, 160])
def test_pages_do_not_look_slower_where_few_requests_wait(count):
    """The speed is that of the whole run: that of the steps in which somebody waited was mostly that of prompts."""
    mix = request_mix(count, 2048, 1)
    paged, contiguous, static = compare_paging(count, 16_384, 2048, 1, lambda *_: None)
    assert paged.tokens_s >= contiguous.tokens_s >= static.tokens_s
    for result in (paged, contiguous, static):
        assert result.tokens_s == pytest.approx(sum(answer for _, answer in mix) / result.seconds, rel=0.01)


def test_a_mix_fits_its_context_and_repeats_for_a_seed():
    for seed in range(5):
        mix = request_mix(500, 512, seed)
        assert mix == request_mix(500, 512, seed)
        assert all(prompt >= 1 and answer >= 1 and prompt + answer < 512 for prompt, answer in mix)


async def test_the_median_is_taken_figure_by_figure():
    async with serving(Stub()) as client:
        runs = (await run_workload(client, TINY, runs=3, warm_up=0, seed=1, progress=lambda *_: None)).runs
    middle = median_of(runs)
    assert middle.out_tok_s == sorted(run.out_tok_s for run in runs)[1]
    assert middle.ttft_ms.p99 == sorted(run.ttft_ms.p99 for run in runs)[1]
    assert (middle.requests, middle.counted) == (7, "usage")


async def test_memory_of_the_whole_family_is_counted(tmp_path):
    """A child of the server holds 50 MiB; the peak must hold them, too."""
    child = "import time; held = b'x' * (50 << 20); time.sleep(30)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    server = LaunchedServer([sys.executable, "-c", parent], tmp_path / "log")
    try:
        for _ in range(600):
            if server.peak_bytes > 50 << 20:
                break
            await asyncio.sleep(0.05)
    finally:
        server.stop()
    assert 50 << 20 < server.peak_bytes < 150 << 20
