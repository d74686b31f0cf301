"""The native draw: logits → token ids and log-probabilities. The meaning is `runner.draw`'s; this is its fast twin."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sayfa.nn.program.native_library import library


class SampleCall:
    """One call of the library with its columns, made once and used again while the rows of a batch stay.

    Columns are [R]. `out` holds what the last call wrote: token, logprob, rank [R] and top_ids, top_logprobs [R, K]
    with K = largest num_top, at least 1. pool: the workers, or None for the calling thread alone. Raises ValueError for
    arrays that do not fit.
    """

    def __init__(
        self,
        *,
        temperature: NDArray[np.float32],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
        top_k: NDArray[np.int32],
        uniform: NDArray[np.float64],
        num_top: NDArray[np.int32],
        pool: Any = None,
        isa: str = "",
    ) -> None:
        num_rows = len(temperature)
        self._inputs = [
            np.ascontiguousarray(column, dtype)
            for column, dtype in (
                (temperature, np.float32), (top_p, np.float32), (min_p, np.float32), (top_k, np.int32),
                (uniform, np.float64), (num_top, np.int32),
            )
        ]  # fmt: skip
        for column in self._inputs:
            if column.shape != (num_rows,):
                raise ValueError(f"a column has shape {column.shape}; one number for each of {num_rows} rows is needed")
        width = max(1, int(num_top.max(initial=0)))
        self.out: dict[str, NDArray[Any]] = {
            "token": np.full(num_rows, -1, np.int32),
            "logprob": np.full(num_rows, -9999.0, np.float32),
            "rank": np.zeros(num_rows, np.int32),
            "top_ids": np.zeros((num_rows, width), np.int32),
            "top_logprobs": np.full((num_rows, width), -9999.0, np.float32),
        }
        at = [column.ctypes.data for column in self._inputs]
        outputs = [array.ctypes.data for array in self.out.values()]
        self._where = (*at[:5], outputs[0], at[5], width, *outputs[1:])
        self._pool, self._isa, self._num_rows = pool or library.Pool(1), isa, num_rows

    def __call__(self, logits: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Draw a token for each row of logits [R, V]; the logits stay as they are. Each call writes the same arrays."""
        num_rows, vocab = logits.shape
        if logits.dtype != np.float32 or logits.strides[1] != 4:
            raise ValueError("logits must be float32 with the vocabulary side by side")
        if num_rows != self._num_rows:
            raise ValueError(f"{num_rows} rows of logits for columns of {self._num_rows}")
        address = logits.__array_interface__["data"][0]  # `ctypes.data` takes ten times as long
        library.sample(self._pool, self._isa, address, logits.strides[0] // 4, num_rows, vocab, *self._where)
        return self.out


def sample(logits: NDArray[np.float32], **columns: Any) -> dict[str, NDArray[Any]]:
    """Draw once: SampleCall(**columns)(logits)."""
    return SampleCall(**columns)(logits)
