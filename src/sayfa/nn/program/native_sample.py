"""The native draw: logits → token ids and log-probabilities. The meaning is `runner.draw`'s; this is its fast twin."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sayfa.nn.program.native_library import library


def sample(
    logits: NDArray[np.float32],
    *,
    temperature: NDArray[np.float32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    top_k: NDArray[np.int32],
    uniform: NDArray[np.float64],
    num_top: NDArray[np.int32],
    pool: Any = None,
    isa: str = "",
) -> dict[str, NDArray[Any]]:
    """Draw a token for each row of logits [R, V]; the logits may be changed.

    Columns are [R]. Returns token, logprob, rank [R] and top_ids, top_logprobs [R, K] with K = largest num_top, at
    least 1. pool: the workers, or None for the calling thread alone. Raises ValueError for arrays that do not fit.
    """
    num_rows, vocab = logits.shape
    if logits.dtype != np.float32 or logits.strides[1] != 4:
        raise ValueError("logits must be float32 with the vocabulary side by side")
    width = max(1, int(num_top.max(initial=0)))
    inputs = [
        np.ascontiguousarray(column, dtype)
        for column, dtype in (
            (temperature, np.float32), (top_p, np.float32), (min_p, np.float32), (top_k, np.int32),
            (uniform, np.float64), (num_top, np.int32),
        )
    ]  # fmt: skip
    for column in inputs:
        if column.shape != (num_rows,):
            raise ValueError(f"a column has shape {column.shape}; one number for each of {num_rows} rows is needed")
    out: dict[str, NDArray[Any]] = {
        "token": np.full(num_rows, -1, np.int32),
        "logprob": np.full(num_rows, -9999.0, np.float32),
        "rank": np.zeros(num_rows, np.int32),
        "top_ids": np.zeros((num_rows, width), np.int32),
        "top_logprobs": np.full((num_rows, width), -9999.0, np.float32),
    }
    at = [column.ctypes.data for column in inputs]
    library.sample(
        pool or library.Pool(1), isa, logits.ctypes.data, logits.strides[0] // 4, num_rows, vocab, *at[:5],
        out["token"].ctypes.data, at[5], width, *(out[name].ctypes.data for name in list(out)[1:]),
    )  # fmt: skip
    return out
