"""Record what a scheduler was told and what it decided; replay it and compare. JSON, one line a call.

Used by tests; nothing turns recording on in a server yet. A scheduler is a pure function of these calls, so the same
calls give the same decisions, in another process and on another machine too.
Must not know files: lines go to a callable and come from an iterable.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from hashlib import blake2b

import msgspec

from sayfa.base.errors import RequestError
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.step import RunnerOutput, SchedulerOutput
from sayfa.core.kv_cache import KvCache
from sayfa.core.limits import Limits
from sayfa.core.policy import Policy
from sayfa.core.scheduler import Scheduler


class Added(msgspec.Struct, frozen=True, tag="add"):
    """`Scheduler.add`, also if it refused."""

    request: Request
    now_s: float
    retry_after_s: int


class Aborted(msgspec.Struct, frozen=True, tag="abort"):
    """`Scheduler.abort`."""

    id: str
    now_s: float
    branches: list[int] | None = None


class Paused(msgspec.Struct, frozen=True, tag="pause"):
    """`Scheduler.pause`."""

    id: str
    on: bool


class Preempted(msgspec.Struct, frozen=True, tag="preempt"):
    """`Scheduler.preempt`."""

    id: str
    now_s: float


class CacheReset(msgspec.Struct, frozen=True, tag="reset_cache"):
    """`Scheduler.reset_cache`."""


class Scheduled(msgspec.Struct, frozen=True, tag="schedule"):
    """`Scheduler.schedule` and the digest of its decision."""

    now_s: float
    step: int
    decision: str


class Updated(msgspec.Struct, frozen=True, tag="update"):
    """`Scheduler.update`."""

    output: RunnerOutput
    now_s: float


Call = Added | Aborted | Paused | Preempted | CacheReset | Scheduled | Updated
_decoder = msgspec.json.Decoder(Call)


class Replayed(msgspec.Struct, frozen=True):
    """One step of a replay: what was decided now, and whether it is what was decided then."""

    plan: SchedulerOutput
    same: bool


class RecordingScheduler(Scheduler):
    """A scheduler that writes each call as one line, without line end, to `write`, before it is carried out.

    Only `schedule` is written afterwards, as its line holds the decision.
    """

    def __init__(self, limits: Limits, policy: Policy, cache: KvCache, write: Callable[[bytes], None]) -> None:
        super().__init__(limits, policy, cache)
        self._write = write

    def add(self, request: Request, now_s: float, retry_after_s: int = 1) -> None:
        """See Scheduler."""
        self._record(Added(request, now_s, retry_after_s))
        super().add(request, now_s, retry_after_s)

    def abort(self, request_id: str, now_s: float, branches: Collection[int] | None = None) -> bool:
        """See Scheduler."""
        self._record(Aborted(request_id, now_s, None if branches is None else list(branches)))
        return super().abort(request_id, now_s, branches)

    def pause(self, request_id: str, on: bool) -> bool:
        """See Scheduler."""
        self._record(Paused(request_id, on))
        return super().pause(request_id, on)

    def preempt(self, request_id: str, now_s: float) -> int:
        """See Scheduler."""
        self._record(Preempted(request_id, now_s))
        return super().preempt(request_id, now_s)

    def reset_cache(self) -> int:
        """See Scheduler."""
        self._record(CacheReset())
        return super().reset_cache()

    def schedule(self, now_s: float) -> SchedulerOutput:
        """See Scheduler."""
        plan = super().schedule(now_s)
        self._record(Scheduled(now_s, plan.step, digest(plan)))
        return plan

    def update(self, output: RunnerOutput, now_s: float) -> list[EngineOutput]:
        """See Scheduler."""
        self._record(Updated(output, now_s))
        return super().update(output, now_s)

    def _record(self, call: Call) -> None:
        self._write(msgspec.json.encode(call))


def digest(plan: SchedulerOutput) -> str:
    """Return 16 hex digits that stand for every number in a decision."""
    return blake2b(msgspec.json.encode(plan), digest_size=8).hexdigest()


def replay(lines: Iterable[bytes], scheduler: Scheduler) -> Iterator[Replayed]:
    """Make the recorded calls on a fresh scheduler of the same settings; yield each step's decision.

    Raises msgspec.ValidationError or DecodeError for a line that is not of a trace.
    """
    for line in lines:
        call = _decoder.decode(line)
        match call:
            case Added(request, now_s, retry_after_s):
                try:
                    scheduler.add(request, now_s, retry_after_s)
                except RequestError:
                    continue  # it was refused then, too
            case Aborted(request_id, now_s, branches):
                scheduler.abort(request_id, now_s, branches)
            case Paused(request_id, on):
                scheduler.pause(request_id, on)
            case Preempted(request_id, now_s):
                scheduler.preempt(request_id, now_s)
            case CacheReset():
                scheduler.reset_cache()
            case Scheduled(now_s, step, decision):
                plan = scheduler.schedule(now_s)
                yield Replayed(plan, plan.step == step and digest(plan) == decision)
            case Updated(output, now_s):
                scheduler.update(output, now_s)
