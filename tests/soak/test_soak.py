"""F24 in small: the soak's own tool, run for a few seconds, and the judge's eyes tested on made-up runs."""

import random
from collections import Counter

import pytest
from traffic import Counts
from watch import Sample, line_through

from soak import judge, soak

BOOKS = {
    "request_success_total": 9.0, "admission_rejections_total": 1.0, "requests_received_total": 10.0,
    "requests_in_flight": 0.0, "num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0,
}  # fmt: skip


def samples(grown_bytes: float, noise_bytes: float = 2e6, count: int = 200, descriptors: int = 20) -> list[Sample]:
    """A run of 100,000 requests whose memory grows by so many bytes a request."""
    rng = random.Random(1)
    return [
        Sample(i, 500 * i, int(5e8 + 500 * i * grown_bytes + rng.gauss(0, noise_bytes)), (), descriptors, 9, 0, 0)
        for i in range(count)
    ]


def found(run: list[Sample], books: dict[str, float] = BOOKS, failed: int = 0) -> list[str]:
    counts = Counts()
    counts.outcomes = Counter(served=100_000, failed=failed)
    counts.times = [(0.0, 0.01, 0.02)] * 400
    rest = [run[0], run[-1]]
    return list(judge(run, counts, rest, books)["broken"])


def test_a_quiet_run_is_in_order() -> None:
    assert found(samples(0)) == []


@pytest.mark.parametrize("grown_bytes", [150, 1000])
def test_a_leak_is_seen_through_the_noise(grown_bytes: int) -> None:
    assert "memory grows" in found(samples(grown_bytes))[0]


def test_few_requests_say_nothing_about_memory() -> None:
    run = [sample._replace(requests=sample.requests // 100) for sample in samples(1000)]
    counts = Counts()
    counts.outcomes, counts.times = Counter(served=1000), [(0.0, 0.01, 0.02)] * 400
    assert judge(run, counts, [run[0], run[-1]], BOOKS)["broken"] == []


def test_each_other_figure_is_looked_at() -> None:
    """Failures, descriptors, threads, books that do not balance, pages that are held by nobody."""
    run = samples(0)
    assert "failed" in found(run, failed=1)[0]
    assert "descriptors" in found([*run[:-1], run[-1]._replace(descriptors=40)])[0]
    assert "descriptors or threads" in found([*run[:-1], run[-1]._replace(threads=40)])[0]
    assert "temp_files" in found([*run[:-1], run[-1]._replace(temp_files=1)])[0]
    assert "shared_memory" in found([*run[:-1], run[-1]._replace(shared_memory=1)])[0]
    assert "books" in found(run, BOOKS | {"requests_received_total": 11.0})[0]
    assert "kv_cache_usage" in found(run, BOOKS | {"kv_cache_usage_perc": 0.1})[0]


def test_later_answers_that_are_slower_are_seen_on_long_runs() -> None:
    counts, run = Counts(), [sample._replace(at_s=sample.at_s * 60) for sample in samples(0)]
    counts.outcomes = Counter(served=1000)
    counts.times = [(0.0, 0.01, 0.02)] * 300 + [(0.0, 0.01, 0.03)] * 100
    broken = judge(run, counts, [run[0], run[-1]], BOOKS)["broken"]
    assert any("p50 of the last part" in text for text in broken)


@pytest.mark.parametrize("seed", range(20))
def test_a_line_s_bounds_hold_its_slope(seed: int) -> None:
    """The true slope lies in the 95 % bounds, with noise that hangs together from point to point."""
    rng, drift, points = random.Random(seed), 0.0, []
    for x in range(400):
        drift = 0.5 * drift + rng.gauss(0, 1)
        points.append((float(x), 0.05 * x + drift))
    line = line_through(points)
    assert line.low - 0.01 < 0.05 < line.high + 0.01


@pytest.mark.timeout(180)
def test_f24_a_short_soak_of_a_real_server_breaks_nothing() -> None:
    """Twelve seconds of everything at once against `sayfa serve`: no failure, nothing held at rest, books in order.

    Memory is judged by the long run: in so few requests the growth of warm caches cannot be told from a leak.
    """
    report = soak(hours=12 / 3600, model="tiny", senders=4, seed=1)
    assert report["broken"] == [], report
    assert report["outcomes"]["served"] > 50, report
    assert report["outcomes"]["abandoned"] > 5, report
    assert report["outcomes"]["refused"] > 2, report
