"""Figures of runs: percentiles, medians over runs, a table to read. Pure; called by `bench.load` and by `cli`."""

import math
import statistics
from collections.abc import Sequence

import msgspec

from sayfa.bench.client import Answer
from sayfa.bench.workloads import Workload

POINTS = (50, 95, 99)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a time, in milliseconds; all 0 for no values."""

    p50: float
    p95: float
    p99: float


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a workload. short: answers with fewer tokens than asked for (a server that knows no `ignore_eos`)."""

    wall_s: float
    requests: int
    tokens_in: int | None
    tokens_cached: int | None
    tokens_out: int
    out_tok_s: float
    requests_s: float
    ttft_ms: Spread
    inter_token_ms: Spread
    per_token_ms: Spread
    e2e_ms: Spread
    short: int
    counted: str


class WorkloadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a workload, and the run in the middle by throughput figure by figure."""

    workload: Workload
    median: RunFigures
    runs: list[RunFigures]


def percentile(values: Sequence[float], point: float) -> float:
    """The smallest value that `point` per cent of the values do not exceed (nearest rank); 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(point / 100 * len(ordered)) - 1)]


def spread(seconds: Sequence[float]) -> Spread:
    """Percentiles in milliseconds of times in seconds."""
    p50, p95, p99 = (round(1000 * percentile(seconds, point), 3) for point in POINTS)
    return Spread(p50=p50, p95=p95, p99=p99)


def figures(answers: Sequence[Answer], begun_s: float, asked: int) -> RunFigures:
    """Sum up the answers of one run that began at `begun_s`; `asked` tokens were wished for each."""
    wall_s = max(answer.ended_s for answer in answers) - begun_s
    given = [answer.num_prompt for answer in answers if answer.num_prompt is not None]
    cached = [answer.num_cached for answer in answers if answer.num_cached is not None]
    made = sum(answer.num_output for answer in answers)
    return RunFigures(
        wall_s=round(wall_s, 4),
        requests=len(answers),
        tokens_in=sum(given) if given else None,
        tokens_cached=sum(cached) if cached else None,
        tokens_out=made,
        out_tok_s=round(made / wall_s, 2),
        requests_s=round(len(answers) / wall_s, 3),
        ttft_ms=spread([answer.ttft_s for answer in answers]),
        inter_token_ms=spread([gap for answer in answers for gap in answer.gaps_s]),
        per_token_ms=spread([answer.per_token_s for answer in answers]),
        e2e_ms=spread([answer.e2e_s for answer in answers]),
        short=sum(answer.num_output < asked for answer in answers),
        counted=answers[0].counted,
    )


def median_of(runs: Sequence[RunFigures]) -> RunFigures:
    """Figure by figure the median of several runs."""
    plain = [msgspec.to_builtins(run) for run in runs]

    def middle(values: list[object]) -> object:
        if all(isinstance(value, dict) for value in values):
            return {key: middle([value[key] for value in values]) for key in values[0]}  # type: ignore[index,attr-defined]
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) < len(values):
            return values[0]
        value = statistics.median(numbers)
        return int(value) if all(isinstance(number, int) for number in numbers) else value

    return msgspec.convert(middle(plain), RunFigures)


def table(results: Sequence[WorkloadFigures]) -> list[str]:
    """Lines for a person: one workload a line, the times as p50 / p95 / p99."""
    head = (
        f"{'workload':<9}{'out tok/s':>10}{'req/s':>8}  {'TTFT ms':>24}  {'inter-token ms':>22}  {'end-to-end ms':>27}"
    )
    lines = [head]
    for result in results:
        run = result.median
        lines.append(
            f"{result.workload.name:<9}{run.out_tok_s:>10.1f}{run.requests_s:>8.2f}  {_three(run.ttft_ms, 24)}  "
            f"{_three(run.inter_token_ms, 22)}  {_three(run.e2e_ms, 27)}"
        )
        if run.short:
            lines.append(f"{'':<9}  {run.short} of {run.requests} answers were shorter than asked for")
    lines.append("times are p50 / p95 / p99")
    return lines


def _three(times: Spread, width: int) -> str:
    return " / ".join(f"{value:.1f}" for value in (times.p50, times.p95, times.p99)).rjust(width)
