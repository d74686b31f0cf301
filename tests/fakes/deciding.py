"""A small world for tests of the deciding wing: scheduler, runner without a model, oracle and a map of the pages.

`World.step` makes one step and checks after it what must hold after every step. Needs no torch and asks no clock: time
is a number that the test moves.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field

from fakes.runner import FakeRunner, Rule, mix_rule
from sayfa.base.errors import RequestError
from sayfa.base.messages import (
    EngineOutput,
    Event,
    PageCopied,
    PageDropped,
    PagesReleased,
    PagesShared,
    PagesTaken,
    PageStored,
    Request,
)
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import SchedulerOutput
from sayfa.core.kv_cache import KvCache, ReservedCache
from sayfa.core.page_pool import PagePool
from sayfa.core.policy import Policy, PriorityPolicy
from sayfa.core.scheduler import Limits, Scheduler
from sayfa.core.sequence import Sequence, branch_seed
from sayfa.core.waiting import place

VOCAB = 50
MAX_STEPS_WITHOUT_PROGRESS = 64


def request(name: object, prompt: list[int], *, priority: int = 0, tenant: str = "", salt: str = "",
            deadline_s: float | None = None, **params: object) -> Request:  # fmt: skip
    """Make a request; other keywords are sampling params. The seed defaults to 1."""
    params.setdefault("seed", 1)
    return Request(
        id=str(name),
        prompt=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        priority=priority,
        tenant=tenant,
        salt=salt,
        deadline_s=deadline_s,
    )


def expected(req: Request, branch: int, rule: Rule, max_model_len: int) -> tuple[list[int], str, int | None]:
    """What a branch must give, computed without scheduler or pages: (tokens, finish, stop token)."""
    params = req.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(params.eos_token_ids))
    room = max_model_len - len(req.prompt)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    context, tokens = list(req.prompt), []
    seed = branch_seed(params.seed or 0, branch)
    while len(tokens) < most:
        token = rule(context, seed)
        if token in stops and len(tokens) >= params.min_tokens:
            return tokens, "stop", token
        tokens.append(token)
        context.append(token)
    return tokens, "length", None


@dataclass
class Answer:
    """All that one branch was told."""

    tokens: list[int] = field(default_factory=list)
    scores: list[int] = field(default_factory=list)
    last: EngineOutput | None = None

    @property
    def finish(self) -> str | None:
        return self.last.finish if self.last else None


class PageMap:
    """Page tables rebuilt from the event stream alone."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.hashes: dict[int, str] = {}
        self.users: dict[int, int] = defaultdict(int)

    def apply(self, event: Event) -> None:
        match event:
            case PagesTaken(pages, name, branch):
                for page in pages:
                    assert self.users[page] == 0
                    assert page not in self.hashes
                    self._add(page, name, branch)
            case PageCopied(source, page, name, branch):
                assert self.users[page] == 0
                assert self.users[source] > 0
                assert page not in self.hashes
                self._add(page, name, branch)
            case PagesShared(pages, name, branch):
                for page in pages:
                    assert self.users[page] > 0 or page in self.hashes
                    self._add(page, name, branch)
            case PagesReleased(pages, name, branch):
                assert self.tables.pop((name, branch)) == pages[::-1]
                for page in pages:
                    self.users[page] -= 1
            case PageStored(page, page_hash, _):
                assert page_hash not in self.hashes.values()
                self.hashes[page] = page_hash
            case PageDropped(page, page_hash):
                assert self.hashes.pop(page) == page_hash

    def _add(self, page: int, name: str, branch: int) -> None:
        self.tables[name, branch].append(page)
        self.users[page] += 1

    def check(self, sequences: list[Sequence], pool: PagePool) -> None:
        """AssertionError if the rebuilt map is not the pool's own."""
        own = {(s.id, s.branch): s.pages for s in sequences if s.pages}
        assert {key: pages for key, pages in self.tables.items() if pages} == own
        assert all(self.users[page] == pool.users(page) for page in range(pool.num_pages))
        stored = {page: pool.hash_of(page).hex() for page in range(pool.num_pages) if pool.hash_of(page)}  # type: ignore[union-attr]
        assert self.hashes == stored


class World:
    """A scheduler with its runner. `audit_every`: steps between two full audits."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        caching: bool = True,
        reserved: bool = False,
        policy: Policy | None = None,
        rule: Rule | None = None,
        audit_every: int = 1,
        **limits: object,
    ) -> None:
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64}
        self.limits = Limits(**{**defaults, **limits})  # type: ignore[arg-type]
        self.pool = PagePool(num_pages)
        if reserved:
            cache: KvCache = ReservedCache(self.pool, page_size, self.limits.max_model_len)
        else:
            cache = KvCache(self.pool, page_size, model_digest="tiny", caching=caching)
        self.scheduler = Scheduler(self.limits, policy or PriorityPolicy(), cache)
        self.rule = rule or mix_rule(VOCAB)
        self.runner = FakeRunner(page_size, num_pages, rule=self.rule)
        self.requests: dict[str, Request] = {}
        self.answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
        self.map = PageMap()
        self.events: list[Event] = []
        self.now_s = 0.0
        self.num_steps = 0
        self._audit_every = audit_every
        self._next_event = 0
        self._salts: dict[int, str] = {}
        self._idle_steps = 0

    def add(self, req: Request) -> bool:
        """Add a request; False if it was refused."""
        try:
            self.scheduler.add(req, self.now_s)
        except RequestError:
            return False
        self.requests[req.id] = req
        return True

    def step(self, *, seconds: float = 1.0) -> SchedulerOutput:
        """Decide, compute, update, check."""
        plan = self.scheduler.schedule(self.now_s)
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len(plan.rows) <= self.limits.max_num_seqs
        self._check_scores(plan)
        self._check_lead(plan)
        rows = {row.row for row in plan.rows}
        assert all(new.row in rows for new in plan.new), "somebody was let in of whom nothing is computed"
        output = self.runner.execute(plan)
        self.now_s += seconds
        self.take(self.scheduler.update(output, self.now_s))
        self._check_progress(plan)
        self.check()
        self.num_steps += 1
        return plan

    def take(self, outputs: list[EngineOutput]) -> None:
        """Note outputs; nothing may come after a branch's last one."""
        for output in outputs:
            answer = self.answers[output.id, output.branch]
            assert answer.last is None, f"{output.id}/{output.branch} was told something after its end"
            answer.tokens += output.tokens
            answer.scores += [score.rank for score in output.prompt_logprobs]
            if output.finish is not None:
                answer.last = output

    def run(self, *, max_steps: int = 5000) -> None:
        """Step until nothing is left to do."""
        while self.scheduler.has_work:
            self.step()
            assert self.num_steps < max_steps, "the world does not come to rest"

    def check(self) -> None:
        """Check events against the pool, and now and then everything."""
        first, events = self.scheduler.take_events()
        assert first == self._next_event, "the event numbers have a gap"
        self._next_event += len(events)
        self.events += events
        for event in events:
            self.map.apply(event)
            self._check_salt(event)
        if self.num_steps % self._audit_every == 0:
            self.scheduler.audit()
            self.map.check(self.sequences(), self.pool)
            self._check_slots()

    def _check_salt(self, event: Event) -> None:
        """A page belongs to the salt it was taken under; nobody else may share it."""
        if isinstance(event, PagesTaken):
            self._salts.update(dict.fromkeys(event.pages, self.requests[event.request].salt))
        elif isinstance(event, PageCopied):
            self._salts[event.page] = self.requests[event.request].salt
        elif isinstance(event, PagesShared):
            own = self.requests[event.request].salt
            assert all(self._salts[page] == own for page in event.pages), "a page crossed from salt to salt"

    def sequences(self) -> list[Sequence]:
        return self.scheduler._roster.sequences()

    def check_answers(self) -> None:
        """Each branch that was not cut short must have given exactly what the oracle gives."""
        for name, req in self.requests.items():
            for branch in range(req.params.n):
                answer = self.answers[name, branch]
                assert answer.last is not None, f"{name}/{branch} was never ended"
                tokens, finish, stop = expected(req, branch, self.rule, self.limits.max_model_len)
                assert answer.tokens == tokens[: len(answer.tokens)], name
                if answer.finish in ("abort", "deadline", "error") or self._filled_pool(req, answer):
                    continue
                assert (answer.tokens, answer.finish, answer.last.stop_token) == (tokens, finish, stop), name

    def _filled_pool(self, req: Request, answer: Answer) -> bool:
        """Whether an early "length" is right: the branch's tokens need more pages than there are."""
        num_tokens = len(req.prompt) + len(answer.tokens)
        return answer.finish == "length" and num_tokens > self.pool.capacity * self.scheduler.cache.page_size

    def _check_slots(self) -> None:
        """The figure for filled slots must be what the page tables say, counted one by one."""
        page_size = self.scheduler.cache.page_size
        slots = {
            (sequence.pages[p // page_size], p % page_size)
            for sequence in self.sequences()
            for p in range(sequence.computed)
        }
        assert self.scheduler.stats(0.0, 0.0, 0.0, {}).slots_used == len(slots)

    def _check_scores(self, plan: SchedulerOutput) -> None:
        """The positions scored in a step are bounded; each row may want the logits that it draws from beside them."""
        if self.limits.max_scored is not None:
            num_scored = sum(row.num_logits - row.sample for row in plan.rows)
            assert num_scored <= self.limits.max_scored, "more positions are scored than may be"

    def _check_lead(self, plan: SchedulerOutput) -> None:
        """The first in the queue's order of those whose tokens are not all computed gets ahead, whoever is beside.

        Who has just come in is one of them, even if pages hold all its tokens but the last.
        """
        new = {new.row for new in plan.new}
        running = self.scheduler._roster.running
        prompts = [s for s in running if s.row in new or s.computed < max(s.num_prompt, len(s.tokens) - 1)]
        if prompts:
            lead = min(prompts, key=place)
            assert lead.row in {row.row for row in plan.rows}, f"{lead.id} leads, but nothing of it is computed"

    def _check_progress(self, plan: SchedulerOutput) -> None:
        self._idle_steps = 0 if plan.rows or not self.scheduler.num_waiting else self._idle_steps + 1
        assert self._idle_steps < MAX_STEPS_WITHOUT_PROGRESS, "something waits and nothing moves"


def random_request(rnd: random.Random, name: object, *, max_prompt: int = 20, max_output: int = 16) -> Request:
    """A request of any kind, with prompts that often start alike."""
    length = rnd.randrange(1, max_prompt + 1)
    prompt = [(7 * i) % VOCAB for i in range(length)]
    for _ in range(rnd.choice([0, 0, 1, 2])):
        prompt[rnd.randrange(length)] = rnd.randrange(VOCAB)
    return request(
        name,
        prompt,
        priority=rnd.choice([0, 0, 0, 1, -1]),
        salt=rnd.choice(["", "", "other"]),
        deadline_s=rnd.choice([None, None, None, rnd.uniform(1, 60)]),
        n=rnd.choice([1, 1, 1, 2, 4]),
        seed=rnd.randrange(-(2**63), 2**63),
        max_tokens=rnd.choice([None, 0, 1, rnd.randrange(max_output + 1), rnd.randrange(max_output + 1)]),
        min_tokens=0,
        stop_token_ids=rnd.choice([[], [rnd.randrange(VOCAB)]]),
        eos_token_ids=rnd.choice([[], [3, 4]]),
        ignore_eos=rnd.random() < 0.2,
        prompt_logprobs=rnd.choice([None, None, 0]),
    )
