"""T36, F39: nothing of one tenant's request reaches another's, whatever happens between them.

Two ways. The made-up runner at scale: a token of an answer is always one of its own context, so a foreign one shows any
mix-up of rows, pages or outputs. A real tiny model: every page is filled with NaN when it is handed out, so that
reading what lay there before ends the request with an error, and each answer equals the one got alone.
"""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fakes.engines import build, make_requests, run
from fakes.fake_engine import make_engine
from fakes.models import make_tiny
from fakes.runner import FakeRunner
from sayfa.base.errors import SayfaError
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import RunnerOutput, SchedulerOutput
from sayfa.engine.engine import Engine

TENANTS = 4
WORDS_EACH = 200
"""Tenant t uses the ids [200 t, 200 t + 200) and no others, so that each id names its owner."""


def own_word(context: list[int], seed: int) -> int:
    """The next token repeats one of the context, chosen by the seed and the length."""
    return context[(seed + 31 * len(context)) % len(context)]


def owner(token: int) -> int:
    return token // WORDS_EACH


class History:
    """Random traffic of all tenants through one engine: aborts, preemption, forks, bad requests, failing rows."""

    def __init__(self, seed: int, fail_share: float = 0.02) -> None:
        self.rng = random.Random(seed)
        self.engine = make_engine(rule=own_word, num_pages=40, max_queued_requests=16, wrap=self._with_faults)
        self.fail_share = fail_share
        self.tenant_of: dict[str, int] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.seen: dict[int, list[tuple[int, ...]]] = {tenant: [] for tenant in range(TENANTS)}
        self.told_cached = 0
        self.ended: dict[str, int] = {}

    def _with_faults(self, runner: FakeRunner) -> FakeRunner:
        runner.fail = lambda row, step: "NaN" if self.rng.random() < self.fail_share else None
        return runner

    def play(self, num_requests: int) -> None:
        """Send so many requests, with steps between, and run them to their end; judge every output."""
        for number in range(num_requests):
            self._add(number)
            for _ in range(self.rng.choice((0, 0, 1, 3))):
                self._step()
            if self.prompts and self.rng.random() < 0.1:
                self._abort(self.rng.choice(list(self.prompts)))
            if self.rng.random() < 0.005:
                self.engine.reset_cache()
        while self.engine.has_work:
            self._step()

    def _add(self, number: int) -> None:
        tenant = self.rng.randrange(TENANTS)
        own = range(WORDS_EACH * tenant, WORDS_EACH * (tenant + 1))
        before = self.seen[tenant]
        if before and self.rng.random() < 0.4:
            prompt = list(self.rng.choice(before))[: self.rng.randint(4, 60)]  # a prefix that was there before
        else:
            prompt = [self.rng.choice(own) for _ in range(self.rng.randint(1, 50))]
        if self.rng.random() < 0.03:
            prompt[0] = self.rng.choice((-1, 10**6))
        params = SamplingParams(
            n=self.rng.choice((1, 1, 1, 3)), max_tokens=self.rng.randint(1, 40), seed=self.rng.randrange(1 << 30)
        )
        request = Request(id=f"r{number}", prompt=prompt, params=params, salt=f"tenant {tenant}", tenant=str(tenant))
        try:
            self.engine.add(request)
        except SayfaError:
            return
        self.tenant_of[request.id], self.prompts[request.id] = tenant, tuple(prompt)
        self.seen[tenant].append(tuple(prompt))

    def _abort(self, request_id: str) -> None:
        self.engine.abort([request_id])
        self.prompts.pop(request_id)

    def _step(self) -> None:
        if not self.engine.has_work:
            return
        message = self.engine.step()
        self.engine.audit()
        for output in message.outputs:
            self._judge(output)

    def _judge(self, output: EngineOutput) -> None:
        tenant = self.tenant_of[output.id]
        foreign = [token for token in output.tokens if owner(token) != tenant]
        assert not foreign, f"{output.id} of tenant {tenant} was given tokens of tenant {owner(foreign[0])}"
        if output.finish is None:
            return
        assert output.error is None or output.error == "NaN"
        self.ended[output.finish] = self.ended.get(output.finish, 0) + 1
        self.told_cached += output.num_cached


@pytest.mark.parametrize("seed", range(5))
def test_f39_no_token_of_one_tenant_reaches_another(seed: int) -> None:
    """1,000 requests a seed, of four tenants, with everything going on that goes wrong."""
    history = History(seed)
    history.play(1_000)
    assert history.told_cached > 100, "no prefix was found: the pages were never shared at all"
    assert min(history.ended.get(end, 0) for end in ("length", "error")) > 10, history.ended


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5, 15))
def test_f39_no_token_of_one_tenant_reaches_another_at_length(seed: int) -> None:
    History(seed).play(10_000)


@pytest.mark.parametrize("seed", range(3))
def test_f29_a_prompt_of_another_tenant_is_never_found_in_the_cache(seed: int) -> None:
    """The same prompt under other salts, in turn: cached tokens are told only for what the own salt has sent before."""
    rng = random.Random(seed)
    engine = make_engine(num_pages=129)
    prompts = [[rng.randrange(100) for _ in range(rng.randint(9, 40))] for _ in range(5)]
    sent: set[tuple[int, str]] = set()
    for number in range(150):
        which, salt = rng.randrange(len(prompts)), f"tenant {rng.randrange(3)}"
        [cached] = [
            output.num_cached
            for output in finish(engine, Request(id=f"r{number}", prompt=prompts[which], salt=salt, params=SHORT))
        ]
        assert (cached > 0) == ((which, salt) in sent), f"prompt {which} of {salt}: {cached} tokens were cached"
        sent.add((which, salt))
        if rng.random() < 0.1:
            engine.reset_cache()
            sent.clear()


SHORT = SamplingParams(max_tokens=2, temperature=0.0)


def finish(engine: Engine, request: Request) -> Iterable[EngineOutput]:
    engine.add(request)
    while engine.has_work:
        yield from (output for output in engine.step().outputs if output.finish is not None)


# ------------------------------------------------------------------------------------------------ a real model


class PoisoningRunner:
    """Fills pages with NaN when a plan hands them out new, before the runner it wraps sees the plan."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.poisoned = 0

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        starts = {row.row: row.start for row in plan.rows}
        pages = self._runner._executor._pages
        page_size = pages.shape[3]
        fresh = [page for _, added in plan.added_pages for page in added] + [target for _, target in plan.copies]
        for new in plan.new:
            fresh += new.pages[-(-starts.get(new.row, 0) // page_size) :]  # those before hold a found prefix
        for page in fresh:
            pages[:, :, page] = float("nan")
        self.poisoned += len(fresh)
        return self._runner.execute(plan)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose pages are large, so that the least memory that can be asked for holds 21 of them."""
    return make_tiny("llama", tmp_path_factory.mktemp("tenants"), num_hidden_layers=6, num_key_value_heads=4)


def poisoned(engine: Engine) -> PoisoningRunner:
    runner = PoisoningRunner(engine._runner._runner)
    engine._runner._runner = runner  # type: ignore[assignment]
    return runner


@pytest.mark.parametrize("seed", range(3))
def test_t36_a_page_is_never_read_before_it_is_written(folder: Path, seed: int) -> None:
    """Pages are few, so that each serves many requests and some are preempted; answers equal those got alone."""
    requests = make_requests(seed, 24)
    requests = [with_salt(request, f"tenant {index % 3}") for index, request in enumerate(requests)]
    crowded = build(folder, kv_cache_memory=1 << 20)
    runner = poisoned(crowded)
    together = run(crowded, requests)
    lonely = build(folder)
    for request in requests:
        alone = run(lonely, [request])
        lonely.reset_cache()
        assert [got.answer for got in together[request.id]] == [got.answer for got in alone[request.id]], request.id
        assert together[request.id][0].last.error is None  # type: ignore[union-attr]
    assert runner.poisoned > 60, "pages were hardly used again"
    assert any(got.last.times.preempted for got in together.values() for got in got), "nothing was preempted"  # type: ignore[union-attr]


def with_salt(request: Request, salt: str) -> Request:
    return Request(**{**{name: getattr(request, name) for name in request.__struct_fields__}, "salt": salt})


def test_the_poison_is_seen(folder: Path) -> None:
    """A page that is poisoned while it is in use ends the request with an error: the check above can fail."""
    engine = build(folder)
    engine.add(Request(id="a", prompt=list(range(40)), params=SamplingParams(max_tokens=20, temperature=0.0)))
    engine.step()
    poison_all: Callable[[], None] = engine._runner._runner._executor.poison_pages  # type: ignore[attr-defined]
    poison_all()
    ends = [output for _ in range(3) if engine.has_work for output in engine.step().outputs if output.finish]
    assert [output.finish for output in ends] == ["error"]
