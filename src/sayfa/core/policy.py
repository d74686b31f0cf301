"""Who is first, who may enter, who yields. Called by the scheduler; must not know pages, budgets or steps.

Three policies behind one protocol:

- `PriorityPolicy`: first come, first served inside a class; a class is ahead of the next one by a fixed number of
  arrivals. That is aging without a clock: the place in the queue is fixed when a request arrives, and a request of
  class p is overtaken by fewer than `class_lead` x (p - q) later ones of each class q < p, however long the load lasts.
- `FairPolicy`: the same, with tenants taking turns by the tokens they use (start-time fair queueing; Goyal, Vin, Cheng
  1996), so that one tenant's flood delays the others by a bounded amount: a newcomer stands behind what runs and at
  most one waiting answer of each other tenant. With one tenant it is first come, first served in classes.
- `StaticPolicy`: a batch is filled, closed and worked off before the next one starts. To compare with.
"""

from collections import OrderedDict
from typing import Protocol

from sayfa.core.sequence import RequestState, Sequence

CLASS_LEAD = 64
PREEMPTIONS_PER_CLASS = 4
MAX_TENANTS = 4096
FIRST_OUTPUT_GUESS, OUTPUT_MEMORY = 128, 64
"""Tokens that an answer is expected to have before any has ended, and over how many ended ones the mean is taken."""


class Policy(Protocol):
    """What the scheduler asks of a policy. All answers depend on arguments and on earlier notes only."""

    def order(self, state: RequestState) -> int:
        """Return the place of a new request in the waiting queue; lower is earlier, ties go by arrival."""

    def queued(self, state: RequestState) -> None:
        """Take note that this request took its place."""

    def rank(self, sequence: Sequence) -> tuple[int, int, int]:
        """Return the place of a sequence that enters among the running ones; the highest yields first."""

    def may_enter(self, sequence: Sequence, num_running: int) -> bool:
        """Whether this waiting sequence may enter in this step."""

    def entered(self, sequence: Sequence) -> None:
        """Take note that this sequence entered."""

    def ended(self, sequence: Sequence) -> None:
        """Take note that this sequence ended, however it did."""


class PriorityPolicy:
    """First come, first served in classes; see the module's head.

    class_lead: arrivals that a class is ahead of the next; with 0 there are no classes.
    """

    def __init__(self, class_lead: int = CLASS_LEAD) -> None:
        self.class_lead = class_lead

    def order(self, state: RequestState) -> int:
        """Return arrival number + class x lead."""
        return state.number + state.request.priority * self.class_lead

    def rank(self, sequence: Sequence) -> tuple[int, int, int]:
        """Return (class, arrival, branch), so that the lowest class and in it the latest arrival yields first.

        Each few preemptions lift a sequence by one class: even under a constant flood of better classes it ends.
        """
        if not self.class_lead:
            return 0, sequence.state.number, sequence.branch
        lifted = sequence.state.request.priority - sequence.preempted // PREEMPTIONS_PER_CLASS
        return lifted, sequence.state.number, sequence.branch

    def queued(self, state: RequestState) -> None:
        """Nothing to note."""

    def may_enter(self, sequence: Sequence, num_running: int) -> bool:
        """Any sequence may enter at any step."""
        return True

    def entered(self, sequence: Sequence) -> None:
        """Nothing to note."""

    def ended(self, sequence: Sequence) -> None:
        """Nothing to note."""


class FairPolicy(PriorityPolicy):
    """Tenants take turns by tokens. `weights`: share of a tenant relative to 1.0 for those not named.

    A request's start tag is the later of the virtual time and its tenant's last finish tag; the finish tag adds the
    request's cost over the weight: prompt tokens, and for each branch the tokens it asks for, but no more than answers
    have on average (few say how long an answer they expect). Branches of one request stand behind each other by that,
    so that n answers are n turns. When a branch ends, what it had more or less than that is settled with its tenant's
    next request. Tags are ordered in whole tokens.
    """

    def __init__(self, weights: dict[str, float] | None = None, class_lead_tokens: int = CLASS_LEAD * 512) -> None:
        super().__init__(class_lead_tokens)
        self._weights = dict(weights or {})
        self._finish: OrderedDict[str, int] = OrderedDict()
        self._now = 0
        self._latest = 0
        """Latest start tag that was served."""
        self._due: dict[int, tuple[int, int]] = {}
        """(class, start tag) of the next branch of each request that has entered and has more, by its number."""
        self._mean_output = float(FIRST_OUTPUT_GUESS)

    def order(self, state: RequestState) -> int:
        """Return the start tag + class x lead, in tokens."""
        start = max(self._now, self._finish.get(state.request.tenant, 0))
        return start + state.request.priority * self.class_lead

    def queued(self, state: RequestState) -> None:
        """Move the tenant's finish tag on by what the request is expected to cost."""
        tenant = state.request.tenant
        weight = self._weights.get(tenant, 1.0)
        state.expected = min(state.max_tokens, round(self._mean_output))
        state.stride = round(state.expected / weight)
        cost = state.num_prompt + state.expected * state.params.n
        self._finish.pop(tenant, None)  # who came last stands last
        self._finish[tenant] = self._start(state) + max(1, round(cost / weight))
        self._trim()

    def entered(self, sequence: Sequence) -> None:
        """Move the virtual time to the start tag of the one that is served."""
        if sequence.preempted:
            return  # it had its turn
        state = sequence.state
        tag = self._start(state) + sequence.branch * state.stride
        self._latest = max(self._latest, tag)
        if sequence.branch + 1 < state.params.n:
            self._due[state.number] = state.request.priority, tag + state.stride
        else:
            self._due.pop(state.number, None)
        self._move_on(state.request.priority)

    def ended(self, sequence: Sequence) -> None:
        """Settle what the branch had against what was expected of it."""
        state = sequence.state
        num_output = len(sequence.tokens) - sequence.num_prompt
        if sequence.finish in ("stop", "length"):
            self._mean_output += (num_output - self._mean_output) / OUTPUT_MEMORY
        tenant = state.request.tenant
        owed = round((num_output - state.expected) / self._weights.get(tenant, 1.0))
        tag = self._finish.get(tenant)
        if tag is not None:
            self._finish[tenant] = max(self._now, tag + owed)
        if state.open_branches == 1:  # its last
            self._due.pop(state.number, None)
            self._move_on(state.request.priority)

    def _start(self, state: RequestState) -> int:
        """Return the start tag of a request that has its place."""
        return state.order - state.request.priority * self.class_lead

    def _move_on(self, priority: int) -> None:
        """Move the virtual time to the latest tag that was served, but not past one that is due in this class or a
        better one: first branches enter before others' further ones are born, and a newcomer must not stand behind all
        of those. Those of a worse class may be due for long; they hold nobody's time up.
        """
        due = [tag for its_class, tag in self._due.values() if its_class <= priority]
        self._now = max(self._now, min((self._latest, *due)))

    def _trim(self) -> None:
        """Forget tenants whose tag is past, and beyond a bound those that came longest ago."""
        while self._finish:
            tenant, tag = next(iter(self._finish.items()))
            if tag > self._now and len(self._finish) <= MAX_TENANTS:
                return
            del self._finish[tenant]


class StaticPolicy(PriorityPolicy):
    """Batches of `max_num_seqs`: who comes later waits until all of the batch have ended.

    Rows that ended early cost nothing here, where a real static batch computes them on as padding; so the comparison
    is kind to this policy.
    """

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__()
        self._size = max_num_seqs
        self._seats = 0

    def may_enter(self, sequence: Sequence, num_running: int) -> bool:
        """Whether the batch is still open; members that come back and further branches always may."""
        if num_running == 0:
            self._seats = self._size
        return self._seats > 0 or self._is_member(sequence)

    def entered(self, sequence: Sequence) -> None:
        """Take a seat."""
        if not self._is_member(sequence):
            self._seats -= 1

    def _is_member(self, sequence: Sequence) -> bool:
        return sequence.preempted > 0 or sequence.branch > 0
