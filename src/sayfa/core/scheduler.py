"""Scheduler: decides what each step computes, and applies what it gave. Pure Python over integers.

Called by `engine.step` only: `schedule` → (runner) → `update`, always in turns. Must not know clocks (time is an
argument), devices, tensors or text.

A step, in order:
1. requests past their deadline end;
2. each running sequence, best rank first, gets room for one more token; where pages are short the last in rank yields
   (preemption by recompute). Sequences that decode are planned right away, one token each;
3. what is left of the token budget goes to prompts: the oldest one that is being computed leads, a share is kept for
   short ones, so that neither a long prompt stops the short ones nor they stop it (see `_share_out`);
4. waiting sequences enter while rows, pages and tokens last. One that cannot get its pages blocks those behind it.

Bounds that the tests hold:
- a waiting sequence is passed by at most `max_overtakes` that stand behind it in the queue (and by the policy's own
  bound across classes);
- while something waits or runs, each step computes at least one token or ends or admits something;
- the best-ranked running sequence never yields: some sequence always gets ahead.
"""

import heapq

from sayfa.base.messages import EngineOutput, Event, Request, StepMade, StepStats
from sayfa.base.step import NewRow, RunnerOutput, ScheduledRow, SchedulerOutput
from sayfa.core.kv_cache import KvCache
from sayfa.core.limits import Limits, refuse_impossible, refuse_overload
from sayfa.core.policy import Policy
from sayfa.core.results import Results
from sayfa.core.roster import Roster
from sayfa.core.sequence import RequestState, Sequence, Status

MAX_SKIPPED = 16
"""How many waiting sequences a step looks past; it bounds the time a step takes with a long queue."""
HEADROOM = 64
"""One part in so many of the pool stays free when somebody enters beside others, for those to grow."""


class _Plan:
    """A step in the making. `sequences[i]` is the one that `rows[i]` belongs to."""

    __slots__ = (
        "added", "budget", "coming", "copies", "entered", "full", "now_s", "num_decode", "rows", "sequences", "spare",
    )  # fmt: skip

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.rows: list[ScheduledRow] = []
        self.sequences: list[Sequence] = []
        self.entered: dict[int, Sequence] = {}
        self.added: list[tuple[int, list[int]]] = []
        self.copies: list[tuple[int, int]] = []
        self.num_decode = 0
        self.budget = 0
        self.spare = 0
        """Free pages that nobody who runs will need for the tokens it has now."""
        self.full = False
        """No more sequences enter in this step."""
        self.coming: set[bytes] = set()
        """Hashes of pages that are being computed: who needs the same waits for them and computes them not again."""


class Scheduler:
    """Continuous batching over pages. `limits` are checked here; `policy` orders; `cache` owns the pages."""

    def __init__(self, limits: Limits, policy: Policy, cache: KvCache) -> None:
        limits.check()
        self.limits = limits
        self.cache = cache
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._roster = Roster(cache, policy, limits.max_num_seqs)
        self._results = Results(self._roster, cache)
        self._policy = policy
        self._page_size = cache.page_size
        self._max_chunk = limits.max_chunk or limits.max_num_batched_tokens
        self._step = 0
        self._num_requests = 0
        self._first_event = 0
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._plan: _Plan | None = None
        self._last = _Plan(0.0)

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
            heapq.heappush(self._deadlines, (state.deadline_s, state.number, state))

    def abort(self, request_id: str, now_s: float) -> bool:
        """End a request at once; False if it is not here. Its last outputs come with the next `update`."""
        state = self._roster.requests.get(request_id)
        if state is None:
            return False
        self._roster.outputs += self._roster.end(state, "abort", now_s)
        return True

    def preempt(self, request_id: str, now_s: float) -> int:
        """Make all running branches of a request give up their pages; return how many. They come back by themselves."""
        state = self._roster.requests.get(request_id)
        running = [branch for branch in state.branches if branch.status is Status.RUNNING] if state else []
        for branch in running:
            self._give_up(branch, now_s)
        return len(running)

    def fail_rows(self, rows: list[int], message: str, code: str, now_s: float) -> None:
        """End the requests that own these table rows with finish="error"; late results of theirs are ignored."""
        for state in [sequence.state for sequence in self._roster.running if sequence.row in rows]:
            if state.open_branches:
                self._roster.outputs += self._roster.end(state, "error", now_s, message, code)

    # ------------------------------------------------------------------------------------- decide

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Plan a step. `update` must follow, also if no row was planned (then with a RunnerOutput without rows)."""
        if self._plan is not None:
            raise RuntimeError("schedule was called again before update")
        self._step += 1
        self._expire(now_s)
        self._plan = plan = _Plan(now_s)
        prefills = self._keep_running(plan)
        if prefills or (self._roster.waiting and self._roster.has_row):
            self._share_out(plan, prefills)
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

    def _keep_running(self, plan: _Plan) -> list[Sequence]:
        """Plan one token for each that decodes; return those whose tokens are not all computed, best rank first."""
        running = self._roster.running
        page_size = self._page_size
        prefills = []
        index = 0
        while index < len(running):
            sequence = running[index]
            start = sequence.computed
            if start >= len(sequence.pages) * page_size and not self._make_room(sequence, plan):
                continue
            if start >= sequence.num_prompt and len(sequence.tokens) == start + 1:
                plan.rows.append(ScheduledRow(sequence.row, start, 1, 1, True))
                plan.sequences.append(sequence)
            else:
                prefills.append(sequence)
            index += 1
        plan.num_decode = len(plan.rows)
        plan.budget = self.limits.max_num_batched_tokens - plan.num_decode
        return prefills

    def _make_room(self, sequence: Sequence, plan: _Plan) -> bool:
        """Get a page for the sequence's next token, from others if need be; False if it ended or yielded instead."""
        while True:
            added = self.cache.grow(sequence, sequence.computed + 1)
            if added is not None:
                plan.added.append((sequence.row, added))
                return True
            victim = self._roster.running[-1]
            self._give_up(victim, plan.now_s)
            if victim is sequence:
                return False

    def _give_up(self, sequence: Sequence, now_s: float) -> None:
        """Preempt a sequence, or end it if what it has already fills the whole pool and it could never come back."""
        if self.cache.num_pages(len(sequence.tokens)) > self.cache.pool.capacity:
            self._roster.outputs.append(self._roster.finish(sequence, "length", now_s))
        else:
            self._roster.preempt(sequence)

    def _share_out(self, plan: _Plan, prefills: list[Sequence]) -> None:
        """Give the rest of the budget to prompts.

        The leading prompt (the best in rank that is being computed, else the first that waits) has all but the short
        share. Prompts that end within the rest go next, running ones first, then waiting ones in queue order; what is
        still left goes to the lead, to the other long ones and to those that wait, in this order.
        """
        limit = self.limits
        self._count_spare(plan, prefills)
        if not prefills:
            first = self._roster.waiting[0]
            if not self._admit(plan, first, self.cache.match(first)):
                return
            prefills = list(plan.entered.values())
        lead, others = prefills[0], prefills[1:]
        wish = min(lead.goal - lead.computed, self._max_chunk)
        shorts = plan.budget - min(wish, plan.budget - int(plan.budget * limit.short_share))
        longs = []
        for sequence in others:
            left = sequence.goal - sequence.computed
            if left <= min(shorts, self._max_chunk):
                shorts -= self._compute(plan, sequence, left)
            else:
                longs.append(sequence)
        self._admit_waiting(plan, shorts, short_only=True)
        for sequence in (lead, *longs):
            self._compute(plan, sequence, plan.budget)
        self._admit_waiting(plan, plan.budget, short_only=False)

    def _count_spare(self, plan: _Plan, prefills: list[Sequence]) -> None:
        cache = self.cache
        plan.spare = cache.pool.num_free
        for sequence in prefills:
            plan.spare -= max(0, cache.pages_to_enter(sequence) - len(sequence.pages))
            plan.coming.update(cache.coming(sequence))

    def _admit_waiting(self, plan: _Plan, tokens: int, *, short_only: bool) -> None:
        """Let waiting sequences in, in queue order, while `tokens` last. short_only: those that end within them."""
        passed: list[Sequence] = []
        index = 0
        waiting = self._roster.waiting
        while tokens > 0 and self._is_open(plan) and index < len(waiting) and len(passed) < MAX_SKIPPED:
            sequence = waiting[index]
            matched = self.cache.match(sequence)
            left = sequence.goal - len(matched) * self._page_size
            too_long = short_only and self._source(sequence) is None and left > min(tokens, self._max_chunk)
            if too_long or self._comes_soon(plan, sequence, matched):
                if sequence.overtaken >= self.limits.max_overtakes:
                    return
                passed.append(sequence)
                index += 1
            elif self._admit(plan, sequence, matched):
                tokens -= self._compute(plan, sequence, tokens)
                for other in passed:
                    other.overtaken += 1
                if any(other.overtaken >= self.limits.max_overtakes for other in passed):
                    return

    def _comes_soon(self, plan: _Plan, sequence: Sequence, matched: list[int]) -> bool:
        """Whether the next page this sequence lacks is being computed for another one, so that waiting saves work."""
        if not plan.coming or sequence.overtaken >= self.limits.max_overtakes:
            return False
        return self.cache.first_missing(sequence, len(matched)) in plan.coming

    def _is_open(self, plan: _Plan) -> bool:
        return self._roster.has_row and not plan.full

    def _admit(self, plan: _Plan, sequence: Sequence, matched: list[int]) -> bool:
        """Let a waiting sequence run if policy and pages allow; else nobody enters any more in this step."""
        roster, cache = self._roster, self.cache
        source = self._source(sequence)
        kept = sequence.num_prompt - 1
        if source:
            needed = cache.pages_to_fork(kept)
        else:
            needed = cache.pages_to_enter(sequence) - len(matched) + cache.num_idle(matched)
        headroom = cache.pool.capacity // HEADROOM if roster.running else 0
        if needed > plan.spare - headroom or not self._policy.may_enter(sequence, len(roster.running)):
            plan.full = True
            return False
        plan.spare -= needed
        if source:
            plan.copies += cache.fork(source, sequence, kept) or []
            sequence.computed = kept
        else:
            cache.grow(sequence, len(matched) * self._page_size, matched)
            sequence.computed = len(matched) * self._page_size
            self._count_hits(sequence)
        roster.enter(sequence, plan.now_s)
        plan.entered[sequence.row] = sequence
        plan.coming.update(cache.coming(sequence))
        return True

    def _source(self, sequence: Sequence) -> Sequence | None:
        """Return a running branch of the same request whose prompt is computed, for a branch that has not run yet."""
        if sequence.branch == 0 or len(sequence.tokens) > sequence.num_prompt:
            return None
        for branch in sequence.state.branches:
            if branch.status is Status.RUNNING and branch.computed >= branch.num_prompt:
                return branch
        return None

    def _count_hits(self, sequence: Sequence) -> None:
        state = sequence.state
        if state.admitted_s is None:
            state.num_cached = sequence.computed
            if self.cache.caching:
                self.prefix_queries += state.num_prompt
                self.prefix_hits += sequence.computed

    def _compute(self, plan: _Plan, sequence: Sequence, tokens: int) -> int:
        """Plan up to `tokens` of a sequence's missing tokens, as budget and pages allow; return how many."""
        start, goal = sequence.computed, sequence.goal
        room = self.cache.room(sequence) - start
        count = min(tokens, goal - start, self._max_chunk, plan.budget, room)
        if count <= 0:
            return 0
        added = self.cache.grow(sequence, start + count)
        if added and sequence.row not in plan.entered:
            plan.added.append((sequence.row, added))
        end = start + count
        sample = end == goal and sequence.state.max_tokens > 0
        num_logits = int(sample)
        if sequence.wants_scores:
            num_logits = max(num_logits, end - max(start, sequence.scored))
        plan.rows.append(ScheduledRow(sequence.row, start, count, num_logits, sample))
        plan.sequences.append(sequence)
        plan.budget -= count
        return count

    # ------------------------------------------------------------------------------------- update

    def update(self, output: RunnerOutput, now_s: float) -> list[EngineOutput]:
        """Apply a step's results; return what each branch got, last outputs of ended ones included."""
        plan = self._plan
        if plan is None or output.step != self._step:
            raise RuntimeError(f"update for step {output.step}, but step {self._step} was planned last")
        if [result.row for result in output.rows] != [row.row for row in plan.rows]:
            raise RuntimeError(f"step {output.step}: the results' rows are not the planned rows")
        self._plan = None
        self._last = plan
        outputs = self._roster.outputs
        self._roster.outputs = []
        for sequence, row, result in zip(plan.sequences, plan.rows, output.rows, strict=True):
            if sequence.row == row.row:  # else it was aborted or preempted while the step ran
                self._results.apply(sequence, row, result, now_s, outputs)
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
    def has_work(self) -> bool:
        """Whether a step would do anything: someone runs or waits, or outputs or freed rows are to be told."""
        roster = self._roster
        return bool(roster.running or roster.waiting or roster.outputs or roster.forgotten)

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

    def unstarted(self) -> list[str]:
        """Return the ids of requests that have never run, first in the queue first."""
        return [sequence.id for sequence in self._roster.waiting if sequence.state.admitted_s is None]

    def open_branches(self) -> list[tuple[str, int]]:
        """Return (request id, branch) of every answer that is not complete, branches that do not exist yet included."""
        open_ones: list[tuple[str, int]] = []
        for request_id, state in self._roster.requests.items():
            ended = {branch.branch for branch in state.branches if branch.finish is not None}
            open_ones += [(request_id, branch) for branch in range(state.params.n) if branch not in ended]
        return open_ones

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
        filled = sum(sequence.computed for sequence in roster.running) - pool.num_shares * self._page_size
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
            waiting_tokens=roster.waiting.num_tokens,
            pages_total=pool.capacity,
            pages_used=pool.num_used,
            pages_cached=pool.num_cached,
            slots_used=filled,
            preemptions=roster.num_preemptions,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
        )

    def audit(self) -> None:
        """Raise RuntimeError if any state contradicts another. Slow: for tests, idle moments and after a fault."""
        self._roster.check()
        sequences = self._roster.sequences()
        for sequence in sequences:
            sequence.check(self._page_size)
        self.cache.check(sequences)

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            state = heapq.heappop(self._deadlines)[2]
            if state.open_branches:
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
