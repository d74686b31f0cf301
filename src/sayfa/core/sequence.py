"""Sequence and its request's state: tokens, counters and pages of one generation. Plain data, no decisions.

Used by `kv_cache` (pages, hashes), `policy` (order) and `scheduler` (everything else); must not know pools or steps.

Positions of a sequence, half open:

    0 ......... cached ......... computed ......... len(tokens)
    |-- found in pages --|-- computed by us --|-- still to compute --|
    0 ....................... num_prompt | output tokens ...........

Invariants (`check` proves them):
1. 0 <= computed < len(tokens), except that a sequence that never samples may reach len(tokens).
2. computed <= len(pages) * page size; a sequence without a row has no pages and computed = 0. One that runs has a
   row, one that is paused may have kept its own, no other has one.
3. num_stored <= len(hashes); hashes[i] is the chain hash of page i and never changes, as tokens only grow.
4. Only the scheduler moves `computed`.
5. Who holds a row has tokens of its own; before that they may be its request's prompt, to which nobody may add.
"""

from enum import Enum

from sayfa.base.messages import FinishReason, Request
from sayfa.base.sampling_params import MAX_SEED

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class RequestState:
    """What the branches of one request have in common.

    number: arrival number, 0 for the first request ever added. order: place in the waiting queue (lower is earlier);
    stride: how far there each further branch stands behind the one before it.
    deadline_s: on the clock that `add` was called with, or None. admitted_s: when the first branch first ran.
    expected: output tokens that the policy counted for each branch. paused: nothing of it is computed until its reader
    has caught up.
    open_branches: branches without a finish reason yet, those that do not exist yet included.
    """

    __slots__ = (
        "admitted_s", "arrival_s", "branches", "deadline_s", "expected", "max_tokens", "num_cached", "num_prompt",
        "number", "open_branches", "order", "params", "paused", "request", "root", "stops",
        "stride",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, arrival_s: float, max_model_len: int) -> None:
        params = request.params
        self.request = request
        self.params = params
        self.number = number
        self.order = number
        self.stride = 0
        self.arrival_s = arrival_s
        self.deadline_s = None if request.deadline_s is None else arrival_s + request.deadline_s
        self.admitted_s: float | None = None
        self.num_prompt = len(request.prompt)
        self.num_cached = 0
        room = max_model_len - self.num_prompt
        self.expected = 0
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.stops = frozenset(params.stop_token_ids + ([] if params.ignore_eos else params.eos_token_ids))
        self.open_branches = params.n
        self.paused = False
        self.branches: list[Sequence] = []
        self.root = b""

    def branch(self, number: int) -> "Sequence":
        """Make the branch with this number, waiting, with nothing computed."""
        sequence = Sequence(self, number)
        self.branches.append(sequence)
        return sequence

    def open(self) -> list[tuple[str, int]]:
        """Return (request id, branch) of each branch that has not ended, those that are not made yet included."""
        ended = {branch.branch for branch in self.branches if branch.status is Status.FINISHED}
        return [(self.request.id, number) for number in range(self.params.n) if number not in ended]


class Sequence:
    """One branch of one request.

    tokens: prompt and output so far. Until it first runs they are the request's own prompt, so that n branches that
    wait have one list in common.
    hashes, contents: of its first whole pages, as far as they were ever needed; the content is what the pool compares.
    scored: prompt positions whose log-probability has been asked for in a step that was carried out.
    rank: place among the running ones, set on admission; the last one yields first.
    overtaken: how many that stood behind it in the queue were let in before it.
    """

    __slots__ = (
        "branch", "computed", "contents", "finish", "first_token_s", "hashes", "num_prompt", "num_stored", "overtaken",
        "pages", "preempted", "rank", "row", "scored", "seed", "state", "status", "tokens",
    )  # fmt: skip

    def __init__(self, state: RequestState, branch: int) -> None:
        self.state = state
        self.branch = branch
        self.tokens = state.request.prompt
        self.num_prompt = state.num_prompt
        self.seed = branch_seed(state.params.seed or 0, branch)
        self.status = Status.WAITING
        self.finish: FinishReason | None = None
        self.computed = 0
        self.scored = 0
        self.pages: list[int] = []
        self.hashes: list[bytes] = []
        self.contents: list[bytes] = []
        self.num_stored = 0
        self.row = -1
        self.rank: tuple[int, int, int] = (0, 0, 0)
        self.preempted = 0
        self.overtaken = 0
        self.first_token_s: float | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.state.request.id

    @property
    def goal(self) -> int:
        """How many tokens must be computed before the next decision about this sequence.

        A request for no tokens samples nothing. If it wants its prompt scored, the last position need not be computed,
        as the logits at position p score the token at p + 1. Only of branch 0, which is scored: another one may find so
        many tokens in pages, and would have nothing left to compute.
        """
        if self.state.max_tokens:
            return len(self.tokens)
        scores = self.state.params.prompt_logprobs is not None and self.branch == 0 and self.num_prompt > 1
        return self.num_prompt - 1 if scores else self.num_prompt

    @property
    def wants_scores(self) -> bool:
        """Whether prompt positions are still to be scored; then no prefix may be skipped."""
        return self.state.params.prompt_logprobs is not None and self.branch == 0 and self.scored < self.num_prompt - 1

    def take_tokens(self) -> None:
        """Make the tokens its own, as it runs from now on and adds to them."""
        if self.tokens is self.state.request.prompt:
            self.tokens = list(self.tokens)

    def check(self, page_size: int) -> None:
        """Raise RuntimeError at the first broken invariant."""
        name = f"{self.id}/{self.branch}"
        top = len(self.tokens) if self.state.max_tokens == 0 else len(self.tokens) - 1
        if not 0 <= self.computed <= top:
            raise RuntimeError(f"{name}: {self.computed} computed of {len(self.tokens)} tokens")
        if self.computed > len(self.pages) * page_size:
            raise RuntimeError(f"{name}: {self.computed} computed in {len(self.pages)} pages of {page_size}")
        if not self.num_stored <= len(self.hashes) <= len(self.tokens) // page_size:
            raise RuntimeError(f"{name}: {self.num_stored} pages stored, {len(self.hashes)} hashes")
        if self.row < 0 and (self.pages or self.computed or self.num_stored):
            raise RuntimeError(f"{name} has no row but holds pages {self.pages}")
        if self.row >= 0 and self.status not in (Status.RUNNING, Status.PAUSED):
            raise RuntimeError(f"{name} is {self.status.value} but holds row {self.row}")
        if self.row >= 0 and self.tokens is self.state.request.prompt:
            raise RuntimeError(f"{name} runs, but would add its output to the request's own prompt")
        if self.status is Status.RUNNING and self.row < 0:
            raise RuntimeError(f"{name} runs without a row")


def branch_seed(seed: int, branch: int) -> int:
    """Return the noise key of a branch: the request's own seed for branch 0, else a mix of seed and branch.

    The mix is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), so neighbouring branches share no bits.
    """
    if branch == 0:
        return seed
    x = (seed + branch * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) & MAX_SEED
