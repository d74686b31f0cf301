"""The native draw behind the same door as `runner.draw`. Loaded by `runner.executors` only with the native executor."""

import numpy as np
from numpy.typing import NDArray

from sayfa.nn.program.native import NativeExecutor
from sayfa.nn.program.native_sample import SampleCall
from sayfa.runner.draw import DrawColumns, Drawn


class NativeDraw:
    """Draws on the executor's own threads and instruction set. What it returns is valid until the next draw."""

    def __init__(self, executor: NativeExecutor) -> None:
        self._executor = executor
        self._columns: DrawColumns | None = None
        self._call: SampleCall | None = None

    def __call__(self, logits: NDArray[np.float32], columns: DrawColumns) -> Drawn:
        """Draw one token for each row of logits [R, V]; columns that are the last ones again cost nothing."""
        call = self._call
        if call is None or columns is not self._columns:
            call = self._executor.sample_call(
                temperature=columns.temperature,
                top_p=columns.top_p,
                min_p=columns.min_p,
                top_k=columns.top_k,
                uniform=columns.uniform,
                num_top=columns.num_top,
            )
            self._columns, self._call = columns, call
        found = call(logits)
        return Drawn(found["token"], found["logprob"], found["rank"], found["top_ids"], found["top_logprobs"])
