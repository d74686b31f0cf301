"""Tests of the tests: each small break of the deciding wing is noticed by the random histories.

A mutant replaces one method by a broken one; the histories of `test_core_scheduler` must then fail for some seed.
"""

from collections.abc import Callable

import pytest
from test_core_scheduler import History

from sayfa.core.kv_cache import KvCache
from sayfa.core.page_pool import PagePool
from sayfa.core.planner import Plan, Planner
from sayfa.core.roster import Roster
from sayfa.core.sequence import RequestState, Sequence

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}
MOST_HISTORIES = 80


def mutant(patch: Patch) -> Patch:
    MUTANTS[patch.__name__] = patch
    return patch


@mutant
def a_shared_page_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    share = PagePool.share

    def broken(self: PagePool, page: int) -> None:
        if self.users(page) != 1:
            share(self, page)

    patch.setattr(PagePool, "share", broken)


@mutant
def a_page_is_lost_at_release(patch: pytest.MonkeyPatch) -> None:
    release = KvCache.release

    def broken(self: KvCache, sequence: Sequence, *, keep: bool = True) -> None:
        if len(sequence.pages) > 3:
            sequence.pages.pop(1)
        release(self, sequence, keep=keep)

    patch.setattr(KvCache, "release", broken)


@mutant
def the_salt_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def broken(self: KvCache, state: RequestState) -> None:
        state.root = b"the same for everybody"

    patch.setattr(KvCache, "open", broken)


@mutant
def a_hit_leaves_nothing_to_compute(patch: pytest.MonkeyPatch) -> None:
    def broken(self: KvCache, sequence: Sequence) -> list[int]:
        pages = []
        for index in range(len(sequence.tokens) // self.page_size):
            page = self.pool.find(*self._identity(sequence, index))
            if not page or sequence.wants_scores or not self.caching:
                break
            pages.append(page)
        return pages

    patch.setattr(KvCache, "match", broken)


@mutant
def the_parent_is_left_out_of_a_page_s_identity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvCache, "_parent", lambda self, sequence, index: b"")


@mutant
def scored_prompts_skip_found_pages(patch: pytest.MonkeyPatch) -> None:
    def broken(self: KvCache, sequence: Sequence) -> list[int]:
        pages = []
        for index in range((len(sequence.tokens) - 1) // self.page_size):
            page = self.pool.find(*self._identity(sequence, index))
            if not page:
                break
            pages.append(page)
        return pages

    patch.setattr(KvCache, "match", broken)


@mutant
def a_page_is_stored_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    commit = KvCache.commit

    def broken(self: KvCache, sequence: Sequence) -> None:
        computed = sequence.computed
        whole = min(len(sequence.tokens), len(sequence.pages) * self.page_size) // self.page_size
        sequence.computed = whole * self.page_size
        commit(self, sequence)
        sequence.computed = computed

    patch.setattr(KvCache, "commit", broken)


@mutant
def a_fork_shares_the_open_page(patch: pytest.MonkeyPatch) -> None:
    def broken(self: KvCache, source: Sequence, branch: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        for page in source.pages[: self.num_pages(num_tokens)]:
            self.pool.share(page)
            branch.pages.append(page)
        return []

    patch.setattr(KvCache, "fork", broken)


@mutant
def a_fork_forgets_its_copy(patch: pytest.MonkeyPatch) -> None:
    fork = KvCache.fork

    def broken(self: KvCache, source: Sequence, branch: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        copies = fork(self, source, branch, num_tokens)
        return copies if copies is None else []

    patch.setattr(KvCache, "fork", broken)


@mutant
def a_freed_row_is_not_told(patch: pytest.MonkeyPatch) -> None:
    leave = Roster._leave

    def broken(self: Roster, sequence: Sequence, *, keep: bool = True) -> None:
        leave(self, sequence, keep=keep)
        if sequence.preempted:
            self.forgotten.pop()

    patch.setattr(Roster, "_leave", broken)


@mutant
def an_event_is_missing(patch: pytest.MonkeyPatch) -> None:
    reset = KvCache.reset

    def broken(self: KvCache) -> int:
        num_events = len(self.events)
        number = reset(self)
        del self.events[num_events:]
        return number

    patch.setattr(KvCache, "reset", broken)


@mutant
def the_growing_one_takes_from_nobody(patch: pytest.MonkeyPatch) -> None:
    """Who finds no page waits for one without a claim: two that hold half the pool each stand still."""

    def broken(self: Planner, sequence: Sequence, plan: Plan) -> bool:
        added = self.cache.grow(sequence, sequence.computed + 1)
        if added is None:
            self._roster.preempt(sequence)
            return False
        plan.added.append((sequence.row, added))
        return True

    patch.setattr(Planner, "_make_room", broken)


@mutant
def a_paused_one_is_planned_on(patch: pytest.MonkeyPatch) -> None:
    pause = Roster.pause

    def broken(self: Roster, state: RequestState) -> None:
        pause(self, state)
        self.running += self.held

    patch.setattr(Roster, "pause", broken)


@mutant
def a_parked_one_does_not_come_back(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Roster, state: RequestState) -> None:
        parked = [branch for branch in state.branches if branch in self.parked]
        resume(self, state)
        for branch in parked:
            self.waiting.remove(branch)

    resume = Roster.resume
    patch.setattr(Roster, "resume", broken)


@mutant
def a_branch_born_while_paused_waits(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Roster, state: RequestState) -> None:
        for number in range(len(state.branches), state.params.n):
            self.waiting.add(state.branch(number))

    patch.setattr(Roster, "spawn", broken)


@mutant
def a_request_s_end_forgets_branches_not_born(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "spawn", lambda self, state: None)


@mutant
def the_budget_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    compute = Planner._compute

    def broken(self: Planner, plan: Plan, sequence: Sequence, tokens: int) -> int:
        plan.budget += 1
        return compute(self, plan, sequence, tokens + 1)

    patch.setattr(Planner, "_compute", broken)


@mutant
def no_scored_position_is_kept_for_the_leading_prompt(patch: pytest.MonkeyPatch) -> None:
    class Greedy(Plan):
        __slots__ = ()
        free_scores = property(lambda self: self.scores)

    patch.setattr("sayfa.core.planner.Plan", Greedy)


@mutant
def a_row_is_given_to_who_can_score_nothing(patch: pytest.MonkeyPatch) -> None:
    most = Planner._most

    def broken(self: Planner, sequence: Sequence, tokens: int, scores: int) -> int:
        return most(self, sequence, tokens, scores if sequence.row >= 0 else max(1, scores))

    patch.setattr(Planner, "_most", broken)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_histories_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, LookupError, RecursionError)):
        play(range(MOST_HISTORIES))


def test_without_a_break_the_same_histories_pass() -> None:
    play(range(10))


def play(seeds: range) -> None:
    for seed in seeds:
        History(seed).play(120)
