"""Plan + table → the flat arrays of one step; nothing else. Called by `model_runner`.

All rows' tokens lie end to end, no padding, no phases; a row of one token and a row of 512 are the same thing. Each
plan is checked against the table first, because past the native executor's door a wrong index is a crash.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sayfa.base.step import ScheduledRow
from sayfa.nn.program.program import InputBatch
from sayfa.runner.request_table import RequestTable

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Prepared:
    """One step: the batch, and per scheduled row [S] its table row, where it ends, and which logits are its own.

    end: position after the row's last token.
    logit_start [S + 1]: row s owns the logits [logit_start[s], logit_start[s + 1]).
    samples [S] bool: whether a token is drawn from the last of them.
    """

    batch: InputBatch
    rows: Ints
    end: Ints
    logit_start: Ints
    samples: NDArray[np.bool_]


Prepare = Callable[[list[ScheduledRow]], Prepared]
"""`prepare` with its table; `runner.native_prepare` is the fast twin."""


def prepare(scheduled: list[ScheduledRow], table: RequestTable) -> Prepared:
    """Build the step's arrays. Raises ValueError if a row asks for tokens or pages that the table does not have."""
    columns = np.array([(r.row, r.start, r.count, r.num_logits, r.sample) for r in scheduled], np.int32).T
    rows, start, count, num_logits, samples = np.ascontiguousarray(columns)
    end = start + count
    wrong = (start < 0) | (count < 1) | (num_logits < samples) | (num_logits > count)
    _check(rows, end, wrong, table)
    query_start = _starts(count)
    if len(rows) == query_start[-1]:  # decode only: one token a row
        row_of_token, positions = rows, start
    else:
        row_of_token = np.repeat(rows, count)
        positions = np.arange(query_start[-1], dtype=np.int32) - np.repeat(query_start[:-1] - start, count)
    page, offset = np.divmod(positions, np.int32(table.page_size))
    num_pages = int(end.max() + table.page_size - 1) // table.page_size
    logit_start = _starts(num_logits)
    batch = InputBatch(
        token_ids=table.tokens[row_of_token, positions],
        positions=positions,
        slots=table.pages[row_of_token, page] * np.int32(table.page_size) + offset,
        query_start=query_start,
        context_len=end,
        page_table=np.ascontiguousarray(table.pages[rows, :num_pages]),
        logit_rows=_last_of_each(query_start[1:], num_logits, logit_start),
    )
    return Prepared(batch, rows, end, logit_start, samples.astype(np.bool_))


def _starts(counts: Ints) -> Ints:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _last_of_each(query_end: Ints, num_logits: Ints, logit_start: Ints) -> Ints:
    """Token indices of the last `num_logits` tokens of each row."""
    if logit_start[-1] == len(num_logits) and num_logits.min() == 1:
        return query_end - np.int32(1)
    return np.arange(logit_start[-1], dtype=np.int32) + np.repeat(query_end - logit_start[1:], num_logits)


def _check(rows: Ints, end: Ints, wrong: NDArray[np.bool_], table: RequestTable) -> None:
    outside = (rows < 0) | (rows >= table.max_rows)
    if outside.any():
        raise ValueError(f"the plan names row {rows[outside.argmax()]}, outside the table of {table.max_rows}")
    if wrong.any():
        raise ValueError(f"row {rows[wrong.argmax()]}: start, count and number of logits contradict each other")
    missing = end > table.num_tokens[rows]
    if missing.any():
        row = rows[missing.argmax()]
        raise ValueError(
            f"row {row}: the plan goes to {end[missing.argmax()]}, the row has {table.num_tokens[row]} tokens"
        )
    short = end > table.num_pages[rows] * table.page_size
    if short.any():
        row = rows[short.argmax()]
        raise ValueError(f"row {row}: {table.num_pages[row]} pages do not hold {end[short.argmax()]} tokens")
