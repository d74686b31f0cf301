"""Scheduler: decides what each step computes, and applies what it gave. Pure Python over integers.

Called by `engine.step` only: `schedule` → (runner) → `update`, always in turns. Must not know clocks (time is an
argument), devices, tensors or text.

How a step is planned, and which bounds hold, is told in `planner`; who is here and how one comes and goes in `roster`;
what a result does in `results`. This file is the door to them.
"""

import heapq
from collections.abc import Collection

from sayfa.base.errors import LostStateError
from sayfa.base.faults import fault
from sayfa.base.messages import EngineOutput, Event, Request, StepMade, StepStats
from sayfa.base.step import NewRow, RunnerOutput, SchedulerOutput
from sayfa.core.kv_cache import KvCache
from sayfa.core.limits import Limits, refuse_impossible, refuse_overload
from sayfa.core.planner import Plan, Planner
from sayfa.core.policy import Policy
from sayfa.core.results import Results
from sayfa.core.roster import Roster
from sayfa.core.sequence import RequestState, Sequence

MIN_DEADLINES = 64
"""So many are kept in any case: to look through them costs more than they do."""


class Scheduler:
    """Continuous batching over pages. `limits` are checked here; `policy` orders; `cache` owns the pages."""

    def __init__(self, limits: Limits, policy: Policy, cache: KvCache) -> None:
        limits.check()
        self.limits = limits
        self.cache = cache
        self._roster = Roster(cache, policy, limits.max_num_seqs)
        self._results = Results(self._roster, cache)
        self._planner = Planner(limits, policy, cache, self._roster)
        self._step = 0
        self._num_requests = 0
        self._first_event = 0
        self._deadlines: list[tuple[float, int, str]] = []
        self._plan: Plan | None = None
        """The step that is being made; None between two steps."""
        self._last = Plan(0.0)
        self._news = False

    # ------------------------------------------------------------------------------------- requests come and go

    def add(self, request: Request, now_s: float, retry_after_s: int = 1) -> None:
        """Take a request in, or raise InvalidRequest (can never be served) or Overloaded (not now).

        retry_after_s: what the caller would tell a refused client. `params.seed` is resolved by the caller.
        """
        state = RequestState(request, self._num_requests, now_s, self.limits.max_model_len)
        refuse_impossible(state, self.limits, self._roster, self.cache)
        refuse_overload(state, self.limits, self._roster, retry_after_s)
        self._num_requests += 1
        self._roster.open(state)
        if state.deadline_s is not None:
            self._forget_deadlines()
            heapq.heappush(self._deadlines, (state.deadline_s, state.number, request.id))

    def check(self, request: Request) -> None:
        """Raise InvalidRequest for a request that can never be served here; nothing is kept of it."""
        state = RequestState(request, self._num_requests, 0.0, self.limits.max_model_len)
        refuse_impossible(state, self.limits, self._roster, self.cache)

    def abort(self, request_id: str, now_s: float, branches: Collection[int] | None = None) -> bool:
        """End a request, or some of its branches, at once; last outputs come with the next `update`.

        False if it is not here, or if branches are named before it has run: nobody can have heard of one of them.
        """
        state = self._roster.requests.get(request_id)
        if state is None or (branches is not None and state.admitted_s is None):
            return False
        self._roster.outputs += self._roster.end(state, "abort", now_s, branches=branches)
        return True

    def pause(self, request_id: str, on: bool) -> bool:
        """Compute nothing more of a request (`on`), or go on with it; return whether that changed anything.

        A paused request is no work, and nobody waits for it: its rows and pages go to whom they are short for. Its
        deadline is seen by the next step. One that has not started stays in the queue: nothing of it can be unread.
        """
        state = self._roster.requests.get(request_id)
        if state is None or state.admitted_s is None or state.paused is on:
            return False
        if on:
            self._roster.pause(state)
        else:
            self._roster.resume(state)
        self._news = True
        return True

    def preempt(self, request_id: str, now_s: float) -> int:
        """Make all branches of a request with pages give them up; return how many. They come back by themselves."""
        state = self._roster.requests.get(request_id)
        running = [branch for branch in state.branches if branch.row >= 0] if state else []
        for branch in running:
            self._planner.give_up(branch, now_s)
        return len(running)

    # ------------------------------------------------------------------------------------- decide

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Plan a step. `update` must follow, also if no row was planned (then with a RunnerOutput without rows).

        Raises LostStateError if the step before was not brought to its end: what it planned is noted here and perhaps
        not in the runner, and no further step can be made.
        """
        if self._plan is not None:
            raise LostStateError(
                f"step {self._step} was not brought to its end (an error left it half done, or its update is missing), "
                "so pages and rows can no longer be trusted; this engine makes no further step, make a new one"
            )
        self._step += 1
        self._news = False
        self._plan = Plan(now_s)
        self._expire(now_s)
        self._plan = plan = self._planner.plan(now_s)
        forgotten = self._roster.forgotten
        self._roster.forgotten = []
        if plan.rows:
            rows = [(s.id, s.branch, r.start, r.count) for s, r in zip(plan.sequences, plan.rows, strict=True)]
            self.cache.events.append(StepMade(self._step, rows))
        return SchedulerOutput(
            step=self._step,
            rows=plan.rows,
            new=[_new_row(sequence) for sequence in plan.entered.values()],
            added_pages=plan.added,
            copies=plan.copies,
            forget=forgotten,
        )

    # ------------------------------------------------------------------------------------- update

    def update(self, output: RunnerOutput, now_s: float) -> list[EngineOutput]:
        """Apply a step's results; return what each branch got, last outputs of ended ones included."""
        plan = self._plan
        if plan is None or output.step != self._step:
            raise RuntimeError(f"update for step {output.step}, but step {self._step} was planned last")
        if [result.row for result in output.rows] != [row.row for row in plan.rows]:
            raise RuntimeError(f"step {output.step}: the results' rows are not the planned rows")
        self._last = plan
        outputs = self._roster.outputs
        self._roster.outputs = []
        for sequence, row, result in zip(plan.sequences, plan.rows, output.rows, strict=True):
            if sequence.row == row.row:  # else it was aborted or preempted while the step ran
                self._results.apply(sequence, row, result, now_s, outputs)
        self._plan = None
        return outputs

    # ------------------------------------------------------------------------------------- figures and checks

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, preempted ones included."""
        return len(self._roster.waiting)

    @property
    def num_answers_waiting(self) -> int:
        """Sequences that wait, and the further branches of requests that have not run yet."""
        return self._roster.waiting.num_answers

    def num_before(self, request: Request) -> int:
        """Return how many sequences stand before the place that this request would have in the queue."""
        state = RequestState(request, self._num_requests, 0.0, self.limits.max_model_len)
        return self._roster.num_before(state)

    @property
    def num_paused(self) -> int:
        """Sequences that neither run nor wait because their request is paused."""
        return len(self._roster.held) + len(self._roster.parked)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: someone runs or waits, or outputs, freed rows or figures are to be told."""
        roster = self._roster
        return bool(roster.running or roster.waiting or roster.outputs or roster.forgotten or self._news)

    @property
    def has_requests(self) -> bool:
        """Whether any request is here that has not ended, be it paused."""
        return bool(self._roster.requests)

    def unstarted(self) -> list[str]:
        """Return the ids of the requests that have not run yet, first come first."""
        return [state.request.id for state in self._roster.requests.values() if state.admitted_s is None]

    def open_branches(self) -> list[tuple[str, int]]:
        """Return (request id, branch) of each answer that is still to end."""
        return [pair for state in self._roster.requests.values() for pair in state.open()]

    @property
    def finished(self) -> dict[str, int]:
        """Ended branches by finish reason, since start."""
        return dict(self._roster.finished)

    def take_events(self) -> tuple[int, list[Event]]:
        """Return (number of the first event, events since the last call); the numbers have no gaps."""
        first, events = self._first_event, self.cache.events[:]
        self.cache.events.clear()
        self._first_event += len(events)
        return first, events

    def reset_cache(self) -> int:
        """Forget all cached pages that nobody holds; return how many."""
        return self.cache.reset()

    def stats(self, decide_s: float, compute_s: float, update_s: float, parts: dict[str, float]) -> StepStats:
        """Return the figures after the last step; the seconds are the caller's."""
        pool, roster, last = self.cache.pool, self._roster, self._last
        holders = (*roster.running, *roster.held)
        filled = sum(sequence.computed for sequence in holders) - pool.num_shares * self.cache.page_size
        return StepStats(
            step=self._step,
            decide_s=decide_s,
            compute_s=compute_s,
            update_s=update_s,
            parts=parts,
            num_rows=len(last.rows),
            tokens_prompt=sum(row.count for row in last.rows[last.num_decode :]),
            tokens_decode=last.num_decode,
            running=len(roster.running),
            waiting=len(roster.waiting),
            paused=self.num_paused,
            waiting_tokens=roster.waiting.num_tokens,
            pages_total=pool.capacity,
            pages_used=pool.num_used,
            pages_cached=pool.num_cached,
            slots_used=filled,
            preemptions=roster.num_preemptions,
            prefix_queries=self._planner.prefix_queries,
            prefix_hits=self._planner.prefix_hits,
        )

    def audit(self) -> None:
        """Raise RuntimeError if any state contradicts another. Slow: for tests, idle moments and after a fault."""
        self._roster.check()
        sequences = self._roster.sequences()
        for sequence in sequences:
            sequence.check(self.cache.page_size)
        self.cache.check(sequences)

    def _forget_deadlines(self) -> None:
        """Drop the deadlines of requests that ended before them, once they are the most: some lie months ahead."""
        if len(self._deadlines) > 2 * len(self._roster.requests) + MIN_DEADLINES:
            here = {(state.number, request_id) for request_id, state in self._roster.requests.items()}
            self._deadlines = [entry for entry in self._deadlines if entry[1:] in here]
            heapq.heapify(self._deadlines)

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number, request_id = heapq.heappop(self._deadlines)
            state = self._roster.requests.get(request_id)
            if state is not None and state.number == number:
                fault("core.expire")
                self._roster.outputs += self._roster.end(state, "deadline", now_s)


def _new_row(sequence: Sequence) -> NewRow:
    return NewRow(
        row=sequence.row,
        tokens=list(sequence.tokens),
        num_prompt=sequence.num_prompt,
        params=sequence.state.params,
        seed=sequence.seed,
        pages=list(sequence.pages),
    )
