"""Runs workloads against a server: so many requests at a time, warm-up first, then measured runs.

Called by `cli`. Knows neither how the server was started nor how results are shown.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from sayfa.base.errors import EngineError
from sayfa.bench.client import Answer, CompletionClient
from sayfa.bench.report import RunFigures, WorkloadFigures, figures, median_of
from sayfa.bench.workloads import Workload

Progress = Callable[[str, int, int], None]
"""(what runs, requests done, requests in all)."""


async def run_once(
    client: CompletionClient, workload: Workload, prompts: Sequence[str], done: Callable[[int], None], limit_s: float
) -> RunFigures:
    """Send the prompts, `at_once` at a time, and return the figures. Raises EngineError at the first failure."""
    answers: list[Answer] = []
    todo = list(reversed(prompts))

    async def worker() -> None:
        while todo:
            prompt = todo.pop()
            try:
                answers.append(await asyncio.wait_for(client.complete(prompt, workload.out), limit_s))
            except TimeoutError:
                raise EngineError(f"a request took more than {limit_s:.0f} s", code="timeout") from None
            except OSError as error:
                raise EngineError(f"{client.url} cannot be reached or left: {error}", code="no_connection") from None
            done(len(answers))

    begun_s = time.perf_counter()
    workers = [asyncio.create_task(worker()) for _ in range(min(workload.at_once, len(prompts)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return figures(answers, begun_s, workload.out)


async def run_workload(
    client: CompletionClient,
    workload: Workload,
    *,
    runs: int,
    warm_up: int,
    seed: int,
    progress: Progress,
    limit_s: float = 900.0,
) -> WorkloadFigures:
    """Warm up, measure `runs` times, and return all runs and their median. The warm-up is one wave of requests."""
    measured = []
    for run in range(-warm_up, runs):
        prompts = workload.prompts(seed, run)
        if run < 0:
            prompts = prompts[: workload.at_once]
        label = f"{workload.name} " + ("warm-up" if run < 0 else f"run {run + 1} of {runs}")
        told = partial(_tell, progress, label, len(prompts))
        result = await run_once(client, workload, prompts, told, limit_s)
        if run >= 0:
            measured.append(result)
    return WorkloadFigures(workload=workload, median=median_of(measured), runs=measured)


def _tell(progress: Progress, label: str, total: int, done: int) -> None:
    progress(label, done, total)
