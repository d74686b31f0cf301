"""Laws of prepare: the flat arrays equal those of a plain loop, and a plan that contradicts the table is refused."""

import random
from importlib import import_module

import numpy as np
import pytest

from fakes import needs
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import NewRow, ScheduledRow
from sayfa.runner.prepare import prepare
from sayfa.runner.request_table import RequestTable

PAGE = 16


def native_prepare(plan, table):
    """The library's twin, made for one step."""
    needs.native_library()
    return import_module("sayfa.runner.native_prepare").NativePrepare(table)(plan)


BOTH = pytest.mark.parametrize("build", [prepare, native_prepare])


def make_table(rng, num_rows):
    """A table with rows of random length and scattered pages."""
    table = RequestTable(40, 400, PAGE, 100)
    pages = list(range(1, 2000))
    rng.shuffle(pages)
    for row in rng.sample(range(40), num_rows):
        length = rng.randint(1, 300)
        tokens = [rng.randrange(100) for _ in range(length)]
        own = [pages.pop() for _ in range(-(-length // PAGE) + rng.randint(0, 2))]
        table.put(NewRow(row=row, tokens=tokens, num_prompt=length, params=SamplingParams(), seed=0, pages=own))
    return table


def make_plan(rng, table, most):
    plan = []
    for row in np.flatnonzero(table.num_tokens).tolist():
        length = int(table.num_tokens[row])
        count = min(rng.randint(1, most), length)
        start = rng.randint(0, length - count)
        num_logits = rng.choice([0, 1, count])
        plan.append(ScheduledRow(row, start, count, num_logits, num_logits > 0 and rng.random() < 0.7))
    return plan


@BOTH
@pytest.mark.parametrize("seed", range(30))
def test_arrays_equal_those_of_a_plain_loop(seed, build):
    rng = random.Random(seed)
    table = make_table(rng, rng.randint(1, 20))
    plan = make_plan(rng, table, rng.choice([1, 5, 64]))
    step = build(plan, table)
    ids, positions, slots, starts, logit_rows, logit_starts = [], [], [], [0], [], [0]
    for row in plan:
        for position in range(row.start, row.start + row.count):
            ids.append(table.tokens[row.row, position])
            positions.append(position)
            slots.append(table.pages[row.row, position // PAGE] * PAGE + position % PAGE)
        starts.append(len(ids))
        logit_rows += range(len(ids) - row.num_logits, len(ids))
        logit_starts.append(len(logit_rows))
    batch = step.batch
    assert batch.token_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.query_start.tolist() == starts
    assert batch.context_len.tolist() == [row.start + row.count for row in plan]
    assert batch.logit_rows.tolist() == logit_rows
    assert step.logit_start.tolist() == logit_starts
    assert step.samples.tolist() == [row.sample for row in plan]
    for index, row in enumerate(plan):
        used = -(-(row.start + row.count) // PAGE)
        assert batch.page_table[index, :used].tolist() == table.pages[row.row, :used].tolist()
    for name in ("token_ids", "positions", "slots", "query_start", "context_len", "page_table", "logit_rows"):
        array = getattr(batch, name)
        assert array.dtype == np.int32, name
        assert array.flags.c_contiguous, name


@BOTH
@pytest.mark.parametrize(
    ("row", "what"),
    [
        (ScheduledRow(40, 0, 1, 1, True), "outside the table"),
        (ScheduledRow(-1, 0, 1, 1, True), "outside the table"),
        (ScheduledRow(3, 10, 1, 1, True), "has 10 tokens"),
        (ScheduledRow(3, 0, 11, 1, True), "has 10 tokens"),
        (ScheduledRow(4, 0, 1, 1, True), "has 0 tokens"),
        (ScheduledRow(3, -1, 2, 1, True), "contradict"),
        (ScheduledRow(3, 0, 0, 0, False), "contradict"),
        (ScheduledRow(3, 0, 2, 3, True), "contradict"),
        (ScheduledRow(3, 0, 2, 0, True), "contradict"),
        (ScheduledRow(5, 0, 40, 1, True), "2 pages do not hold 40"),
    ],
)
def test_a_plan_that_contradicts_the_table_is_refused(row, what, build):
    """Past this door a wrong index would read foreign memory."""
    table = RequestTable(40, 400, PAGE, 100)
    table.put(NewRow(row=3, tokens=[1] * 10, num_prompt=10, params=SamplingParams(), seed=0, pages=[7]))
    table.put(NewRow(row=5, tokens=[1] * 40, num_prompt=40, params=SamplingParams(), seed=0, pages=[8, 9]))
    with pytest.raises(ValueError, match=what):
        build([row], table)
