"""Keep a server busy for hours with everything at once, and say whether anything grows (R20, F23, F24).

    make soak HOURS=1                              the tiny model made here
    python tests/soak/soak.py --hours 8 --model smollm2

Prints a report, writes it as JSON, and ends with 1 if a figure is broken.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(Path(__file__).parent)]

from traffic import Counts, Sender  # noqa: E402
from watch import Line, Sample, line_through, look, metric_sums, quantile  # noqa: E402

from fakes.models import make_successor_text  # noqa: E402

START_LIMIT_S = 120.0
BYTES_PER_REQUEST = 100.0
JUDGED_REQUESTS = 50_000
"""Fewer cannot tell a leak from caches that fill: the tokenizer's own keeps its last 10,000 words, up to 2 kB each."""
LATENCY_DRIFT = 0.05
"""Part by which p50 and p99 of the last quarter may lie above the second quarter's (judged on long runs only)."""


class Server:
    """A `sayfa serve` of our own, with a temp folder of its own."""

    def __init__(self, folder: Path, model: str, flags: list[str]) -> None:
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.log = folder / "server.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SAYFA_")}
        command = [sys.executable, "-m", "sayfa", "serve", model, "--served-model-name", "soak", "--port", "0", *flags]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=clean | {"TMPDIR": str(self.temp), "MALLOC_ARENA_MAX": "2"}
            )
        self.port = self._wait_ready()

    def _wait_ready(self) -> int:
        limit_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit_s and self.process.poll() is None:
            found = re.search(r'"address": "http://127\.0\.0\.1:(\d+)"', self.log.read_text())
            if found:
                return int(found[1])
            time.sleep(0.05)
        self.process.kill()
        self.process.wait()
        raise SystemExit("the server did not start:\n" + self.log.read_text()[-3000:])

    def end(self) -> int:
        """Stop it as a user does; give its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


async def load(server: Server, seconds: float, senders: int, seed: int) -> tuple[list[Sample], Counts, list[Sample]]:
    """Send for so long; give the samples, the counts, and the samples at rest before and after."""
    counts, samples = Counts(), [look(server.process.pid, server.temp, time.monotonic(), 0)]
    until_s = time.monotonic() + seconds
    crowd = [asyncio.create_task(Sender(server.port, "soak", seed + i, counts).run(until_s)) for i in range(senders)]
    interval_s = min(10.0, max(0.25, seconds / 400))
    while not all(task.done() for task in crowd):
        await asyncio.sleep(interval_s)
        samples.append(look(server.process.pid, server.temp, time.monotonic(), counts.total))
    await asyncio.gather(*crowd)
    for _ in range(100):
        if metric_sums(server.port)["requests_in_flight"] == 0:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)
    rest = [samples[0], look(server.process.pid, server.temp, time.monotonic(), counts.total)]
    return samples, counts, rest


def judge(samples: list[Sample], counts: Counts, rest: list[Sample], books: dict[str, float]) -> dict[str, Any]:
    """Put the figures together; `broken` lists those that do not hold."""
    warm = [
        sample for sample in samples if sample.at_s >= samples[0].at_s + (samples[-1].at_s - samples[0].at_s) * 0.25
    ]
    memory = line_through([(sample.requests, sample.memory_bytes) for sample in warm])
    descriptors = line_through([(sample.requests, sample.descriptors) for sample in warm])
    threads = line_through([(sample.requests, sample.threads) for sample in warm])
    report: dict[str, Any] = {
        "seconds": round(samples[-1].at_s - samples[0].at_s, 1),
        "requests": counts.total,
        "outcomes": dict(counts.outcomes),
        "statuses": {str(status): count for status, count in sorted(counts.statuses.items())},
        "memory_mib": {"warm": warm[0].memory_bytes >> 20, "end": samples[-1].memory_bytes >> 20,
                       "processes_at_end": [part >> 20 for part in samples[-1].parts]},
        "memory_curve": [(sample.requests, [part >> 20 for part in sample.parts])
                         for sample in samples[:: max(1, len(samples) // 12)]],
        "memory_bytes_per_request": _shown(memory),
        "descriptors_per_million": _shown(Line(*(1e6 * value for value in descriptors))),
        "threads_per_million": _shown(Line(*(1e6 * value for value in threads))),
        "at_rest": {name: [getattr(sample, name) for sample in rest]
                    for name in ("descriptors", "threads", "shared_memory", "temp_files")},
        "latency_s": _latencies(counts),
        "surprises": counts.surprises,
    }  # fmt: skip
    report["broken"] = list(_broken(report, memory, rest, books, counts))
    return report


def _broken(report: dict[str, Any], memory: Line, rest: list[Sample], books: dict[str, float], counts: Counts) -> Any:
    if counts.outcomes["failed"]:
        yield f"{counts.outcomes['failed']} requests failed"
    # A leak shows as a slope that cannot be nothing; the noise of a short run cannot be told from one.
    if counts.total >= JUDGED_REQUESTS and memory.high > BYTES_PER_REQUEST and memory.low > 0:
        yield f"memory grows by {memory.low:.0f} to {memory.high:.0f} bytes a request"
    for name in ("shared_memory", "temp_files"):
        if report["at_rest"][name][1] > report["at_rest"][name][0]:
            yield f"{name}: {report['at_rest'][name]}"
    if rest[1].descriptors > rest[0].descriptors + 8 or rest[1].threads > rest[0].threads + 8:
        yield f"descriptors or threads at rest: {report['at_rest']}"
    ended = books["request_success_total"] + books["admission_rejections_total"]
    if books["requests_received_total"] != ended or books["requests_in_flight"]:
        yield f"the books do not balance: {books['requests_received_total']:.0f} received, {ended:.0f} ended"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        if books[name]:
            yield f"{name} is {books[name]} with nobody there"
    if report["seconds"] >= 1800:
        for name, (second, last) in report["latency_s"].items():
            if last > second * (1 + LATENCY_DRIFT):
                yield f"{name} went from {second} to {last} s"


def _latencies(counts: Counts) -> dict[str, list[float]]:
    """p50 and p99 of the first and the last part, of the second and the last quarter of the run."""
    quarter = len(counts.times) // 4
    found: dict[str, list[float]] = {}
    for part, name in ((1, "first"), (2, "last")):
        for share, shown in ((0.5, "p50"), (0.99, "p99")):
            stretches = (counts.times[quarter : 2 * quarter], counts.times[3 * quarter :])
            found[f"{shown} of the {name} part"] = [
                round(quantile([times[part] for times in stretch], share), 4) for stretch in stretches
            ]
    return found


def _shown(line: Line) -> dict[str, float]:
    return {"slope": round(line.slope, 2), "low": round(line.low, 2), "high": round(line.high, 2)}


def soak(hours: float, model: str, senders: int, seed: int) -> dict[str, Any]:
    """Run the whole; give the report."""
    with tempfile.TemporaryDirectory(prefix="sayfa-soak-") as name:
        folder = Path(name)
        flags = ["--max-model-len", "512", "--max-num-seqs", "16", "--log-format", "json", "--kv-cache-memory", "16MiB"]
        if model == "tiny":
            pieces = [f" w{number}".encode() for number in range(30)] + ["ığ😀".encode()]
            model = str(make_successor_text(folder / "tiny", pieces))
        server = Server(folder, model, flags)
        try:
            asyncio.run(warm_up(server, seed))
            samples, counts, rest = asyncio.run(load(server, hours * 3600, senders, seed))
            report = judge(samples, counts, rest, metric_sums(server.port))
            if server.end() != 0:
                report["broken"].append(f"the server ended with {server.process.returncode}")
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
        errors = [line for line in server.log.read_text().splitlines() if '"level": "error"' in line]
        if errors:
            report["broken"].append(f"{len(errors)} errors in the log, the first: {errors[0][:500]}")
    return report


async def warm_up(server: Server, seed: int) -> None:
    """Let every thread, cache and code path come into being before the first look."""
    counts = Counts()
    until_s = time.monotonic() + 3.0
    await asyncio.gather(*(Sender(server.port, "soak", seed + 1000 + i, counts).run(until_s) for i in range(4)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--model", default="tiny", help="tiny (made here), smollm2, or a path")
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=Path("results/soak.json"))
    given = parser.parse_args()
    report = soak(given.hours, given.model, given.senders, given.seed)
    text = json.dumps(report, indent=2)
    print(text)
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(text)
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
