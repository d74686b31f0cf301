"""What paging brings: one mix of requests under paged memory, contiguous reservation, and static batching.

Called by `cli`. Runs the real scheduler and page pool of `core` on a virtual clock; a step costs a fixed time and a
time for each token, as on a machine that reads all weights once a step. No model is computed: what is compared is how
many requests the same memory holds, how much of it lies idle, and what that does to throughput.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from sayfa.base.messages import EngineOutput, Request, StepStats
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import RowResult, RunnerOutput, SchedulerOutput
from sayfa.core.kv_cache import KvCache, ReservedCache
from sayfa.core.limits import Limits
from sayfa.core.page_pool import PagePool
from sayfa.core.policy import PriorityPolicy, StaticPolicy
from sayfa.core.scheduler import Scheduler

PAGE_SIZE = 32
MAX_NUM_SEQS = 256
STEP_FIXED_S = 0.010
STEP_TOKEN_S = 0.0005
"""The cost model: a step reads all weights once (fixed), and computes each token (per token)."""


Progress = Callable[[str, int, int], None]


class PagingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One way of keeping memory. Means over the steps in which somebody waited (over all if nobody ever did); tokens_s
    is of the whole run, since what nobody waits for takes time, too.

    held: requests running at once. filled, wasted, idle: shares of the memory's token slots that hold a token, that are
    taken but hold none, that nobody took.
    """

    name: str
    held_mean: float
    held_peak: int
    filled_share: float
    wasted_share: float
    idle_share: float
    steps: int
    seconds: float
    tokens_s: float
    preemptions: int
    latency_mean_s: float


def request_mix(count: int, max_model_len: int, seed: int) -> list[tuple[int, int]]:
    """(prompt tokens, answer tokens) of each request: mostly short, some long, as chat traffic is (log-normal)."""
    rng = random.Random(f"sayfa paging {seed}")
    mix = []
    for _ in range(count):
        prompt = min(max_model_len // 2, max(4, round(rng.lognormvariate(5.0, 1.0))))
        answer = min(max_model_len - prompt - 1, max(4, round(rng.lognormvariate(5.0, 0.8))))
        mix.append((prompt, answer))
    return mix


def compare_paging(
    count: int, memory_tokens: int, max_model_len: int, seed: int, progress: Progress
) -> list[PagingFigures]:
    """Run the mix in each way, all requests there at the start; the memory is the same for all."""
    mix = request_mix(count, max_model_len, seed)
    results = []
    for name in ("paged", "contiguous", "static batch"):
        results.append(_run(name, mix, memory_tokens, max_model_len, progress))
    return results


def _scheduler(name: str, memory_tokens: int, max_model_len: int, count: int) -> Scheduler:
    pool = PagePool(memory_tokens // PAGE_SIZE + 1)  # page 0 is never handed out
    limits = Limits(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=2 * MAX_NUM_SEQS, max_model_len=max_model_len,
        max_queued_requests=count, max_queued_tokens=count * max_model_len,
    )  # fmt: skip
    if name == "paged":
        return Scheduler(limits, PriorityPolicy(), KvCache(pool, PAGE_SIZE, model_digest="bench", caching=False))
    reserved = ReservedCache(pool, PAGE_SIZE, max_model_len)
    if name == "contiguous":
        return Scheduler(limits, PriorityPolicy(), reserved)
    return Scheduler(limits, StaticPolicy(max(1, memory_tokens // max_model_len)), reserved)


class _Step(NamedTuple):
    """What one step showed."""

    waiting: int
    running: int
    filled: float
    taken: float
    made: int
    cost_s: float


class _Tally:
    """Adds up what the steps show."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._steps: list[_Step] = []
        self._ends_s: list[float] = []

    def step(self, stats: StepStats, outputs: list[EngineOutput], clock_s: float, cost_s: float) -> None:
        self._ends_s += [clock_s for output in outputs if output.finish is not None]
        made = sum(len(output.tokens) for output in outputs)
        filled, taken = stats.slots_used / self._slots, stats.pages_used * PAGE_SIZE / self._slots
        self._steps.append(_Step(stats.waiting, stats.running, filled, taken, made, cost_s))

    @property
    def ended(self) -> int:
        return len(self._ends_s)

    def figures(self, name: str, preemptions: int) -> PagingFigures:
        tight = [step for step in self._steps if step.waiting] or self._steps
        filled, taken, held = (
            sum(values) / len(tight)
            for values in ([s.filled for s in tight], [s.taken for s in tight], [s.running for s in tight])
        )
        return PagingFigures(
            name=name,
            held_mean=round(held, 1),
            held_peak=max(step.running for step in tight),
            filled_share=round(filled, 4),
            wasted_share=round(taken - filled, 4),
            idle_share=round(1 - taken, 4),
            steps=len(self._steps),
            seconds=round(self._ends_s[-1], 2),
            tokens_s=round(sum(step.made for step in self._steps) / sum(step.cost_s for step in self._steps), 1),
            preemptions=preemptions,
            latency_mean_s=round(sum(self._ends_s) / len(self._ends_s), 2),
        )


def _run(
    name: str, mix: list[tuple[int, int]], memory_tokens: int, max_model_len: int, progress: Progress
) -> PagingFigures:
    scheduler = _scheduler(name, memory_tokens, max_model_len, len(mix))
    for number, (prompt, answer) in enumerate(mix):
        params = SamplingParams(max_tokens=answer, ignore_eos=True, seed=number)
        scheduler.add(Request(id=str(number), prompt=[number % 97 + 1] * prompt, params=params), 0.0)
    tally = _Tally(memory_tokens // PAGE_SIZE * PAGE_SIZE)
    clock_s = 0.0
    while tally.ended < len(mix):
        plan = scheduler.schedule(clock_s)
        cost_s = STEP_FIXED_S + STEP_TOKEN_S * plan.num_tokens
        clock_s += cost_s
        outputs = scheduler.update(_echo(plan), clock_s)
        scheduler.take_events()
        stats = scheduler.stats(0.0, cost_s, 0.0, {})
        tally.step(stats, outputs, clock_s, cost_s)
        progress(name, tally.ended, len(mix))
    return tally.figures(name, stats.preemptions)


def _echo(plan: SchedulerOutput) -> RunnerOutput:
    """A runner that computes nothing: token 1 for each row that samples."""
    rows = [RowResult(row=row.row, tokens=[1] if row.sample else []) for row in plan.rows]
    return RunnerOutput(step=plan.step, rows=rows)


def paging_table(results: list[PagingFigures]) -> list[str]:
    """Lines for a person, with the ratio to contiguous reservation."""
    base = next(result for result in results if result.name == "contiguous")
    lines = [
        f"{'memory':<14}{'held mean':>10}{'peak':>6}{'filled':>9}{'wasted':>9}{'idle':>8}"
        f"{'tokens/s':>10}{'ratio':>7}{'latency s':>11}{'preempted':>11}"
    ]
    for r in results:
        lines.append(
            f"{r.name:<14}{r.held_mean:>10.1f}{r.held_peak:>6}{r.filled_share:>9.1%}{r.wasted_share:>9.1%}"
            f"{r.idle_share:>8.1%}{r.tokens_s:>10.1f}{r.tokens_s / base.tokens_s:>6.2f}x{r.latency_mean_s:>11.2f}"
            f"{r.preemptions:>11}"
        )
    return lines
