"""T36, F39: nothing of one tenant's request reaches another's, whatever happens between them.

Two ways. The made-up runner at scale: a token of an answer is always one of its own context, so a foreign one shows any
mix-up of rows, pages or outputs. A real tiny model: a page is filled with NaN while it holds nothing to be found, so
reading it ends the request with an error, and answers equal those got alone. `canary` has the traffic.
"""

import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from canary import WORD, Poisoning, made_up, real

from fakes.engines import build, make_requests, run
from fakes.fake_engine import make_engine
from fakes.models import make_tiny
from sayfa.base.errors import InvalidRequest
from sayfa.base.log import logger
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import RowResult
from sayfa.core.kv_cache import KvCache
from sayfa.core.page_pool import PagePool
from sayfa.core.results import Results
from sayfa.engine.engine import Engine

PLAYED = {
    "length": 500,
    "numerical_error": 50,
    "abort": 50,
    "refused": 10,
    "preempted": 10,
    "scores": 1000,
    "found": 100,
}
"""What must have happened how often in 1,000 requests, or the history proves nothing."""


def check_made_up(seed: int, num_requests: int, caplog: pytest.LogCaptureFixture) -> None:
    """No sighting of a foreign word in tokens, scores, errors, cache hits and the log; no poisoned value read."""
    history, runner = made_up(seed)
    history.play(num_requests)
    assert runner.num_read == 0, f"{runner.num_read} poisoned values were read"
    assert history.told["step_failed"] == 0, "step_failed: a plan asked for what a runner cannot do"
    assert "armed" in caplog.text, "the log was not read"
    assert not re.search(WORD, caplog.text), "the log tells a word"
    assert runner.num_raised > 5
    missing = {name: history.told[name] for name, least in PLAYED.items() if history.told[name] < least}
    assert not missing, f"too little went wrong: {missing}"


@pytest.mark.parametrize("seed", range(5))
def test_f39_no_token_of_one_tenant_reaches_another(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """1,000 requests a seed, of four tenants, with everything going on that goes wrong."""
    check_made_up(seed, 1_000, caplog)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5, 25))
def test_f39_no_token_of_one_tenant_reaches_another_at_length(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """100,000 in all."""
    check_made_up(seed, 5_000, caplog)


def everybody_has_one_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvCache, "open", lambda self, state: setattr(state, "root", b"the same for everybody"))


def a_page_taken_from_the_cache_can_still_be_found(patch: pytest.MonkeyPatch) -> None:
    find = PagePool.find
    seen: dict[bytes, int] = {}

    def broken(self: PagePool, page_hash: bytes, content: bytes) -> int:
        page = find(self, page_hash, content)
        if page:
            seen[page_hash] = page
        stale = seen.get(page_hash, 0)
        return page or (stale if stale and self.users(stale) else 0)

    patch.setattr(PagePool, "find", broken)
    patch.setattr(Engine, "audit", lambda self: None)


def a_branch_s_last_page_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    fork = KvCache.fork

    def broken(self: KvCache, *args: Any) -> list[tuple[int, int]] | None:
        copies = fork(self, *args)
        return None if copies is None else []

    patch.setattr(KvCache, "fork", broken)


def scores_go_to_the_one_before(patch: pytest.MonkeyPatch) -> None:
    apply = Results.apply
    before: list[Any] = [[]]

    def broken(self: Results, sequence: Any, row: Any, result: RowResult, *rest: Any) -> None:
        if result.logprobs:
            before.append(result.logprobs)
            result = msgspec.structs.replace(result, logprobs=before[-2])
        apply(self, sequence, row, result, *rest)

    patch.setattr(Results, "apply", broken)


def a_refusal_tells_the_prompt(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine, request: Request) -> None:
        if max(request.prompt) >= 10**8 or min(request.prompt) < 0:
            raise InvalidRequest(f"{request.prompt} cannot be")

    patch.setattr(Engine, "_check_fields", broken)


def prompts_are_logged(patch: pytest.MonkeyPatch) -> None:
    add = Engine.add

    def broken(self: Engine, request: Request) -> None:
        logger("engine").warning("came: %s", request.prompt)
        add(self, request)

    patch.setattr(Engine, "add", broken)


BREAKS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    everybody_has_one_salt: "its tenant never sent",
    a_page_taken_from_the_cache_can_still_be_found: "values were read|its tenant never sent|step_failed",
    a_branch_s_last_page_is_not_copied: "values were read",
    scores_go_to_the_one_before: "was given tokens of tenant",
    a_refusal_tells_the_prompt: "a refusal tells a word",
    prompts_are_logged: "the log tells a word",
}


@pytest.mark.parametrize("name", BREAKS, ids=lambda broken: broken.__name__)
def test_a_break_is_noticed(
    name: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name(monkeypatch)
    with pytest.raises(AssertionError, match=BREAKS[name]):
        check_made_up(0, 400, caplog)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose pages are large, so that the least memory that can be asked for holds 21 of them."""
    return make_tiny("llama", tmp_path_factory.mktemp("tenants"), num_hidden_layers=6, num_key_value_heads=4)


def check_real(folder: Path, seed: int, num_requests: int) -> None:
    """No poisoned value is read, no tenant's token is given to another, and a sample of the answers is as got alone."""
    with real(folder, seed) as (history, poisoning):
        history.play(num_requests)
    told = history.told
    assert told["numerical_error"] == 0, f"{told['numerical_error']} requests were given what a poisoned page made"
    assert poisoning.num_poisoned > num_requests, "pages were hardly used again"
    assert min(told["length"], told["abort"], told["preempted"], told["found"]) > num_requests // 50, told
    lonely = build(folder, "native", enable_prefix_caching=False, threads=1)
    whole = [name for name, last in history.last.items() if last.finish == "length" and name in history.tokens]
    for name in whole[:: len(whole) // 20]:
        [alone] = run(lonely, [history.requests[name]])[name]
        assert alone.tokens == history.tokens[name], f"{name} was answered otherwise than alone"


def test_f39_no_page_of_one_tenant_is_read_by_another(folder: Path) -> None:
    """500 requests on a real model with 21 pages, all poisoned when they are free."""
    check_real(folder, 0, 500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 5))
def test_f39_no_page_of_one_tenant_is_read_by_another_at_length(folder: Path, seed: int) -> None:
    check_real(folder, seed, 5_000)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_t36_a_page_is_never_read_before_it_is_written(folder: Path, seed: int) -> None:
    """In the reference. Pages are few: each serves many requests, some are preempted; answers equal those got alone."""
    requests = make_requests(seed, 24)
    requests = [with_salt(request, f"tenant {index % 3}") for index, request in enumerate(requests)]
    crowded = build(folder, kv_cache_memory=1 << 20)
    pages: Any = crowded._runner._runner._executor._pages  # type: ignore[attr-defined]

    def poison(fresh: list[int]) -> None:
        for page in fresh:
            pages[:, :, page] = float("nan")

    runner = Poisoning(crowded, poison)
    together = run(crowded, requests)
    lonely = build(folder)
    for request in requests:
        alone = run(lonely, [request])
        lonely.reset_cache()
        assert [got.answer for got in together[request.id]] == [got.answer for got in alone[request.id]], request.id
        assert together[request.id][0].last.error is None  # type: ignore[union-attr]
    assert runner.num_poisoned > 60, "pages were hardly used again"
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
