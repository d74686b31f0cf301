"""The native twin of `runner.prepare`, which tells the meaning. Loaded by `runner.executors` with the native executor.

The plan's five columns go in, one array with all of the step's numbers comes out; the named ones are views of it.
"""

import numpy as np

from sayfa.base.step import ScheduledRow
from sayfa.nn.program.native_library import library
from sayfa.nn.program.program import InputBatch
from sayfa.runner.prepare import Prepared
from sayfa.runner.request_table import RequestTable


class NativePrepare:
    """Builds steps from one request table, whose columns must stay where they are."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table  # the library keeps addresses only
        self._columns = library.TableColumns(
            table.tokens.ctypes.data, table.pages.ctypes.data, table.num_tokens.ctypes.data,
            table.num_pages.ctypes.data, table.tokens.shape[1], table.pages.shape[1], table.max_rows, table.page_size,
        )  # fmt: skip

    def __call__(self, scheduled: list[ScheduledRow]) -> Prepared:
        """Build the step's arrays. Raises ValueError if a row asks for tokens or pages that the table does not have."""
        plan = np.array([(r.row, r.start, r.count, r.num_logits, r.sample) for r in scheduled], np.int32)
        tokens, logits, pages = library.step_sizes(self._columns, plan)
        num_rows = len(plan)
        out = np.empty(3 * tokens + 4 * num_rows + 2 + num_rows * pages + logits, np.int32)
        library.fill_step(self._columns, plan, tokens, logits, pages, out)
        flat = 2 * num_rows + 3 * tokens
        starts = flat + 2 * (num_rows + 1)
        batch = InputBatch(
            token_ids=out[2 * num_rows : 2 * num_rows + tokens],
            positions=out[2 * num_rows + tokens : 2 * num_rows + 2 * tokens],
            slots=out[2 * num_rows + 2 * tokens : flat],
            query_start=out[flat : flat + num_rows + 1],
            context_len=out[num_rows : 2 * num_rows],
            page_table=out[starts : starts + num_rows * pages].reshape(num_rows, pages),
            logit_rows=out[starts + num_rows * pages :],
        )
        return Prepared(
            batch=batch,
            rows=out[:num_rows],
            end=out[num_rows : 2 * num_rows],
            logit_start=out[flat + num_rows + 1 : starts],
            samples=plan[:, 4] != 0,
        )
