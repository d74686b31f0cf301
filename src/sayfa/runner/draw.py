"""The draw: logits → token ids and log-probabilities, in numpy. The meaning of sampling; the native twin must agree.

Called by `sampler` where the native draw is not there. It knows no requests: a row is its numbers.

The rule, row by row:
  1. a NaN, a +inf or nothing but -inf makes the token -1 (a -inf alone is a masked id);
  2. temperature below 1e-5: the largest logit, the lowest id among equals;
  3. else logits / temperature; keep the top_k largest (at the border lower ids first); softmax over them; drop
     p < min_p * p_max; keep the smallest set of largest p whose sum reaches top_p (lower ids first), at least one;
     then walk the survivors in ascending id and take the first whose cumulative sum (float64) exceeds uniform * total.
Log-probabilities are those of the logits as they are handed in: before temperature and truncation.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = 1e-5
LOGPROB_FLOOR = -9999.0


@dataclass(frozen=True)
class DrawColumns:
    """What each of R rows asks, as columns [R].

    top_k: 0 or less is off. num_top: -1 no log-probabilities, 0 the chosen token's, k also those of the k best.
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    uniform: NDArray[np.float64]
    num_top: NDArray[np.int32]


@dataclass(frozen=True)
class Drawn:
    """token [R]; logprob, rank [R] and top_ids, top_logprobs [R, K] where asked (K = largest num_top, at least 1)."""

    token: NDArray[np.int32]
    logprob: NDArray[np.float32]
    rank: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


def draw(logits: NDArray[np.float32], columns: DrawColumns) -> Drawn:
    """Draw one token for each row of logits [R, V]."""
    num_rows = len(logits)
    width = max(1, int(columns.num_top.max(initial=0)))
    drawn = Drawn(
        np.full(num_rows, -1, np.int32),
        np.full(num_rows, LOGPROB_FLOOR, np.float32),
        np.zeros(num_rows, np.int32),
        np.zeros((num_rows, width), np.int32),
        np.full((num_rows, width), LOGPROB_FLOOR, np.float32),
    )
    for index, row in enumerate(logits):
        token = _draw_row(row, columns, index)
        drawn.token[index] = token
        if token >= 0 and columns.num_top[index] >= 0:
            score = score_token(row, token, int(columns.num_top[index]))
            drawn.logprob[index], drawn.rank[index] = score[0], score[1]
            drawn.top_ids[index, : len(score[2])] = score[2]
            drawn.top_logprobs[index, : len(score[3])] = score[3]
    return drawn


def score_token(
    row: NDArray[np.float32], token: int, num_top: int
) -> tuple[float, int, NDArray[np.int64], NDArray[np.float64]]:
    """Give log-probability and rank of `token` (1 = most likely), and the `num_top` best ids with theirs."""
    wide = row.astype(np.float64)
    peak = wide.max()
    normaliser = peak + np.log(np.exp(wide - peak).sum())
    top = largest(row, min(num_top, len(row)))
    logprobs = np.maximum(wide[top] - normaliser, LOGPROB_FLOOR)
    return max(float(wide[token] - normaliser), LOGPROB_FLOOR), int((row > row[token]).sum()) + 1, top, logprobs


def largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest values, largest first, lower ids first among equals, without sorting all of them."""
    if count <= 0:
        return np.empty(0, np.int64)
    if count < len(values):
        border = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= border)
    else:
        candidates = np.arange(len(values))
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _draw_row(row: NDArray[np.float32], columns: DrawColumns, index: int) -> int:
    peak = row.max()
    if not np.isfinite(peak):  # numpy's maximum hands NaN on, so this catches it too
        return -1
    if columns.temperature[index] < GREEDY_BELOW:
        return int(row.argmax())
    ids, probabilities = _survivors(row, columns, index)
    cumulative = np.cumsum(probabilities)
    place = int(np.searchsorted(cumulative, float(columns.uniform[index]) * cumulative[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def _survivors(
    row: NDArray[np.float32], columns: DrawColumns, index: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids in ascending order and their weights, after top-k, min-p and top-p."""
    top_k, top_p, min_p = int(columns.top_k[index]), float(columns.top_p[index]), float(columns.min_p[index])
    ids = np.sort(largest(row, top_k)) if 0 < top_k < len(row) else np.arange(len(row))
    kept = row[ids].astype(np.float64)
    weights = np.exp((kept - kept.max()) / float(columns.temperature[index]))
    probabilities = weights / weights.sum()
    keep = probabilities > 0
    if min_p > 0:
        keep &= probabilities >= min_p * probabilities.max()
    ids, probabilities = ids[keep], probabilities[keep]
    if top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        reached = int(np.searchsorted(np.cumsum(probabilities[order]), top_p, side="left"))
        chosen = np.sort(order[: reached + 1])
        ids, probabilities = ids[chosen], probabilities[chosen]
    return ids, probabilities
