"""Live runs under pressure: overload, fairness, drain. A server and an engine process as they are, steps of a set time.

    python tests/soak/pressure.py overload [SECONDS]     F14, R05: ten times what it can do
    python tests/soak/pressure.py fairness [SECONDS]     F15, R06: one key a hundred times another one; four equal keys
    python tests/soak/pressure.py drain [TIMES]          F16, R08: SIGTERM under 64 streams
    python tests/soak/pressure.py refusals [SECONDS]     F13: 16 streams beside one hostile request after another

Prints its figures as JSON and ends with 1 if one is broken. Wall times are those of the machine: run it on a quiet one.
"""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "hostile")]

from attacker import KEY as ATTACKED  # noqa: E402
from watch import metric_sums, quantile  # noqa: E402

PROGRAM = HERE / "scripted_serve.py"
ATTACK = HERE.parent / "hostile" / "attack.py"
ROWS, STEP_S, TOKENS = 4, 0.02, 40
CAPACITY_PER_S = ROWS / (TOKENS * STEP_S)
"""Five answers a second if every row computes in every step: few, so that ten times as many cost little to send."""
QUEUE = 32
REFUSALS = ("queue_full", "share_of_queue_full", "draining")
KEYS = ["sk-pressure-one", "sk-pressure-two", "sk-pressure-three", "sk-pressure-four"]


class Got(NamedTuple):
    """What one call was answered. first_s, total_s: from the call to the first event, and to the end.

    code: of the error, in the body or, where the status line was out, in an event.
    """

    status: int
    at_s: float
    first_s: float
    total_s: float
    retry_after: str | None
    code: str | None
    has_text: bool
    whole: bool

    @property
    def served(self) -> bool:
        return self.status == 200 and self.whole and self.code is None

    @property
    def refused(self) -> bool:
        """Told to come back later before anything was said; who waits for long has got its status line already."""
        return not self.has_text and self.code in REFUSALS


class Server:
    """A running server. `memory_bytes`: RssAnon and VmSwap of both processes."""

    def __init__(self, step_s: float = STEP_S, queue: int = QUEUE, rows: int = ROWS) -> None:
        command = [sys.executable, str(PROGRAM), str(step_s), str(rows), str(queue), ",".join([*KEYS, ATTACKED])]
        self.process = psutil.Popen(command, stdout=subprocess.PIPE)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        self.port = int(line)

    @property
    def memory_bytes(self) -> int:
        total = 0
        for process in (self.process, *self.process.children()):
            text = Path(f"/proc/{process.pid}/status").read_text()
            total += sum(int(found) << 10 for found in re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", text))
        return total

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@contextmanager
def running(**settings: Any) -> Iterator[Server]:
    """Start a server; end it whatever happens."""
    server = Server(**settings)
    try:
        yield server
        server.end()
    finally:
        if server.process.is_running():
            server.process.kill()
            server.process.wait()
        server.process.stdout.close()


def streamed(key: str, num_tokens: int, prompt: list[int], path: str = "/v1/completions") -> bytes:
    """A streamed request that closes its connection."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def call(port: int, key: str, num_tokens: int, prompt: list[int], path: str = "/v1/completions") -> Got:
    """One streamed request on a connection of its own."""
    begun_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(streamed(key, num_tokens, prompt, path))
        top = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        first = await reader.read(1)
        first_s = time.monotonic() - begun_s
        data = first + await reader.read()
    finally:
        writer.close()
    retry = re.search(r"retry-after: (\d+)", top)
    code = re.search(rb'"error":.*"code":"(\w+)"', data)
    return Got(
        int(top.split()[1]), begun_s, first_s, time.monotonic() - begun_s, retry and retry[1],
        code[1].decode() if code else None, b'"text":' in data, b"[DONE]" in data,
    )  # fmt: skip


async def flood(port: int, key: str, per_s: float, seconds: float, *, seed: int, num_tokens: int = TOKENS) -> list[Got]:
    """Calls at random moments, whatever became of the ones before."""
    rnd = random.Random(seed)
    begun_s = time.monotonic()
    tasks: list[asyncio.Task[Got]] = []
    at_s = rnd.expovariate(per_s)
    while at_s < seconds:
        await asyncio.sleep(max(0.0, begun_s + at_s - time.monotonic()))
        prompt = [rnd.randrange(200) for _ in range(4)]
        tasks.append(asyncio.create_task(call(port, key, rnd.randint(num_tokens - 4, num_tokens + 4), prompt)))
        at_s += rnd.expovariate(per_s)
    return list(await asyncio.gather(*tasks))


def goodput(gots: list[Got], begun_s: float, ended_s: float) -> float:
    """Answers a second that were complete between two moments."""
    return sum(got.served and begun_s <= got.at_s + got.total_s < ended_s for got in gots) / (ended_s - begun_s)


async def watch(server: Server, seconds: float) -> dict[str, Any]:
    """Look at the server four times a second: the longest queue, books that do not balance, memory."""
    seen: dict[str, Any] = {"queue": 0.0, "unbalanced": 0, "memory": []}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        sums = await asyncio.to_thread(metric_sums, server.port)
        seen["queue"] = max(seen["queue"], sums["num_requests_waiting"])
        ended = sums["request_success_total"] + sums["admission_rejections_total"] + sums["requests_in_flight"]
        seen["unbalanced"] += sums["requests_received_total"] != ended
        seen["memory"].append(server.memory_bytes)
        await asyncio.sleep(0.25)
    return seen


async def overload(seconds: float) -> dict[str, Any]:
    """F14: as much is served at ten times the capacity as at its best; refusals are quick and say when to come back."""
    span_s = max(10.0, seconds / 4)
    with running() as server:
        warm = await flood(server.port, KEYS[0], CAPACITY_PER_S, 2.0, seed=0)
        begun_s = time.monotonic()
        best = await flood(server.port, KEYS[0], 1.5 * CAPACITY_PER_S, span_s, seed=1)
        best_per_s = goodput(best, begun_s + 1, begun_s + span_s)
        begun_s = time.monotonic()
        gots, seen = await asyncio.gather(
            flood(server.port, KEYS[0], 10 * CAPACITY_PER_S, seconds, seed=2), watch(server, seconds)
        )
        got_per_s = goodput(gots, begun_s + 1, begun_s + seconds)
    refused = [got for got in gots if got.refused]
    memory = seen["memory"]
    figures = {
        "calls": len(warm) + len(best) + len(gots), "capacity_per_s": CAPACITY_PER_S,
        "best_per_s": round(best_per_s, 2),
        "goodput_per_s": round(got_per_s, 2), "refused": len(refused),
        "refusal_p50_ms": round(1000 * quantile([got.total_s for got in refused], 0.5), 1),
        "refusal_p99_ms": round(1000 * quantile([got.total_s for got in refused], 0.99), 1),
        "longest_queue": seen["queue"], "unbalanced_scrapes": seen["unbalanced"], "scrapes": len(memory),
        "memory_mib": [round(memory[at] / 2**20, 1) for at in (len(memory) // 4, len(memory) // 2, -1)],
    }  # fmt: skip
    figures["broken"] = [
        name
        for name, holds in {
            "goodput >= 95 % of the best": got_per_s >= 0.95 * best_per_s,
            "refusals p99 < 50 ms": figures["refusal_p99_ms"] < 50,
            "every refusal says when": all(got.retry_after for got in refused) and bool(refused),
            "nothing else than served or refused": all(got.served or got.refused for got in gots),
            "the queue is within its bound": seen["queue"] <= QUEUE,
            "the books balance": not seen["unbalanced"],
            "memory is flat": memory[-1] <= memory[len(memory) // 4] * 1.05 + 2**20,
        }.items()
        if not holds
    ]
    return figures


async def fairness(seconds: float) -> dict[str, Any]:
    """F15: a flood of one key costs another one twice its own time and a step; equal keys get equal shares."""
    few, step_s = 8, 0.05
    per_s = ROWS / (few * step_s)
    with running(step_s=step_s) as server:
        await flood(server.port, KEYS[0], per_s, 2.0, seed=0, num_tokens=few)
        alone = await flood(server.port, KEYS[1], 0.1 * per_s, seconds / 3, seed=1, num_tokens=few)
        crowd = asyncio.create_task(
            flood(server.port, KEYS[0], 3 * per_s, seconds + 2, seed=2, num_tokens=few),
        )
        await asyncio.sleep(1.0)
        beside = await flood(server.port, KEYS[1], 0.03 * per_s, seconds, seed=3, num_tokens=few)
        await crowd
        crowds = await asyncio.gather(
            *(flood(server.port, key, per_s / 2, seconds / 3, seed=4 + i, num_tokens=few) for i, key in enumerate(KEYS))
        )
    shares = [sum(got.served for got in gots) for gots in crowds]
    jain = sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
    alone_s, beside_s = ([got.first_s for got in gots] for gots in (alone, beside))
    limit_s = 2 * quantile(alone_s, 0.99) + step_s
    figures = {
        "calls_of_b": len(beside), "served_of_b": sum(got.served for got in beside), "calls_of_a": len(crowd.result()),
        "refusal_of_a_p50_ms": round(1000 * quantile([got.total_s for got in crowd.result() if got.refused], 0.5), 1),
        "alone_p50_ms": round(1000 * quantile(alone_s, 0.5), 1),
        "alone_p99_ms": round(1000 * quantile(alone_s, 0.99), 1),
        "beside_p50_ms": round(1000 * quantile(beside_s, 0.5), 1),
        "beside_p99_ms": round(1000 * quantile(beside_s, 0.99), 1), "limit_ms": round(1000 * limit_s, 1),
        "served_by_equal_keys": shares, "jain": round(jain, 4),
    }  # fmt: skip
    figures["broken"] = [
        name
        for name, holds in {
            "b is served as if alone": all(got.served for got in beside),
            "b's p99 first token <= 2x alone + a step": quantile(beside_s, 0.99) <= limit_s,
            "jain >= 0.95": jain >= 0.95,
        }.items()
        if not holds
    ]
    return figures


async def ready_at(port: int, wanted: int) -> float:
    """The moment at which readiness is first answered so."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            line = await reader.readline()
            writer.close()
            if int(line.split()[1]) == wanted:
                return time.monotonic()
        except (ConnectionError, IndexError):
            return float("inf")
        await asyncio.sleep(0.005)


async def one_drain(twice: bool) -> dict[str, Any]:
    """SIGTERM (twice) while 64 streams are open, of which 8 run and 56 wait."""
    server = Server(queue=64)
    streams = [asyncio.create_task(call(server.port, KEYS[i % 4], 40, [i])) for i in range(64)]
    sums: dict[str, float] = {}
    while sums.get("num_requests_running", 0) < ROWS or sums["requests_received_total"] < len(streams):
        sums = await asyncio.to_thread(metric_sums, server.port)
    asked_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    red_s = await ready_at(server.port, 503)
    if twice:
        server.process.send_signal(signal.SIGTERM)
    exited = asyncio.create_task(asyncio.to_thread(server.process.wait, 60))
    gots = await asyncio.gather(*streams, return_exceptions=True)
    last_s = time.monotonic()
    code = await exited
    gone_s = time.monotonic()
    server.process.stdout.close()
    done = [got for got in gots if isinstance(got, Got)]
    return {
        "served": sum(got.served for got in done), "refused": sum(got.refused for got in done),
        "cut": len(gots) - sum(got.served or got.refused for got in done),
        "red_ms": round(1000 * (red_s - asked_s), 1), "after_last_ms": round(1000 * (gone_s - last_s), 1),
        "exit_s": round(gone_s - asked_s, 2), "code": code,
    }  # fmt: skip


async def drain(times: int) -> dict[str, Any]:
    """F16: what runs is finished, what waits is refused, the process ends soon after; at once for a second signal."""
    once = [await one_drain(twice=False) for _ in range(times)]
    twice = [await one_drain(twice=True) for _ in range(max(1, times // 5))]
    figures: dict[str, Any] = {
        "runs": len(once), "served": [run["served"] for run in once], "refused": [run["refused"] for run in once],
        "cut": sum(run["cut"] for run in once), "red_ms": max(run["red_ms"] for run in once),
        "after_last_ms": max(run["after_last_ms"] for run in once),
        "second_signal_exit_s": max(run["exit_s"] for run in twice), "codes": sorted({r["code"] for r in once + twice}),
    }  # fmt: skip
    figures["broken"] = [
        name
        for name, holds in {
            "no stream is cut": figures["cut"] == 0,
            "every one is served or refused": all(run["served"] + run["refused"] == 64 for run in once),
            "some run": all(run["served"] >= ROWS for run in once),
            "readiness is red within 100 ms": figures["red_ms"] <= 100,
            "the end comes within a second of the last stream": figures["after_last_ms"] <= 1000,
            "a second signal ends it within two seconds": figures["second_signal_exit_s"] <= 2,
            "the exit code is 0": figures["codes"] == [0],
        }.items()
        if not holds
    ]
    return figures


async def gaps_of(port: int, until_s: float) -> list[float]:
    """Seconds between the events of one stream after another; each must come to its end."""
    gaps: list[float] = []
    while time.monotonic() < until_s:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(streamed(KEYS[0], 60, [1, 2, 3]))
        data, at_s = b"", None
        while piece := await reader.read(65536):
            now_s = time.monotonic()
            if b'"text":' in piece:
                gaps += [now_s - at_s] if at_s is not None else []
                at_s = now_s
            data += piece
        writer.close()
        assert b"[DONE]" in data, data[-300:]
    return gaps


async def gaps_of_all(port: int, seconds: float) -> list[float]:
    """The gaps of 16 readers."""
    until_s = time.monotonic() + seconds
    return [gap for gaps in await asyncio.gather(*(gaps_of(port, until_s) for _ in range(16))) for gap in gaps]


async def refusals(seconds: float) -> dict[str, Any]:
    """F13: the time between the tokens of 16 streams, alone and beside one hostile request after another."""
    with running(rows=16) as server:
        await gaps_of_all(server.port, 2.0)
        alone = await gaps_of_all(server.port, seconds)
        command = (sys.executable, str(ATTACK), str(server.port))
        attack = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            before = int(await attack.stdout.readline() or 0)  # a round of all kinds is over
            beside = await gaps_of_all(server.port, seconds)
            assert attack.returncode is None, "the attack ended"
        finally:
            attack.kill()
            rounds = (await attack.communicate())[0].split()
    figures: dict[str, Any] = {
        "tokens": [len(alone), len(beside)], "refused_meanwhile": int(rounds[-1]) - before if rounds else 0,
        "p50_ms": [1000 * quantile(gaps, 0.5) for gaps in (alone, beside)],
        "p99_ms": [1000 * quantile(gaps, 0.99) for gaps in (alone, beside)],
    }  # fmt: skip
    figures["broken"] = [
        name
        for name, holds in {
            "some are refused meanwhile": figures["refused_meanwhile"] > 100,
            "p99 between tokens <= 1.2x alone": figures["p99_ms"][1] <= 1.2 * figures["p99_ms"][0],
        }.items()
        if not holds
    ]
    return figures


RUNS = {"overload": (overload, 60.0), "fairness": (fairness, 60.0), "drain": (drain, 10), "refusals": (refusals, 30.0)}


def main() -> int:
    """Make the run that the arguments name."""
    run, amount = RUNS[sys.argv[1]]
    figures = asyncio.run(run(type(amount)(sys.argv[2]) if len(sys.argv) > 2 else amount))  # type: ignore[operator]
    print(json.dumps(figures, indent=1))
    return 1 if figures["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
