"""Execute a plan so that the failure of one request stays its own: if a step raises, find the guilty rows and go on.

Called by `engine.step` in the place of `runner.execute`. The rows of a failed step are executed again in halves, since
the runner promises that a failed computation has noted no token; what still fails alone is guilty. Must not know why
rows fail.
"""

from typing import Protocol

from sayfa.base.errors import EngineError, LostStateError
from sayfa.base.faults import fault
from sayfa.base.log import logger
from sayfa.base.step import RowResult, RunnerOutput, ScheduledRow, SchedulerOutput

log = logger("engine")

MAX_FAILED_STEPS = 3
"""After so many steps in a row of which nothing could be computed, the fault is not in a request. A step without rows
ends the row of them: requests that come and fail alone are no proof, as many clients send a failed one twice more."""


class Runner(Protocol):
    """What executes plans. If it raises, the plan's table changes are made and no token is noted, or it is a
    LostStateError.
    """

    def execute(self, plan: SchedulerOutput) -> RunnerOutput: ...


class GuardedRunner:
    """A runner whose failed steps cost only the rows that fail alone.

    Invariant: each row of a plan is computed successfully exactly once, or gets exactly one result with `error`.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._failed_steps = 0
        self.num_failed_rows = 0
        """Rows that were found guilty since start."""

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """Execute a plan. Raises EngineError where the process should end: again and again nothing can be computed, or
        the runner has lost its state.
        """
        try:
            output = self._runner.execute(plan)
        except LostStateError:
            raise
        except Exception as error:
            if not plan.rows:
                raise
            fault("engine.blame")
            log.exception("step %d failed with %d rows; looking for the guilty ones", plan.step, len(plan.rows))
            output = RunnerOutput(step=plan.step, rows=self._halve(plan.step, plan.rows, error))
            self._count_failures(output)
        else:
            self._failed_steps = 0
        return output

    def _halve(self, step: int, rows: list[ScheduledRow], error: Exception) -> list[RowResult]:
        """Give the results of rows that failed together with `error`, in their order."""
        if len(rows) == 1:
            sentence = f"computing this answer failed in the engine ({type(error).__name__})"
            return [RowResult(row=rows[0].row, error=sentence, error_code="step_failed")]
        middle = len(rows) // 2
        results: list[RowResult] = []
        for part in (rows[:middle], rows[middle:]):
            try:
                results += self._runner.execute(SchedulerOutput(step=step, rows=part)).rows
            except Exception as again:  # whatever a kernel or a library may raise
                results += self._halve(step, part, again)
        return results

    def _count_failures(self, output: RunnerOutput) -> None:
        guilty = [result for result in output.rows if result.error_code == "step_failed"]
        self.num_failed_rows += len(guilty)
        log.error("step %d: %d of %d rows were ended", output.step, len(guilty), len(output.rows))
        self._failed_steps = self._failed_steps + 1 if len(guilty) == len(output.rows) else 0
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineError(f"{self._failed_steps} steps in a row failed for every request in them")
