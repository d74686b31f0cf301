"""If a step raises, exactly the rows that fail alone are ended, and each other row is computed exactly once."""

import random

import pytest

from sayfa.base.errors import EngineError
from sayfa.base.step import RowResult, RunnerOutput, ScheduledRow, SchedulerOutput
from sayfa.engine.blame import MAX_FAILED_STEPS, GuardedRunner


class FragileRunner:
    """Raises if a plan holds a guilty row; counts successful computations of each row."""

    def __init__(self, guilty):
        self.guilty = set(guilty)
        self.computed = {}
        self.changes = []

    def execute(self, plan):
        self.changes.append((plan.forget, plan.new, plan.added_pages, plan.copies))
        if self.guilty & {row.row for row in plan.rows}:
            raise FloatingPointError("bad row")
        for row in plan.rows:
            self.computed[row.row] = self.computed.get(row.row, 0) + 1
        return RunnerOutput(step=plan.step, rows=[RowResult(row=row.row, tokens=[row.row]) for row in plan.rows])


def plan_of(rows, step=1):
    return SchedulerOutput(step=step, rows=[ScheduledRow(row, 0, 1, 1, True) for row in rows], copies=[(1, 2)])


@pytest.mark.parametrize("seed", range(30))
def test_exactly_the_guilty_rows_are_ended_and_the_others_computed_once(seed):
    rng = random.Random(seed)
    rows = rng.sample(range(100), rng.randint(2, 40))
    guilty = rng.sample(rows, rng.randint(1, len(rows) - 1))
    runner = FragileRunner(guilty)
    output = GuardedRunner(runner).execute(plan_of(rows))
    assert [result.row for result in output.rows] == rows
    assert {result.row for result in output.rows if result.error_code == "step_failed"} == set(guilty)
    assert runner.computed == {row: 1 for row in rows if row not in guilty}
    assert all(change == ([], [], [], []) for change in runner.changes[1:])  # table changes are made once only


def test_one_guilty_row_among_64_costs_a_logarithmic_number_of_tries():
    runner = FragileRunner([37])
    GuardedRunner(runner).execute(plan_of(range(64)))
    assert len(runner.changes) <= 1 + 2 * 6


def test_a_fault_that_is_nobodys_ends_the_process_after_a_few_steps():
    runner = GuardedRunner(FragileRunner(range(8)))
    for step in range(MAX_FAILED_STEPS - 1):
        assert all(result.error for result in runner.execute(plan_of(range(8), step)).rows)
    with pytest.raises(EngineError, match="steps in a row"):
        runner.execute(plan_of(range(8), MAX_FAILED_STEPS))


def test_a_good_step_between_bad_ones_clears_the_suspicion():
    fragile = FragileRunner([1])
    runner = GuardedRunner(fragile)
    for step in range(4 * MAX_FAILED_STEPS):
        runner.execute(plan_of([1] if step % 2 else [2], step))
    assert runner.num_failed_rows == 2 * MAX_FAILED_STEPS


def test_requests_that_come_and_fail_one_by_one_do_not_end_the_process():
    """Between them is a step that only forgets a row: a client that tries three times ends no engine."""
    runner = GuardedRunner(FragileRunner([1]))
    for step in range(4 * MAX_FAILED_STEPS):
        runner.execute(plan_of([1] if step % 2 else [], step))
    assert runner.num_failed_rows == 2 * MAX_FAILED_STEPS


def test_a_passing_fault_harms_nobody():
    class OnceBroken(FragileRunner):
        def execute(self, plan):
            if not self.changes:
                self.changes.append(None)
                raise OSError("passing")
            return super().execute(plan)

    output = GuardedRunner(OnceBroken([])).execute(plan_of(range(5)))
    assert [result.tokens for result in output.rows] == [[0], [1], [2], [3], [4]]


def test_a_plan_without_rows_that_fails_is_not_hidden():
    class Broken:
        def execute(self, plan):
            raise MemoryError

    with pytest.raises(MemoryError):
        GuardedRunner(Broken()).execute(SchedulerOutput(step=1, forget=[1]))
