"""What an executor computed, kept by whom it was computed for: to compare two runs bit by bit, not id by id."""

from hashlib import blake2b
from typing import Any

import numpy as np

from sayfa.base.step import RunnerOutput, SchedulerOutput
from sayfa.engine.engine import Engine
from sayfa.nn.program.program import InputBatch

Digests = dict[tuple[str, int, int], bytes]
"""(request id, branch, position of the token that was read) → digest of the logits there."""


class LogitsKept:
    """Stands before the runner and the executor of an engine; `digests` are of all logits since it was made.

    The logits are taken as the executor gives them, before biases and penalties. A position that is computed twice (a
    sequence that was preempted) must give the same bits, or this raises AssertionError.
    """

    def __init__(self, engine: Engine) -> None:
        self.digests: Digests = {}
        self._roster = engine._scheduler._roster
        self._runner: Any = engine._runner._runner
        self._executor: Any = self._runner._executor
        self._plan: SchedulerOutput | None = None
        engine._runner._runner = self
        self._runner._executor = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """As the runner; remembers whose rows the next logits are."""
        self._plan = plan
        return self._runner.execute(plan)  # type: ignore[no-any-return]

    def run(self, batch: InputBatch) -> np.ndarray:
        """As the executor; keeps a digest of each row of logits."""
        logits: np.ndarray = self._executor.run(batch)
        assert self._plan is not None
        names = {sequence.row: (sequence.id, sequence.branch) for sequence in self._roster.running}
        index = 0
        for row in self._plan.rows:
            end = row.start + row.count
            for position in range(end - row.num_logits, end):
                key = (*names[row.row], position)
                digest = blake2b(logits[index].tobytes(), digest_size=16).digest()
                assert self.digests.setdefault(key, digest) == digest, f"{key} gave other logits the second time"
                index += 1
        assert index == len(batch.logit_rows)
        return logits
