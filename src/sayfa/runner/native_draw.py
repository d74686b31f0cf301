"""The native draw behind the same door as `runner.draw`. Loaded by `runner.executors` only with the native executor."""

import numpy as np
from numpy.typing import NDArray

from sayfa.nn.program.native import NativeExecutor
from sayfa.runner.draw import DrawColumns, Drawn
from sayfa.runner.sampler import Draw


def make_draw(executor: NativeExecutor) -> Draw:
    """Give the draw that runs on the executor's own threads and instruction set."""

    def draw(logits: NDArray[np.float32], columns: DrawColumns) -> Drawn:
        found = executor.sample(
            logits,
            temperature=columns.temperature,
            top_p=columns.top_p,
            min_p=columns.min_p,
            top_k=columns.top_k,
            uniform=columns.uniform,
            num_top=columns.num_top,
        )
        return Drawn(found["token"], found["logprob"], found["rank"], found["top_ids"], found["top_logprobs"])

    return draw
