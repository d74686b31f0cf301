"""The engine process's clock, and a runner without a model whose steps take time and whose rows can be spoiled."""

from typing import Any

from fakes.runner import FakeRunner, Rule
from sayfa.base.faults import fault
from sayfa.base.step import RunnerOutput, ScheduledRow, SchedulerOutput
from world.history import Call, Setting
from world.loop import VirtualClock

PAGE_SIZE = 4


class DeathError(BaseException):
    """The process ends here and now; nothing may catch it."""


class EngineClock:
    """The clock of one engine process: the world's time plus what its current step has taken, from another origin."""

    def __init__(self, clock: VirtualClock, origin_s: float) -> None:
        self._clock = clock
        self._origin_s = origin_s
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return self._clock.monotonic() + self._origin_s + self.ahead_s

    def wall(self) -> float:
        return self._clock.wall() + self.ahead_s


class SpoiledRunner(FakeRunner):
    """A FakeRunner whose steps take time and whose rows can be spoiled. calls: by seed."""

    def __init__(
        self, num_pages: int, rule: Rule, clock: EngineClock, setting: Setting, calls: dict[int, Call]
    ) -> None:
        super().__init__(PAGE_SIZE, num_pages, rule=rule, fail=self._numbers_of)
        self._clock = clock
        self._setting = setting
        self._calls = calls
        self.spoiled = 0

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        if plan.rows:
            self._clock.ahead_s += self._setting.step_s + self._setting.token_s * plan.num_tokens
        return super().execute(plan)

    def _write(self, plan: SchedulerOutput) -> None:
        fault("runner.before_forward")
        kinds = {self._spoil_of(row) for row in plan.rows}
        if "die" in kinds:
            raise DeathError
        if "raise" in kinds:
            raise RuntimeError("a kernel failed")
        super()._write(plan)
        fault("runner.before_sample")

    def _numbers_of(self, row: int, step: int) -> str | None:
        """Spoil the row's numbers; what it holds alone is rubbish then, and whoever finds that later will notice."""
        if self._spoil_of(self._scheduled[row]) != "nan":
            return None
        self.spoiled += 1
        others = {page for number, other in self.rows.items() if number != row for page in other.pages}
        for page in self.rows[row].pages:
            if page not in others:
                self.slots[page] = [-1] * PAGE_SIZE
        return "the logits are not finite"

    def _result(self, step: int, scheduled: ScheduledRow) -> Any:
        self._scheduled = {scheduled.row: scheduled}
        return super()._result(step, scheduled)

    def _spoil_of(self, scheduled: ScheduledRow) -> str:
        new = self.rows[scheduled.row].new
        call = self._calls.get(new.params.seed or 0)
        if call is None or not call.spoil or not scheduled.sample:
            return ""
        num_output = len(self.rows[scheduled.row].tokens) - new.num_prompt
        return call.spoil if num_output >= call.spoil_after else ""
