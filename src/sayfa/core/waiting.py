"""The waiting queue: sequences in the order that the policy gave them, with the counts that bound it.

Called by the scheduler only; must not know why somebody waits.

Invariants: sorted by `place`; `num_tokens` is the sum of the waiting sequences' tokens;
`num_answers` counts them, with all branches for a request that has never run, of which only the first is here;
`num_new` and `num_new_tokens` count only requests that have never run (those bound the queue: one that ran and was
preempted is never refused); `num_new_of` counts them by tenant.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from sayfa.core.sequence import Sequence


class WaitingQueue:
    """A sorted list; adding and removing cost a search and a move of pointers."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_tokens = 0
        self.num_answers = 0
        self.num_new = 0
        self.num_new_tokens = 0
        self._new_by_tenant: dict[str, int] = {}

    def num_new_of(self, tenant: str) -> int:
        """Return how many requests of a tenant wait that have never run."""
        return self._new_by_tenant.get(tenant, 0)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def num_before(self, where: tuple[int, int, int]) -> int:
        """Return how many sequences stand before a place."""
        return bisect_left(self._sequences, where, key=place)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._sequences, sequence, key=place)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        index = bisect_left(self._sequences, place(sequence), key=place)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise RuntimeError(f"{sequence.id}/{sequence.branch} is not in the waiting queue")
        del self._sequences[index]
        self._count(sequence, -1)

    def check(self) -> None:
        """Raise RuntimeError at the first broken invariant."""
        places = [place(sequence) for sequence in self._sequences]
        if places != sorted(set(places)):
            raise RuntimeError("the waiting queue is out of order or names a sequence twice")
        new = [len(sequence.tokens) for sequence in self._sequences if sequence.state.admitted_s is None]
        tenants = Counter(s.state.request.tenant for s in self._sequences if s.state.admitted_s is None)
        if tenants != self._new_by_tenant:
            raise RuntimeError(f"the waiting queue counts {self._new_by_tenant} by tenant, there are {dict(tenants)}")
        num_answers = sum(map(_num_answers, self._sequences))
        counts = num_answers, sum(len(sequence.tokens) for sequence in self._sequences), len(new), sum(new)
        if counts != (self.num_answers, self.num_tokens, self.num_new, self.num_new_tokens):
            raise RuntimeError(f"the waiting queue counts {counts} wrongly")

    def _count(self, sequence: Sequence, sign: int) -> None:
        tokens = sign * len(sequence.tokens)
        self.num_tokens += tokens
        self.num_answers += sign * _num_answers(sequence)
        if sequence.state.admitted_s is None:
            self.num_new += sign
            tenant = sequence.state.request.tenant
            self._new_by_tenant[tenant] = self._new_by_tenant.get(tenant, 0) + sign
            if not self._new_by_tenant[tenant]:
                del self._new_by_tenant[tenant]
            self.num_new_tokens += tokens


def place(sequence: Sequence) -> tuple[int, int, int]:
    """Return the key that the queue is sorted by."""
    state = sequence.state
    return state.order + sequence.branch * state.stride, state.number, sequence.branch


def _num_answers(sequence: Sequence) -> int:
    """Return 1, or for a request that has never run all its branches."""
    state = sequence.state
    return state.params.n if state.admitted_s is None and sequence.branch == 0 else 1
