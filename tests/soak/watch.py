"""What a running server holds, read from the kernel and its metrics page; and lines through such figures over time."""

import math
import re
import urllib.request
from pathlib import Path
from typing import NamedTuple

import psutil


class Sample(NamedTuple):
    """One look. memory_bytes: RssAnon + VmSwap of all processes, in `parts` for each."""

    at_s: float
    requests: int
    memory_bytes: int
    parts: tuple[int, ...]
    descriptors: int
    threads: int
    shared_memory: int
    temp_files: int


def look(pid: int, temp: Path, at_s: float, requests: int) -> Sample:
    """Look at a process and its children."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    parts = tuple(_anon_bytes(process.pid) for process in processes)
    return Sample(
        at_s=at_s,
        requests=requests,
        memory_bytes=sum(parts),
        parts=parts,
        descriptors=sum(process.num_fds() for process in processes),
        threads=sum(process.num_threads() for process in processes),
        shared_memory=sum("/dev/shm" in Path(f"/proc/{process.pid}/maps").read_text() for process in processes),
        temp_files=sum(1 for _ in temp.rglob("*")),
    )


def _anon_bytes(pid: int) -> int:
    found = re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return sum(map(int, found)) << 10


class Line(NamedTuple):
    """y = start + slope x by least squares; `low` and `high` bound the slope with 95 % confidence."""

    start: float
    slope: float
    low: float
    high: float


def line_through(points: list[tuple[float, float]], blocks: int = 20) -> Line:
    """Fit a line. Neighbouring points hang together, so their means over `blocks` stretches are what is counted."""
    size = max(1, len(points) // blocks)
    means = [_mean(points[start : start + size]) for start in range(0, len(points) - size + 1, size)]
    count = len(means)
    if count < 3:
        raise ValueError(f"{len(points)} points are too few for a line")
    x_mean, y_mean = _mean(means)
    spread = sum((x - x_mean) ** 2 for x, _ in means)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in means) / spread
    start = y_mean - slope * x_mean
    rest = sum((y - start - slope * x) ** 2 for x, y in means)
    error = math.sqrt(rest / (count - 2) / spread) * _student(count - 2)
    return Line(start, slope, slope - error, slope + error)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _student(freedom: int) -> float:
    """The two-sided 95 % point of Student's distribution (rounded up between the rows of the usual table)."""
    table = {1: 12.71, 2: 4.31, 3: 3.19, 4: 2.78, 5: 2.58, 7: 2.37, 10: 2.23, 15: 2.14, 20: 2.09, 30: 2.05}
    return table[max(row for row in table if row <= freedom)]


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of all lie; NaN of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else math.nan


def metric_sums(port: int) -> dict[str, float]:
    """Our own metrics, summed over their labels."""
    sums: dict[str, float] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        for line in page.read().decode().splitlines():
            if line.startswith("sayfa:"):
                name, value = line.partition("{")[0].removeprefix("sayfa:"), float(line.rsplit(" ", 1)[1])
                sums[name] = sums.get(name, 0.0) + value
    return sums
