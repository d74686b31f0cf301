"""Points that an engine passes with a model in it: a few requests with every kind of wish, on one engine that is kept.

The engine is kept so that what a fault leaves behind shows in the next run; only a fault that ends the process gets a
new one. After each run nothing is held, and the same requests get the same answers again.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from safetensors.numpy import load_file, save_file

from fakes.engines import Got, build
from fakes.models import make_successor
from faults.kinds import KINDS
from sayfa.base.errors import EngineError
from sayfa.base.faults import armed
from sayfa.base.messages import Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.engine.engine import Engine

ALIKE = [3 * k % 251 for k in range(20)]


def wish(name: str, prompt: list[int], **params: object) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(**{"max_tokens": 3, "seed": 5, **params}))


REQUESTS = [
    wish("plain", ALIKE, temperature=0.0),
    wish("scored", ALIKE[:6], temperature=0.0, logprobs=2, prompt_logprobs=1),
    wish("edited", [9, 9, 4], temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=4),
    wish("forked", ALIKE[:18], n=2, temperature=1.0, logprobs=0),
]


@cache
def folder() -> Path:
    """A llama with random weights, made without torch."""
    place = make_successor(Path(mkdtemp(prefix="sayfa-faults-")), {}, 288)
    rng = np.random.default_rng(4)
    tensors = load_file(place / "model.safetensors")
    changed = {name: (rng.normal(size=tensor.shape) * 0.3).astype(np.float32) if tensor.ndim > 1 else tensor
               for name, tensor in tensors.items()}  # fmt: skip
    save_file(changed, place / "model.safetensors", metadata={"format": "pt"})
    return place


def new_engine() -> Engine:
    return build(folder(), "auto", enable_prefix_caching=False, threads=1)


class Stage:
    """An engine, and what its requests must be told."""

    def __init__(self) -> None:
        self.engine = new_engine()
        self.wanted = self._run()
        self.num_ends = 0

    def _run(self) -> dict[str, list[Got]]:
        answers = {request.id: [Got() for _ in range(request.params.n)] for request in REQUESTS}
        for request in REQUESTS:
            self.engine.add(request)
        for _ in range(200):
            if not self.engine.has_work:
                break
            message = self.engine.step()
            self.engine.audit()
            for output in message.outputs:
                got = answers[output.id][output.branch]
                assert got.last is None
                got.tokens += output.tokens
                got.logprobs += output.logprobs
                got.prompt_logprobs += output.prompt_logprobs
                got.last = output if output.finish else None
        assert not self.engine.has_work
        assert message.stats is not None
        assert (message.stats.running, message.stats.waiting, message.stats.pages_used) == (0, 0, 0)
        self._table().check()
        return answers

    def _table(self) -> object:
        return self.engine._runner._runner._table

    def fire(self, name: str, kind: str, nth: int) -> tuple[int, set[str], bool]:
        """Run with one point armed; return (passes, requests that ended with an error, whether the engine ended)."""
        what = KINDS[kind]
        ended = False
        failed: set[str] = set()
        with armed(name, what.action, alter=what.alter, nth=nth) as point:
            try:
                answers = self._run()
            except EngineError:
                ended = True
        if ended:
            self.engine = new_engine()
            self.num_ends += 1
        else:
            for request_id, branches in answers.items():
                ends = {got.last.finish for got in branches if got.last is not None}
                if "error" in ends:
                    failed.add(request_id)
                else:
                    self._compare(request_id, branches)
        return point.passes, failed, ended

    def _compare(self, request_id: str, branches: list[Got]) -> None:
        for branch, (got, wanted) in enumerate(zip(branches, self.wanted[request_id], strict=True)):
            assert got.answer == wanted.answer, f"{request_id}/{branch}: {got.tokens}, should be {wanted.tokens}"

    def check(self) -> None:
        """What a fault left behind would show here."""
        for request_id, branches in self._run().items():
            self._compare(request_id, branches)


def fires_at_start(name: str, kind: str, nth: int) -> tuple[int, BaseException | None]:
    """Build an engine with one point armed; return (passes, what it failed with)."""
    what = KINDS[kind]
    problem: BaseException | None = None
    with armed(name, what.action, alter=what.alter, nth=nth) as point:
        try:
            new_engine()
        except Exception as error:
            problem = error
    return point.passes, problem
