"""Traffic of several tenants through one engine, in which each token tells whose it is; used by test_tenants.

Requests of all kinds come, are aborted, forced out, refused and broken; steps raise, rows give no numbers. A page whose
tokens nobody may find any more is filled with poison, and what is read of that is counted. `History` judges all that
each request is told: tokens, log-probabilities, errors, and how much it found in the cache.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fakes.engines import build
from fakes.fake_engine import make_engine
from fakes.runner import FakeRunner
from sayfa.base.errors import SayfaError
from sayfa.base.faults import armed
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import RowResult, RunnerOutput, ScheduledRow, SchedulerOutput
from sayfa.engine.engine import Engine

TENANTS = 4
POISON = -1
WORD = r"\b[1-4]\d{6}\b"
"""How a word of the made-up history looks in a text: seven digits, the first one tells the tenant."""
FAULT_SHARE = 0.005
"""Of the steps in which something is broken, and of the rows that give no numbers."""


class Words:
    """The ids of each tenant: `count` of them from `first + tenant * apart` on, so that each names its owner."""

    def __init__(self, first: int, apart: int, count: int) -> None:
        self.first, self.apart, self.count = first, apart, count

    def of(self, tenant: int) -> range:
        start = self.first + tenant * self.apart
        return range(start, start + self.count)

    def owner(self, token: int) -> int:
        return (token - self.first) // self.apart


class Poisoning:
    """Stands before a runner: all pages that hold nothing to be found are poisoned before each step.

    Those are the blank ones, and those that the step's plan hands out new. poison: fills pages with it.
    """

    def __init__(self, engine: Engine, poison: Callable[[list[int]], None]) -> None:
        self._runner: Any = engine._runner._runner
        self._pool = engine._scheduler.cache.pool
        self._page_size = engine._scheduler.cache.page_size
        self._poison = poison
        self._done: set[int] = set()
        self.num_poisoned = 0
        engine._runner._runner = self

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        blank = set(self._pool._blank)
        pages = [*(blank - self._done), *self._fresh(plan)]
        self._done = blank
        self._poison(pages)
        self.num_poisoned += len(pages)
        return self._runner.execute(plan)  # type: ignore[no-any-return]

    def _fresh(self, plan: SchedulerOutput) -> Iterator[int]:
        starts = {row.row: row.start for row in plan.rows}
        for _, added in plan.added_pages:
            yield from added
        for _, target in plan.copies:
            yield target
        for new in plan.new:  # its first pages may hold a prefix that was found
            yield from new.pages[-(-starts.get(new.row, 0) // self._page_size) :]


class CanaryRunner(FakeRunner):
    """The made-up runner: an answer repeats words of its own context, and so do its log-probabilities.

    num_read, num_raised: poisoned slots that were read, steps that raised. fails: whether something is to go wrong now.
    """

    def __init__(self, runner: FakeRunner, fails: Callable[[], bool]) -> None:
        super().__init__(runner.page_size, runner.num_pages, rule=own_word)
        self.fail = lambda row, step: "NaN" if fails() else None
        self.num_read = 0
        self.num_raised = 0
        self._fails = fails

    def poison(self, pages: list[int]) -> None:
        for page in pages:
            self.slots[page] = [POISON] * self.page_size

    def _write(self, plan: SchedulerOutput) -> None:
        if len(plan.rows) > 1 and self._fails():  # alone in its step it would be taken for the guilty one
            self.num_raised += 1
            raise MemoryError("armed")
        super()._write(plan)

    def _read(self, row: Any, position: int) -> int | None:
        value = super()._read(row, position)
        self.num_read += value == POISON
        return value

    def _result(self, step: int, scheduled: ScheduledRow) -> RowResult:
        result = super()._result(step, scheduled)
        row = self.rows[scheduled.row]
        first = scheduled.start + scheduled.count - scheduled.num_logits + 1
        scores = [msgspec.structs.replace(score, top_ids=row.tokens[first + at : first + at + 1], top_logprobs=[-1.0])
                  for at, score in enumerate(result.prompt_logprobs)]  # fmt: skip
        chosen = [msgspec.structs.replace(score, top_ids=[row.tokens[-1], row.tokens[0]], top_logprobs=[-1.0, -2.0])
                  for score in result.logprobs]  # fmt: skip
        return msgspec.structs.replace(result, logprobs=chosen, prompt_logprobs=scores)


def own_word(context: list[int], seed: int) -> int:
    """The next token repeats one of the context, chosen by the seed and the length."""
    return context[(seed + 31 * len(context)) % len(context)]


class History:
    """Random traffic of all tenants through one engine; each has a salt of its own.

    told: endings, refusals and what else happened, counted. find: a pattern of text that no error may hold, if words
    can be told from other numbers. keep: of which answers to remember the tokens, to compare them.
    """

    def __init__(
        self, engine: Engine, words: Words, rng: random.Random, *, longest: int = 60, find: str | None = None
    ) -> None:
        self.engine, self.words, self.rng, self.longest = engine, words, rng, longest
        self._find = find
        self._page_size = engine._scheduler.cache.page_size
        self.requests: dict[str, Request] = {}
        self.open: dict[str, None] = {}
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, EngineOutput] = {}
        self.told: Counter[str] = Counter()
        self._sent: list[list[int]] = []
        self._known: dict[str, Counter[tuple[int, ...]]] = {}

    def play(self, num_requests: int) -> None:
        """Send so many requests, with steps between, and run them to their end; judge every output."""
        rng, scheduler = self.rng, self.engine._scheduler
        for number in range(num_requests):
            self._add(number)
            for _ in range(rng.choice((0, 1, 3, 6))):
                self._step()
            choice = rng.random()
            if self.open and choice < 0.1:
                self._abort(rng.choice(list(self.open)))
            elif self.open and choice < 0.2:
                self.told["preempted"] += scheduler.preempt(rng.choice(list(self.open)), 0.0)
            elif choice < 0.205:
                self.engine.reset_cache()
        while self.engine.has_work:
            self._step()
        assert not self.open, f"{list(self.open)} were never ended"

    def _add(self, number: int) -> None:
        request = self._request(number)
        try:
            self.engine.add(request)
        except SayfaError as error:
            self.told["refused"] += 1
            self._check_text(str(error), "a refusal")
            return
        self.requests[request.id] = request
        self.open[request.id] = None
        self._sent.append(request.prompt)
        known = self._known.setdefault(request.salt, Counter())
        known.update(self._prefixes(request.prompt))

    def _request(self, number: int) -> Request:
        """Own words, or the start of a prompt that was sent before, often by somebody else: then his words."""
        rng = self.rng
        tenant = rng.randrange(TENANTS)
        if self._sent and rng.random() < 0.4:
            prompt = rng.choice(self._sent[-40:])[: rng.randint(4, self.longest)]
            tenant = rng.choice((tenant, self.words.owner(prompt[0])))
        else:
            prompt = rng.choices(self.words.of(tenant), k=rng.randint(1, self.longest - 10))
        owned = None if self._find else list(self.words.of(self.words.owner(prompt[0])))
        if rng.random() < 0.03:
            prompt = [rng.choice((-1, 10**9)), *prompt[1:]]
        scored = rng.random() < 0.2
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 3)), max_tokens=rng.randint(1, 24), seed=rng.randrange(1 << 30),
            temperature=rng.choice((0.0, 1.0)), allowed_token_ids=owned,
            logprobs=rng.choice((None, 2)), prompt_logprobs=1 if scored else None,
        )  # fmt: skip
        return Request(id=f"r-{number}", prompt=prompt, params=params, salt=f"tenant {tenant}", tenant=str(tenant))

    def _prefixes(self, prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[:end]) for end in range(self._page_size, len(prompt) + 1, self._page_size)]

    def _abort(self, request_id: str) -> None:
        self.engine.abort([request_id])
        self.told["aborted"] += 1

    def _step(self) -> None:
        if not self.engine.has_work:
            return
        message = self.engine.step()
        self.engine.audit()
        for output in message.outputs:
            self._judge(output)

    def _judge(self, output: EngineOutput) -> None:
        request = self.requests[output.id]
        owner = self.words.owner(request.prompt[0])
        words = list(output.tokens)
        if self._find is not None:
            scores = output.logprobs + output.prompt_logprobs
            words += [token for score in scores for token in score.top_ids]
            self.told["scores"] += len(scores)
        for token in words:
            sender = self.words.owner(token)
            assert sender == owner, f"{output.id} of tenant {owner} was given tokens of tenant {sender}"
        if request.params.n == 1:
            self.tokens.setdefault(output.id, []).extend(output.tokens)
        if output.finish is not None:
            self._judge_end(output, request)

    def _judge_end(self, output: EngineOutput, request: Request) -> None:
        self.told[output.finish or ""] += 1
        self.told[output.error_code or ""] += 1
        self._check_text(output.error or "", output.id)
        self.open.pop(output.id, None)
        self.last[output.id] = output
        if request.params.n > 1 or output.num_cached == 0 or output.times is None or output.times.preempted:
            return
        self.told["found"] += output.num_cached
        found = tuple(request.prompt[: output.num_cached])
        others = self._known[request.salt][found] - 1
        assert others > 0, f"{output.id} was told of {output.num_cached} cached tokens that its tenant never sent"

    def _check_text(self, text: str, where: str) -> None:
        sighted = re.search(self._find, text) if self._find else None
        assert not sighted, f"{where} tells a word: {text}"


def made_up(seed: int) -> tuple[History, CanaryRunner]:
    """A history on the made-up runner; a word has seven digits, so that it is known wherever it is sighted."""
    rng = random.Random(seed)
    last = [False]

    def fails() -> bool:
        last[0] = not last[0] and rng.random() < FAULT_SHARE  # not twice: the engine would be given up
        return last[0]

    made: list[CanaryRunner] = []

    def wrap(runner: FakeRunner) -> CanaryRunner:
        made.append(CanaryRunner(runner, fails))
        return made[0]

    engine = make_engine(num_pages=40, max_queued_requests=16, wrap=wrap)
    engine.info = msgspec.structs.replace(engine.info, vocab_size=10**8)
    Poisoning(engine, made[0].poison)
    return History(engine, Words(10**6, 10**6, 200), rng, find=WORD), made[0]


@contextmanager
def real(folder: Path, seed: int) -> Iterator[tuple[History, Poisoning]]:
    """A history on a real model with few pages, natively; now and then a step raises.

    A value that is read from a poisoned page makes the row's numbers NaN, and so ends its request with an error. Nobody
    writes to page 0, so it stays poisoned, and copies of it poison others.
    """
    rng = random.Random(seed)
    engine = build(folder, "native", kv_cache_memory=1 << 20, threads=1)
    executor: Any = engine._runner._runner._executor  # type: ignore[attr-defined]
    executor.poison_pages()
    poisoning = Poisoning(engine, lambda pages: executor.copy_pages([(0, page) for page in pages]))
    history = History(engine, Words(0, 60, 60), rng)

    def glitch() -> None:
        if engine._scheduler.num_running > 1 and rng.random() < FAULT_SHARE:
            raise MemoryError("armed")

    with armed("runner.before_sample", glitch, every=True):
        yield history, poisoning
