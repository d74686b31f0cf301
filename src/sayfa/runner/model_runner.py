"""One step on one device: obey the plan's table changes, prepare, run the program, sample. Called by `engine`.

It does not know why: which rows, which pages and how many tokens are the plan's matter. All state between steps lies in
the request table and in the executor's pages.
"""

from collections.abc import Callable
from functools import partial

from sayfa.base.clock import Clock, SystemClock
from sayfa.base.errors import LostStateError
from sayfa.base.faults import altered, fault
from sayfa.base.step import RunnerOutput, SchedulerOutput
from sayfa.nn.program.executor import Executor
from sayfa.runner.prepare import Prepare, prepare
from sayfa.runner.request_table import RequestTable
from sayfa.runner.sampler import Draw, Sampler


class ModelRunner:
    """Executes plans on one executor; pages must have been allocated. `clock` only times the parts of a step."""

    def __init__(
        self,
        executor: Executor,
        table: RequestTable,
        draw: Draw,
        clock: Clock | None = None,
        make_prepare: Callable[[RequestTable], Prepare] | None = None,
    ) -> None:
        self._executor = executor
        self._table = table
        self._clock = clock or SystemClock()
        self._sampler = Sampler(table, draw)
        self._prepare = make_prepare(table) if make_prepare else partial(prepare, table=table)

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """Do one step, in the plan's order: forget, new, added_pages, copies, rows.

        Raises LostStateError if the table cannot be changed as planned: what it holds is then not what the plan's
        maker believes. If the computation itself raises, the table changes have been made and no token has been noted,
        so parts of `rows` can be executed again by plans that hold nothing else.
        """
        try:
            self._change_table(plan)
        except Exception as error:
            raise LostStateError(f"step {plan.step} could not change the request table") from error
        if not plan.rows:
            return RunnerOutput(step=plan.step)
        begun = self._clock.monotonic()
        fault("runner.prepare")
        prepared = self._prepare(plan.rows)
        ready = self._clock.monotonic()
        fault("runner.before_forward")
        logits = altered("runner.logits", self._executor.run(prepared.batch))
        computed = self._clock.monotonic()
        fault("runner.before_sample")
        rows = self._sampler.sample(logits, prepared)
        timings = {
            "prepare": ready - begun,
            "forward": computed - ready,
            "sample": self._clock.monotonic() - computed,
        }
        return RunnerOutput(step=plan.step, rows=rows, timings=timings)

    def _change_table(self, plan: SchedulerOutput) -> None:
        for row in plan.forget:
            fault("runner.table.forget")
            self._table.forget(row)
        for new in plan.new:
            fault("runner.table.put")
            self._table.put(new)
        for row, pages in plan.added_pages:
            self._table.add_pages(row, pages)
        if plan.copies:
            fault("runner.copy_pages")
            self._executor.copy_pages(plan.copies)
