"""F04, R02: a preemption forced at any step, whatever is asked for, changes no answer.

Each prompt is forced out after each of its steps, once: in run j prompt i after step i + j (counted in a round), so
that in each run others go on beside those who lose their pages. Every second run has no prefix cache, so everything
is computed again; in the others what was preempted finds its own pages again.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fakes.engines import Answers, assert_same, build, run
from fakes.models import make_tiny
from sayfa.base.messages import Outputs, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import NewRow
from sayfa.core.planner import Planner
from sayfa.core.sequence import Sequence
from sayfa.engine.engine import Engine
from sayfa.runner.request_table import RequestTable

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "edited": {
        "temperature": 1.1, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2,
        "logit_bias": {7: 3.0, 9: -100.0},
    },
    "scored": {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2},
    "branches": {"temperature": 1.0, "n": 2, "logprobs": 0},
    "stops": {"temperature": 1.0, "stop_token_ids": list(range(200, 240)), "min_tokens": 8},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model with full attention, and one with sliding windows that are shorter than most contexts."""
    root = tmp_path_factory.mktemp("models")
    return [make_tiny("llama", root / "llama", seed=3), make_tiny("gemma3", root / "gemma3", seed=4)]


def make_requests(feature: str, num_prompts: int, num_steps: int) -> list[Request]:
    """Prompts of 1 to 60 tokens, and one token more than there are steps to be disturbed after."""
    rng = random.Random(feature)
    requests = []
    for index in range(num_prompts):
        params = SamplingParams(**FEATURES[feature], seed=rng.randrange(1 << 40), max_tokens=num_steps + 1)
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        requests.append(Request(id=f"r{index}", prompt=prompt, params=params))
    return requests


class Disturber:
    """Forces each request out after the step of its own that `after` names; counts how many branches that met."""

    def __init__(self, engine: Engine, after: dict[str, int]) -> None:
        self._scheduler = engine._scheduler
        self._steps_left = after
        self.num_preempted = 0

    def __call__(self, step: int, message: Outputs) -> None:
        running = {sequence.id for sequence in self._scheduler._roster.running}
        for request_id in running & self._steps_left.keys():
            self._steps_left[request_id] -= 1
            if not self._steps_left[request_id]:
                del self._steps_left[request_id]
                self.num_preempted += self._scheduler.preempt(request_id, 0.0) > 0


def disturbed(engine: Engine, requests: list[Request], number: int, num_steps: int) -> tuple[Answers, int]:
    """One run, and how many requests were forced out in it."""
    after = {request.id: (place + number) % num_steps + 1 for place, request in enumerate(requests)}
    disturber = Disturber(engine, after)
    engine.reset_cache()
    return run(engine, requests, disturber), disturber.num_preempted


def check(folder: Path, executor: str, feature: str, num_prompts: int, num_steps: int) -> int:
    """All runs of one feature; return how many preemptions there were."""
    requests = make_requests(feature, num_prompts, num_steps)
    sizes = {
        "max_num_seqs": 2 * num_prompts, "max_num_batched_tokens": max(64, 4 * num_prompts),
        "kv_cache_memory": (num_prompts // 4) << 20, "threads": 1,
    }  # fmt: skip
    engines = [build(folder, executor, enable_prefix_caching=caching, **sizes) for caching in (True, False)]
    undisturbed = run(engines[0], requests)
    num_preempted = 0
    for number in range(num_steps):
        answers, met = disturbed(engines[number % 2], requests, number, num_steps)
        assert_same(answers, undisturbed)
        num_preempted += met
    if feature == "stops":
        assert num_preempted >= num_prompts * FEATURES["stops"]["min_tokens"]
    else:
        assert num_preempted == num_prompts * num_steps, "somebody had ended before his turn"
    return num_preempted


@pytest.mark.parametrize("place", range(len(FEATURES)), ids=list(FEATURES))
def test_f04_forced_out_after_any_step_and_undisturbed(folders: list[Path], place: int) -> None:
    """8 prompts × 32 steps × 6 features."""
    check(folders[place % 2], "native", list(FEATURES)[place], 8, 32)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", [0, 1], ids=["llama", "gemma3"])
def test_f04_forced_out_after_any_step_and_undisturbed_at_length(
    folders: list[Path], family: int, feature: str
) -> None:
    """64 prompts × 64 steps × 6 features."""
    print(feature, check(folders[family], "native", feature, 64, 64), "preemptions")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("feature", FEATURES)
def test_f04_the_same_in_the_reference(folders: list[Path], feature: str) -> None:
    check(folders[0], "reference", feature, 8, 32)


# ------------------------------------------------------------------------------------------------ tests of the tests


def resumed_as(change: Callable[[NewRow], NewRow]) -> Callable[[pytest.MonkeyPatch], None]:
    """A table that takes a sequence in that comes back with its answer so far, changed."""
    put = RequestTable.put

    def broken(self: RequestTable, new: NewRow) -> None:
        put(self, change(new) if len(new.tokens) > new.num_prompt else new)

    return lambda patch: patch.setattr(RequestTable, "put", broken)


def scores_are_told_again(patch: pytest.MonkeyPatch) -> None:
    give_up = Planner.give_up

    def broken(self: Planner, sequence: Sequence, now_s: float) -> None:
        give_up(self, sequence, now_s)
        sequence.scored = 0

    patch.setattr(Planner, "give_up", broken)


another_seed = resumed_as(lambda new: replace(new, seed=new.seed ^ 1))
answer_is_prompt = resumed_as(lambda new: replace(new, num_prompt=len(new.tokens)))
BREAKS = {
    "greedy": resumed_as(lambda new: replace(new, tokens=[*new.tokens[:-1], (new.tokens[-1] + 1) % 256])),
    "sampled": another_seed,
    "edited": answer_is_prompt,
    "scored": scores_are_told_again,
    "branches": another_seed,
    "stops": answer_is_prompt,
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_break_is_noticed(folders: list[Path], feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back otherwise than it went is noticed, with each kind of wish."""
    BREAKS[feature](monkeypatch)
    with pytest.raises(AssertionError, match="differs first at output"):
        check(folders[0], "native", feature, 8, 32)
