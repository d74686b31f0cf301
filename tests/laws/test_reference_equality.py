"""F05: in the reference mode an answer and every logit behind it depend on the request alone, bit by bit.

Requests of all kinds run alone in an engine that has never seen anything, and then in every other way: in one batch,
coming one after another in another order, in small pieces, with pages of other sizes, and with prefixes that are found.
Each of these is one request run.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fakes.engines import Answers, assert_same, build, make_requests, run
from fakes.logits import Digests, LogitsKept
from fakes.models import make_tiny
from sayfa.base.messages import Request
from sayfa.engine.engine import Engine
from sayfa.nn.program.program import InputBatch
from sayfa.nn.program.reference import ReferenceExecutor

NUM_REQUESTS, GROUP = 72, 12
WAYS = ("batch", "arrival", "pieces", "pages of 32", "pages of 64", "cold", "warm")
LAYERS = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two layers each: one with full attention, one that has a window shorter than most contexts."""
    root = tmp_path_factory.mktemp("models")
    small = {"num_hidden_layers": 2}
    return [
        make_tiny("llama", root / "llama", seed=3, **small),
        make_tiny("gemma3", root / "gemma3", seed=4, **small, layer_types=LAYERS),
    ]


def make_mixed(seed: int) -> list[Request]:
    """Short answers of every kind; each three prompts begin alike, by more than a page."""
    requests: list[Request] = []
    for index, request in enumerate(make_requests(seed, NUM_REQUESTS, shortest=20, longest=40)):
        prompt = (requests[index - index % 3].prompt[:18] + request.prompt)[:48] if index % 3 else request.prompt
        params = msgspec.structs.replace(request.params, max_tokens=min(8, request.params.max_tokens or 8))
        requests.append(msgspec.structs.replace(request, prompt=prompt, params=params))
    return requests


def alone(folder: Path, requests: list[Request]) -> tuple[Answers, Digests]:
    engine = build(folder, enable_prefix_caching=False)
    kept, answers = LogitsKept(engine), {}
    for request in requests:
        answers |= run(engine, [request])
    return answers, kept.digests


def in_a_way(folder: Path, requests: list[Request], way: str) -> tuple[Answers, Digests]:
    options: dict[str, dict[str, int]] = {
        "pieces": {"max_num_batched_tokens": 16}, "pages of 32": {"block_size": 32}, "pages of 64": {"block_size": 64},
    }  # fmt: skip
    engine = build(folder, enable_prefix_caching=way in ("cold", "warm"), **options.get(way, {}))
    if way == "warm":
        return warmed(engine, requests)
    kept = LogitsKept(engine)
    if way == "arrival":
        return run(engine, requests[::-1], num_at_start=1), kept.digests
    return run(engine, requests), kept.digests


def warmed(engine: Engine, requests: list[Request]) -> tuple[Answers, Digests]:
    """A few at a time, so that their pages are still there: each group twice, of which the second run counts."""
    kept, answers, digests = LogitsKept(engine), {}, {}
    for first in range(0, len(requests), GROUP):
        group = requests[first : first + GROUP]
        run(engine, group[::-1])
        kept.digests = {}
        answers |= run(engine, group)
        digests |= kept.digests
    return answers, digests


def assert_same_logits(found: Digests, expected: Digests, requests: list[Request], way: str) -> int:
    """Every logit that a token was drawn from, and every other one that both computed; return how many."""
    prompts = {request.id: len(request.prompt) for request in requests}
    drawn = {key for key in expected if key[2] >= prompts[key[0]] - 1}
    assert drawn <= found.keys(), f"{way}: some logits were not computed"
    differing = [key for key in found.keys() & expected.keys() if found[key] != expected[key]]
    assert not differing, f"{way}: logits differ at {sorted(differing)[:5]}"
    return len(found.keys() & expected.keys())


def check(folder: Path, seed: int) -> tuple[int, int]:
    """All ways of one set of requests; return how many request runs and how many equal rows of logits there were."""
    requests = make_mixed(seed)
    answers, digests = alone(folder, requests)
    num_rows = 0
    for way in WAYS:
        found, kept = in_a_way(folder, requests, way)
        assert_same(found, answers)
        num_rows += assert_same_logits(kept, digests, requests, way)
        if way == "warm":
            hits = [found[r.id][0].last.num_cached for r in requests if r.params.prompt_logprobs is None]  # type: ignore[union-attr]
            assert min(hits) > 0, "a warm run that finds nothing in the cache proves nothing"
    return len(requests) * len(WAYS), num_rows


def test_f05_an_answer_is_the_same_in_every_way_to_run_it(folders: list[Path]) -> None:
    """504 request runs."""
    num_runs, num_rows = check(folders[0], 0)
    assert num_runs >= 500
    assert num_rows > 5 * num_runs


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 21))
def test_f05_an_answer_is_the_same_in_every_way_to_run_it_at_length(folders: list[Path], seed: int) -> None:
    """10,080 request runs in all, half of them with sliding windows."""
    print("request runs, rows of logits:", check(folders[seed % 2], seed))


def test_a_bit_that_depends_on_the_neighbours_is_noticed(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A millionth more where a step has more than one row: no id changes by that."""
    run_batch = ReferenceExecutor.run

    def broken(self: ReferenceExecutor, batch: InputBatch) -> NDArray[np.float32]:
        logits = run_batch(self, batch)
        return logits * np.float32(1 + 2**-20) if len(batch.context_len) > 1 else logits

    monkeypatch.setattr(ReferenceExecutor, "run", broken)
    requests = [request for request in make_mixed(1) if request.params.logprobs is None][:8]
    answers, digests = alone(folders[0], requests)
    found, kept = in_a_way(folders[0], requests, "batch")
    assert_same(found, answers)
    with pytest.raises(AssertionError, match="batch: logits differ"):
        assert_same_logits(kept, digests, requests, "batch")
