"""Planner: spends a step's token budget. Called by `Scheduler.schedule`; must not know what a step's results are.

A step, in order:
1. requests past their deadline end;
2. each running sequence, best rank first, gets room for one more token; where pages are short the last in rank yields
   (preemption by recompute), those that are paused before all others. Sequences that decode are planned right away,
   one token each;
3. what is left of the token budget goes to prompts: the oldest one that is being computed leads, a share is kept for
   short ones, so that neither a long prompt stops the short ones nor they stop it (see `_share_out`). The positions
   that may be scored are shared out by the same rule;
4. waiting sequences enter while rows, pages and tokens last; those that are paused give up theirs for them. One that
   cannot get its pages blocks those behind it. Passed are one for which no position is left to score, and one whose
   next page comes from a prompt that gets ahead in this step, so that it will find what it need not compute.

Bounds that the tests hold:
- a waiting sequence is passed by at most `max_overtakes` that stand behind it in the queue (and by the policy's own
  bound across classes);
- while something waits or runs, each step computes at least one token or ends or admits something;
- the best-ranked running sequence never yields: some sequence always gets ahead;
- the leading prompt gets ahead in each step;
- who enters is computed in the same step.
"""

from sayfa.base.faults import fault
from sayfa.base.step import ScheduledRow
from sayfa.core.kv_cache import KvCache
from sayfa.core.limits import Limits
from sayfa.core.policy import Policy
from sayfa.core.roster import Roster
from sayfa.core.sequence import Sequence, Status
from sayfa.core.waiting import place

MAX_SKIPPED = 16
"""How many waiting sequences a step looks past; it bounds the time a step takes with a long queue."""


class Plan:
    """A step in the making. `sequences[i]` is the one that `rows[i]` belongs to."""

    __slots__ = (
        "added", "budget", "coming", "copies", "entered", "full", "kept", "now_s", "num_decode", "rows", "scores",
        "sequences", "spare",
    )  # fmt: skip

    def __init__(self, now_s: float, scores: int = 0) -> None:
        self.now_s = now_s
        self.rows: list[ScheduledRow] = []
        self.sequences: list[Sequence] = []
        self.entered: dict[int, Sequence] = {}
        self.added: list[tuple[int, list[int]]] = []
        self.copies: list[tuple[int, int]] = []
        self.num_decode = 0
        self.scores = scores
        """Positions that may still be scored in this step."""
        self.kept = 0
        """How many of them only the leading prompt may use."""
        self.budget = 0
        self.spare = 0
        """Free pages that nobody who runs will need for the tokens it has now."""
        self.full = False
        """No more sequences enter in this step."""
        self.coming: set[bytes] = set()
        """Hashes of the pages to come of prompts that get ahead in this step: who needs the same waits for them and
        computes them not again. Those of a prompt that stands still are not worth a wait."""

    @property
    def free_scores(self) -> int:
        """Positions that anybody may have scored."""
        return self.scores - self.kept


class Planner:
    """Makes plans over a roster's sequences; it lets them in and makes them yield, but ends none that could go on.

    prefix_queries, prefix_hits: prompt tokens looked up and found since start, each request counted once.
    """

    def __init__(self, limits: Limits, policy: Policy, cache: KvCache, roster: Roster) -> None:
        self.limits = limits
        self.cache = cache
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._policy = policy
        self._roster = roster
        self._page_size = cache.page_size
        self._max_chunk = limits.max_chunk or limits.max_num_batched_tokens
        self._max_scored = limits.max_scored or limits.max_num_batched_tokens

    def plan(self, now_s: float) -> Plan:
        """Plan one step; `now_s` is only noted where somebody enters or ends."""
        fault("core.plan")
        plan = Plan(now_s, self._max_scored)
        prefills = self._keep_running(plan)
        if prefills or (self._roster.waiting and self._is_open(plan)):
            self._share_out(plan, prefills)
        return plan

    def give_up(self, sequence: Sequence, now_s: float) -> None:
        """Preempt a sequence, or end it if what it has already fills the whole pool and it could never come back."""
        if self.cache.num_pages(len(sequence.tokens)) > self.cache.pool.capacity:
            self._roster.outputs.append(self._roster.finish(sequence, "length", now_s))
        else:
            self._roster.preempt(sequence)

    def _keep_running(self, plan: Plan) -> list[Sequence]:
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

    def _make_room(self, sequence: Sequence, plan: Plan) -> bool:
        """Get a page for the sequence's next token, from others if need be; False if it ended or yielded instead."""
        while True:
            added = self.cache.grow(sequence, sequence.computed + 1)
            if added is not None:
                plan.added.append((sequence.row, added))
                return True
            if self._park_one(plan):
                continue
            victim = self._roster.running[-1]
            self.give_up(victim, plan.now_s)
            if victim is sequence:
                return False

    def _share_out(self, plan: Plan, prefills: list[Sequence]) -> None:
        """Give the rest of the budget to prompts.

        The leading prompt has all but the short share, of the tokens and of the positions to score alike. Prompts that
        end within the rest go next, running ones first, then waiting ones in queue order; what is still left goes to
        the lead, to the other long ones and to those that wait, in this order.
        """
        self._count_spare(plan, prefills)
        prefills = self._find_lead(plan, prefills)
        if not prefills:
            return
        longs = []
        share, scores = self._share(plan.budget), self._share(plan.scores)
        shorts = plan.budget
        lead = prefills[0]
        if min(lead.goal - lead.computed, self._max_chunk) <= self._most(lead, share, scores):
            shorts -= self._compute(plan, lead, share)
        else:
            longs.append(lead)
            shorts -= share
            plan.kept = scores if lead.wants_scores else 0
        for sequence in prefills[1:]:
            left = sequence.goal - sequence.computed
            if left <= self._most(sequence, shorts, plan.free_scores):
                shorts -= self._compute(plan, sequence, left)
            else:
                longs.append(sequence)
        self._admit_waiting(plan, shorts, short_only=True)
        plan.kept = 0
        for sequence in longs:
            self._compute(plan, sequence, plan.budget)
        self._admit_waiting(plan, plan.budget, short_only=False)

    def _find_lead(self, plan: Plan, prefills: list[Sequence]) -> list[Sequence]:
        """Return the prompts that are being computed, first in the queue's order first; the first one leads.

        The head of the queue leads if it stands before them (it has a better class, or nothing is being computed).
        """
        prefills = sorted(prefills, key=place)
        if prefills:
            plan.coming.update(self.cache.coming(prefills[0]))  # who leads gets ahead in each step
        waiting = self._roster.waiting
        if waiting and self._is_open(plan) and (not prefills or place(waiting[0]) < place(prefills[0])):
            first = waiting[0]
            matched = self._match(first)
            if not self._comes_soon(plan, first, matched) and self._admit(plan, first, matched):
                prefills.insert(0, first)
                plan.coming = set(self.cache.coming(first))
        return prefills

    def _count_spare(self, plan: Plan, prefills: list[Sequence]) -> None:
        cache = self.cache
        plan.spare = cache.pool.num_free
        for sequence in prefills:
            plan.spare -= max(0, cache.pages_to_enter(sequence) - len(sequence.pages))

    def _admit_waiting(self, plan: Plan, tokens: int, *, short_only: bool) -> None:
        """Let waiting sequences in, in queue order, while `tokens` last. short_only: those that end within them.

        Who wants scores is passed while no position is left, and enters for a part of the short share once it must not
        be passed again: those behind it that need none must not wait for the leading prompt to be scored.
        """
        passed: list[Sequence] = []
        index = 0
        waiting = self._roster.waiting
        while tokens > 0 and self._is_open(plan) and index < len(waiting) and len(passed) < MAX_SKIPPED:
            sequence = waiting[index]
            matched = self._match(sequence)
            most = self._most(sequence, tokens, plan.free_scores)
            left = sequence.goal - len(matched) * self._page_size
            due = sequence.overtaken >= self.limits.max_overtakes
            too_long = left > most and self._source(sequence) is None and not (due and sequence.wants_scores)
            if not most or (short_only and too_long) or self._comes_soon(plan, sequence, matched):
                if due:
                    return
                passed.append(sequence)
                index += 1
            elif self._admit(plan, sequence, matched):
                tokens -= self._compute(plan, sequence, tokens)
                for other in passed:
                    other.overtaken += 1
                if any(other.overtaken >= self.limits.max_overtakes for other in passed):
                    return

    def _match(self, sequence: Sequence) -> list[int]:
        """Return the pages that a waiting sequence finds; none for a branch, which has its source's in any case."""
        return [] if self._source(sequence) else self.cache.match(sequence)

    def _comes_soon(self, plan: Plan, sequence: Sequence, matched: list[int]) -> bool:
        """Whether the next page this sequence lacks is being computed by another one, so that waiting saves work."""
        if not plan.coming or sequence.overtaken >= self.limits.max_overtakes or self._source(sequence):
            return False
        return self.cache.first_missing(sequence, len(matched)) in plan.coming

    def _is_open(self, plan: Plan) -> bool:
        return not plan.full and (self._roster.has_row or bool(self._roster.held))

    def _park_one(self, plan: Plan) -> bool:
        """Make the sequence that has been paused longest give up its row and pages; False if none has any."""
        held = next(iter(self._roster.held), None)
        if held is None:
            return False
        num_free = self.cache.pool.num_free
        self.give_up(held, plan.now_s)
        plan.spare += self.cache.pool.num_free - num_free
        return True

    def _admit(self, plan: Plan, sequence: Sequence, matched: list[int]) -> bool:
        """Let a waiting sequence run if policy and pages allow; else nobody enters any more in this step."""
        roster, cache = self._roster, self.cache
        source = self._source(sequence)
        kept = sequence.num_prompt - 1
        if not self._policy.may_enter(sequence, len(roster.running)):
            plan.full = True
            return False
        while True:
            if source:
                needed = cache.pages_to_fork(kept)
            else:
                needed = cache.pages_to_enter(sequence) - len(matched) + cache.num_idle(matched)
            if roster.has_row and needed <= plan.spare - cache.headroom(sequence, len(roster.running)):
                break
            if not self._park_one(plan):
                plan.full = True
                return False
        fault("core.admit")
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

    def _share(self, amount: int) -> int:
        """Return the leading prompt's part of a step's tokens or scores: all but the short share, one at least."""
        return amount - int(amount * self.limits.short_share)

    def _most(self, sequence: Sequence, tokens: int, scores: int) -> int:
        """Return how many tokens of a sequence may be computed, out of so many, with so many positions scored."""
        most = min(tokens, self._max_chunk)
        if sequence.wants_scores:
            most = min(most, max(0, sequence.scored - sequence.computed) + scores)
        return most

    def _compute(self, plan: Plan, sequence: Sequence, tokens: int) -> int:
        """Plan up to `tokens` of a sequence's missing tokens, as budget and pages allow; return how many."""
        start, goal = sequence.computed, sequence.goal
        room = self.cache.room(sequence) - start
        count = min(self._most(sequence, tokens, plan.free_scores), goal - start, plan.budget, room)
        if count <= 0:
            return 0
        added = self.cache.grow(sequence, start + count)
        if added and sequence.row not in plan.entered:
            plan.added.append((sequence.row, added))
        end = start + count
        sample = end == goal and sequence.state.max_tokens > 0
        num_logits = int(sample)
        if sequence.wants_scores:
            num_scored = max(0, end - max(start, sequence.scored))
            num_logits = max(num_logits, num_scored)
            plan.scores -= num_scored
        plan.rows.append(ScheduledRow(sequence.row, start, count, num_logits, sample))
        plan.sequences.append(sequence)
        plan.coming.update(self.cache.coming(sequence))
        plan.budget -= count
        return count
