"""Whole engines over tiny models, and a driver that runs requests through them with an audit after each step."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes import needs
from sayfa.base.messages import EngineOutput, Outputs, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.settings import engine_config
from sayfa.base.step import TokenLogprobs
from sayfa.engine.build import build_engine
from sayfa.engine.engine import Engine

EXECUTORS = ("reference", "native")


def build(folder: Path, executor: str = "reference", **options: Any) -> Engine:
    """Build an engine over a tiny model; natively only where the library is there (see `fakes.needs`)."""
    if executor == "native":
        needs.native_library()
    settings: dict[str, Any] = {
        "max_model_len": 160, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 16,
        "kv_cache_memory": 4 << 20, "kv_cache_dtype": "float32", "threads": 2, "seed": 1, **options,
    }  # fmt: skip
    config = engine_config({"model": str(folder), "executor": executor, **settings})
    return build_engine(config)


@dataclass
class Got:
    """All that one branch was given."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: EngineOutput | None = None

    @property
    def answer(self) -> tuple[Any, ...]:
        """What must be equal between two runs of the same request."""
        assert self.last is not None
        return (self.tokens, self.logprobs, self.prompt_logprobs, self.last.finish, self.last.stop_token)


Answers = dict[str, list[Got]]


def run(
    engine: Engine,
    requests: list[Request],
    each_step: Callable[[int, Outputs], None] = lambda step, message: None,
    *,
    num_at_start: int | None = None,
) -> Answers:
    """Add all requests, step to the end, audit after each step; return what each branch was given.

    num_at_start: so many are there when it begins, and one more comes before each step.
    """
    answers: Answers = {request.id: [Got() for _ in range(request.params.n)] for request in requests}
    coming = list(requests)
    for request in coming[:num_at_start]:
        engine.add(request)
    del coming[: len(coming) if num_at_start is None else num_at_start]
    step = 0
    while engine.has_work or coming:
        if coming:
            engine.add(coming.pop(0))
        message = engine.step()
        engine.audit()
        step += 1
        assert step < 10_000, "the engine does not come to an end"
        for output in message.outputs:
            got = answers[output.id][output.branch]
            assert got.last is None, f"{output.id}/{output.branch} was given something after its end"
            got.tokens += output.tokens
            got.logprobs += output.logprobs
            got.prompt_logprobs += output.prompt_logprobs
            if output.finish is not None:
                got.last = output
        each_step(step, message)
    assert all(got.last is not None for branches in answers.values() for got in branches)
    stats = message.stats
    assert stats is not None
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    return answers


def make_requests(seed: int, count: int, vocab: int = 256, shortest: int = 1, longest: int = 90) -> list[Request]:
    """Random prompts with every kind of sampling wish."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(shortest, longest))]
        params = rng.choice([
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.0, logprobs=3),
            SamplingParams(temperature=1.0, logprobs=0),
            SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
            SamplingParams(temperature=1.3, min_p=0.02, repetition_penalty=1.2),
            SamplingParams(temperature=0.9, presence_penalty=0.5, frequency_penalty=0.3),
            SamplingParams(temperature=0.0, logit_bias={7: 4.0, 9: -100.0}),
            SamplingParams(temperature=1.0, prompt_logprobs=2, logprobs=2),
            SamplingParams(temperature=1.0, stop_token_ids=[11, 12, 13], min_tokens=3),
        ])  # fmt: skip
        fields = {name: getattr(params, name) for name in params.__struct_fields__}
        fields |= {"seed": rng.randrange(1 << 40), "max_tokens": rng.randint(params.min_tokens or 1, 24)}
        requests.append(Request(id=f"r{index}", prompt=prompt, params=SamplingParams(**fields)))
    return requests


def assert_same(left: Answers, right: Answers) -> None:
    """Compare two runs branch by branch; the message shows the first differing position."""
    assert left.keys() == right.keys()
    for request_id in left:
        for branch, (one, two) in enumerate(zip(left[request_id], right[request_id], strict=True)):
            if one.answer == two.answer:
                continue
            pairs = enumerate(zip(one.tokens, two.tokens, strict=False))
            at = next((place for place, (a, b) in pairs if a != b), min(len(one.tokens), len(two.tokens)))
            raise AssertionError(
                f"{request_id}/{branch} differs first at output {at}: {one.tokens[at : at + 5]} and "
                f"{two.tokens[at : at + 5]}; ends {one.answer[3:]} and {two.answer[3:]}"
            )
