"""Who is here: all requests, those that wait, those that run, the table rows, and the ways from one state to the next.

Called by the scheduler, which decides; this file only carries out: enter, preempt, pause, resume, finish, spawn. Must
not know budgets or steps.

    add ─▸ WAITING ─ enter ─▸ RUNNING ─ finish ─▸ FINISHED      (finish is possible in every state)
            │  ▲                │ │ ▲
            │  └─── preempt ────┘ │ │
          pause                 pause resume
            ▾ resume              ▾ │
          parked ◂── preempt ──── held                          (PAUSED: without and with row and pages)

Invariants (`check`): each open branch is in exactly one of `waiting`, `running`, `held` and `parked`, in one of the
last two exactly if its request is paused; `running` is sorted by rank; each row belongs to one running or held
sequence or is free.
"""

from bisect import insort
from collections.abc import Collection
from operator import attrgetter

from sayfa.base.faults import fault
from sayfa.base.messages import (
    EngineOutput,
    FinishReason,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestTimes,
)
from sayfa.base.step import TokenLogprobs
from sayfa.core.kv_cache import KvCache
from sayfa.core.policy import Policy
from sayfa.core.sequence import RequestState, Sequence, Status
from sayfa.core.waiting import WaitingQueue

_rank = attrgetter("rank")


class Roster:
    """State of all requests between steps. `forgotten`: rows freed since the scheduler last told the runner."""

    def __init__(self, cache: KvCache, policy: Policy, num_rows: int) -> None:
        self.requests: dict[str, RequestState] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.held: dict[Sequence, None] = {}
        """Paused ones that kept row and pages until somebody needs them, longest paused first."""
        self.parked: dict[Sequence, None] = {}
        """Paused ones without."""
        self.forgotten: list[int] = []
        self.outputs: list[EngineOutput] = []
        """Last outputs of branches that ended outside `update`; delivered by the next one."""
        self.num_preemptions = 0
        self.finished: dict[str, int] = {}
        """Branches by finish reason, since start."""
        self._cache = cache
        self._policy = policy
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def has_row(self) -> bool:
        """Whether a row is free."""
        return bool(self._free_rows)

    def open(self, state: RequestState) -> None:
        """Take a new request in: its branch 0 waits."""
        self._cache.open(state)
        state.order = self._policy.order(state)
        self._policy.queued(state)
        self.requests[state.request.id] = state
        fault("core.open")
        self.waiting.add(state.branch(0))
        self._cache.events.append(RequestQueued(state.request.id, state.num_prompt))

    def num_before(self, state: RequestState) -> int:
        """Return how many sequences stand before the place in the queue that a new request would have."""
        return self.waiting.num_before((self._policy.order(state), state.number, 0))

    def enter(self, sequence: Sequence, now_s: float) -> None:
        """Let a waiting sequence run; its pages and `computed` are set already."""
        self.waiting.remove(sequence)
        if sequence.state.admitted_s is None:
            sequence.state.admitted_s = now_s
        sequence.take_tokens()
        sequence.status = Status.RUNNING
        sequence.row = self._free_rows.pop()
        sequence.rank = self._policy.rank(sequence)
        insort(self.running, sequence, key=_rank)
        self._policy.entered(sequence)
        event = RequestAdmitted(sequence.id, sequence.branch, sequence.row, sequence.computed)
        self._cache.events.append(event)

    def preempt(self, sequence: Sequence) -> None:
        """Take pages and row from a running or held sequence; it will compute its tokens again.

        One that ran waits at its old place, one that is paused stays so.
        """
        fault("core.preempt")
        self._leave(sequence)
        sequence.preempted += 1
        self.num_preemptions += 1
        self._await(sequence)
        self._cache.events.append(RequestPreempted(sequence.id, sequence.branch))

    def pause(self, state: RequestState) -> None:
        """Let nothing of a request be computed; its branches keep rows and pages as long as nobody needs them."""
        state.paused = True
        for branch in state.branches:
            if branch.status is Status.RUNNING:
                self.running.remove(branch)
                branch.status = Status.PAUSED
                self.held[branch] = None
            elif branch.status is Status.WAITING:
                self.waiting.remove(branch)
                self._await(branch)

    def resume(self, state: RequestState) -> None:
        """Let a paused request go on: where it was, or from the queue if it has lost its pages."""
        state.paused = False
        for branch in state.branches:
            if branch in self.held:
                del self.held[branch]
                branch.status = Status.RUNNING
                insort(self.running, branch, key=_rank)
            elif branch in self.parked:
                del self.parked[branch]
                self._await(branch)

    def spawn(self, state: RequestState) -> None:
        """Let the other branches of a request wait, now that its prompt is computed."""
        for number in range(len(state.branches), state.params.n):
            self._await(state.branch(number))

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_s: float,
        *,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        stop_token: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> EngineOutput:
        """End a branch and return its last output. After an error its pages cannot be found again."""
        fault("core.finish")
        if sequence.row >= 0:
            self._leave(sequence, keep=error is None)
        elif sequence.status is Status.PAUSED:
            del self.parked[sequence]
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish = reason
        self._policy.ended(sequence)
        state = sequence.state
        state.open_branches -= 1
        if not state.open_branches:
            del self.requests[state.request.id]
        self.finished[reason] = self.finished.get(reason, 0) + 1
        self._cache.events.append(RequestFinished(sequence.id, sequence.branch, reason))
        return EngineOutput(
            id=sequence.id,
            branch=sequence.branch,
            tokens=tokens or [],
            logprobs=logprobs or [],
            prompt_logprobs=prompt_logprobs or [],
            finish=reason,
            stop_token=stop_token,
            error=error,
            error_code=error_code,
            num_prompt=state.num_prompt,
            num_cached=state.num_cached,
            times=_times(sequence, now_s),
        )

    def end(
        self,
        state: RequestState,
        reason: FinishReason,
        now_s: float,
        *,
        error: str | None = None,
        code: str | None = None,
        branches: Collection[int] | None = None,
    ) -> list[EngineOutput]:
        """End open branches of a request, those that were not born yet included; return their last outputs.

        branches: which; None for all. They can only be named once the request has run.
        """
        self.spawn(state)
        return [
            self.finish(branch, reason, now_s, error=error, error_code=code)
            for branch in state.branches
            if branch.status is not Status.FINISHED and (branches is None or branch.branch in branches)
        ]

    def sequences(self) -> list[Sequence]:
        """Return all sequences that are not finished."""
        return [*self.running, *self.waiting, *self.held, *self.parked]

    def check(self) -> None:
        """Raise RuntimeError at the first broken invariant."""
        self.waiting.check()
        rows = sorted(self._free_rows + [sequence.row for sequence in (*self.running, *self.held)])
        if rows != list(range(self._num_rows)):
            raise RuntimeError(f"rows are lost or doubled: {rows}")
        if self.running != sorted(self.running, key=_rank):
            raise RuntimeError("the running sequences are out of rank")
        places = {id(sequence): sequence for sequence in self.sequences()}
        if len(places) != len(self.running) + len(self.waiting) + len(self.held) + len(self.parked):
            raise RuntimeError("a sequence stands in two places, or is listed twice")
        for state in self.requests.values():
            unborn = state.params.n - len(state.branches)
            alive = [branch for branch in state.branches if branch.status is not Status.FINISHED]
            if len(alive) + unborn != state.open_branches or not state.open_branches:
                raise RuntimeError(f"{state.request.id} counts {state.open_branches} open branches wrongly")
            for branch in alive:
                if places.pop(id(branch), None) is None:
                    raise RuntimeError(f"{branch.id}/{branch.branch} is open but stands nowhere")
                if (branch in self.held or branch in self.parked) != state.paused:
                    raise RuntimeError(f"{branch.id}/{branch.branch} is {branch.status.value}, paused: {state.paused}")
        if places:
            raise RuntimeError(f"sequences without a request: {[sequence.id for sequence in places.values()]}")

    def _await(self, sequence: Sequence) -> None:
        """Put a sequence without a row where it belongs until it may run."""
        if sequence.state.paused:
            sequence.status = Status.PAUSED
            self.parked[sequence] = None
        else:
            sequence.status = Status.WAITING
            self.waiting.add(sequence)

    def _leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        if sequence.status is Status.PAUSED:
            del self.held[sequence]
        else:
            self.running.remove(sequence)
        self._cache.release(sequence, keep=keep)
        self._free_rows.append(sequence.row)
        self.forgotten.append(sequence.row)
        sequence.row = -1


def _times(sequence: Sequence, now_s: float) -> RequestTimes:
    """Split arrival → now into queue, prefill and decode. What a preemption costs is in the part it interrupted."""
    state = sequence.state
    admitted_s = now_s if state.admitted_s is None else state.admitted_s
    first_s = now_s if sequence.first_token_s is None else sequence.first_token_s
    return RequestTimes(
        queue_s=admitted_s - state.arrival_s,
        prefill_s=first_s - admitted_s,
        decode_s=now_s - first_s,
        preempted=sequence.preempted,
    )
