"""An engine process without a model: `python engine_process.py [OPTION ...] FD`, for tests of the wire and of deaths.

It answers each branch of a request with the tokens prompt[0], prompt[0] + 1, ... one a step. Options:
    fail=SENTENCE     cannot start (ModelError)
    die-on=TOKEN      ends with SIGKILL in the first step that would answer a prompt beginning with TOKEN
    die-at-start      ends with SIGKILL before it says hello
    hang-at-start=N   the first N processes hang while they load (the count is kept in the file hang-file=PATH)
    compute-at-start=S  computes for S seconds of processor time while it loads, and tells nothing
    step-s=SECONDS    each step takes that long
    stuck-on=TOKEN    a step that answers such a prompt never ends
    rows=N            at most N branches run, the others wait; who enters is told, without this option nobody is
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from threading import Event

from sayfa.base.config import EngineConfig
from sayfa.base.errors import InvalidRequest, ModelError
from sayfa.base.messages import (
    EngineInfo,
    EngineOutput,
    MemoryPlan,
    Outputs,
    Pong,
    Refused,
    Request,
    RequestAdmitted,
    RequestTimes,
)
from sayfa.engine.process import Progress, run

TIMES = RequestTimes(queue_s=0.0, prefill_s=0.0, decode_s=0.0, preempted=0)


class CountingEngine:
    """Keeps the ServingEngine protocol; one row for each branch, as many as come."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._rows: dict[tuple[str, int], list[int]] = {}
        self._requests: dict[str, Request] = {}
        self._paused: set[tuple[str, int]] = set()
        self._entered: set[tuple[str, int]] = set()
        self._steps = 0
        self.info = EngineInfo(
            model="counting", architecture="none", dtype="none", kv_dtype="none", vocab_size=1 << 30,
            max_model_len=1 << 20, max_num_seqs=64, max_num_batched_tokens=512, max_queued_requests=1024,
            max_queued_tokens=1 << 20, prefix_caching=False, threads=1, isa="none", ops={}, phases=[],
            memory=MemoryPlan(weights_bytes=0, pages_bytes=0, buffers_bytes=0, margin_bytes=0, num_pages=0,
                              page_size=32, bytes_per_page=0), pid=os.getpid(),
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        return bool(self._rows.keys() - self._paused)

    @property
    def has_requests(self) -> bool:
        return bool(self._rows)

    def add(self, request: Request) -> None:
        if not request.prompt:
            raise InvalidRequest("`prompt` is empty.", param="prompt")
        self._requests[request.id] = request
        for branch in range(request.params.n):
            self._rows[request.id, branch] = []

    def abort(self, ids: list[str], branches: list[int] | None = None) -> None:
        for key in [key for key in self._rows if key[0] in ids and (branches is None or key[1] in branches)]:
            del self._rows[key]

    def pause(self, ids: list[str], on: bool) -> None:
        keys = {key for key in self._rows if key[0] in ids}
        self._paused = self._paused | keys if on else self._paused - keys

    def _running(self, tell: Callable[[Outputs], None]) -> list[tuple[str, int]]:
        """The rows that run now; tells of those that are new."""
        if "rows" not in self._options:
            return list(self._rows)
        running = list(islice(self._rows, int(self._options["rows"])))
        if new := [key for key in running if key not in self._entered]:
            self._entered.update(new)
            tell(Outputs(outputs=[], events=[RequestAdmitted(name, branch, 0, 0) for name, branch in new]))
        return running

    def step(self, tell: Callable[[Outputs], None]) -> Outputs:
        self._steps += 1
        running = self._running(tell)
        first_tokens = {str(self._requests[request_id].prompt[0]) for request_id, _ in running}
        if self._options.get("die-on") in first_tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._options.get("stuck-on") in first_tokens:
            Event().wait()
        if "step-s" in self._options:
            time.sleep(float(self._options["step-s"]))
        outputs = []
        for request_id, branch in running:
            if (request_id, branch) in self._paused:
                continue
            request, tokens = self._requests[request_id], self._rows[request_id, branch]
            tokens.append(request.prompt[0] + len(tokens))
            last = len(tokens) == (request.params.max_tokens or 16)
            outputs.append(EngineOutput(id=request_id, branch=branch, tokens=tokens[-1:],
                                        finish="length" if last else None, times=TIMES if last else None))  # fmt: skip
            if last:
                del self._rows[request_id, branch]
        return Outputs(outputs=outputs)

    def refuse_waiting(self) -> list[Refused]:
        return []

    def end_all(self, reason: str) -> Outputs:
        outputs = [EngineOutput(id=key[0], branch=key[1], finish="error", error=reason, error_code="shutdown")
                   for key in self._rows]  # fmt: skip
        self._rows.clear()
        return Outputs(outputs=outputs)

    def reset_cache(self) -> None:
        pass

    def idle(self) -> bool:
        return False

    def describe(self) -> str:
        return f"{len(self._rows)} rows are open"

    def pong(self, number: int) -> Pong:
        return Pong(number=number, steps=self._steps, since_step_s=0.0, busy=self.has_work, expected_step_s=0.01)


def hang() -> None:
    Event().wait()


def main(arguments: list[str]) -> int:
    options = dict(text.partition("=")[::2] for text in arguments[:-1])

    def build(config: EngineConfig, progress: Progress) -> CountingEngine:
        progress("load", 0.5)
        if "fail" in options:
            raise ModelError(options["fail"])
        if "die-at-start" in options:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang-at-start" in options:
            starts = Path(options["hang-file"])
            starts.write_text(starts.read_text() + "x" if starts.exists() else "x", "utf-8")
            if len(starts.read_text("utf-8")) <= int(options["hang-at-start"]):
                hang()
        until_s = time.process_time() + float(options.get("compute-at-start", "0"))
        while time.process_time() < until_s:
            pass
        return CountingEngine(options)

    return run(arguments, build)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
