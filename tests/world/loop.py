"""An asyncio event loop on virtual time: nothing waits, time jumps to the next timer, and one seed gives one history.

Used by `world.play`. It has no sockets, no threads and no signals: what would need one raises. Executor jobs take
`thread_s` each, side by side. What asyncio would only mention to a log (an exception that nobody saw, an async
generator that was left to the garbage collector) is collected in `complaints`, since each of them is a leak.
"""

import asyncio
from collections.abc import Callable
from typing import Any


class WorldStandsStillError(Exception):
    """Nothing is ready, nothing is scheduled, and the main task has not ended: everybody waits for somebody else."""


class VirtualClock:
    """Keeps `base.clock.Clock`. Only the loop moves `monotonic`; a test may move both (a stall) or `wall` alone."""

    def __init__(self, start_s: float = 5_000.0, wall_s: float = 1.8e9) -> None:
        self._now_s = start_s
        self._wall_ahead_s = wall_s - start_s

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s + self._wall_ahead_s

    def advance(self, seconds: float) -> None:
        """Let time pass while nobody runs, as a suspended machine does."""
        self._now_s += seconds

    def move_to(self, now_s: float) -> None:
        """Let time pass up to a moment; never back."""
        self._now_s = max(self._now_s, now_s)

    def jump_wall(self, seconds: float) -> None:
        """Set the calendar."""
        self._wall_ahead_s += seconds


class _NoSelector:
    """Takes the place of the selector: instead of waiting, time moves on."""

    def __init__(self, clock: VirtualClock, next_timer_s: Callable[[], float]) -> None:
        self._clock = clock
        self._next_timer_s = next_timer_s

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise WorldStandsStillError("nothing is ready and nothing is scheduled")
        if timeout_s > 0:
            # Not by `timeout_s`: a sum of differences would depend on which other timers there were.
            self._clock.move_to(self._next_timer_s())
        return []

    def close(self) -> None:
        """Nothing to close."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. most_turns: a bound that ends worlds which spin without time passing. num_jobs: of executors, now."""

    def __init__(self, clock: VirtualClock, thread_s: float = 0.0, most_turns: int = 200_000) -> None:
        super().__init__()
        self.num_jobs = 0
        self._thread_s = thread_s
        self.complaints: list[str] = []
        self._clock = clock
        self._selector = _NoSelector(clock, lambda: self._scheduled[0].when())
        self._clock_resolution = 1e-7
        self._turns_left = most_turns
        self.set_exception_handler(lambda loop, context: self.complaints.append(_describe(context)))

    def time(self) -> float:
        return self._clock.monotonic()

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """As asyncio's, in whole microseconds: sums of floats that mean the same moment are the same moment."""
        return super().call_at(round(when, 6), callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Do the job when its time is over; who does not wait for it any more does not keep it from being done."""
        done: asyncio.Future[Any] = self.create_future()
        self.num_jobs += 1

        def work() -> None:
            self.num_jobs -= 1
            try:
                result = func(*args)
            except Exception as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        if self._thread_s:
            self.call_at(self.time() + self._thread_s, work)
        else:
            work()
        return done

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """There is no other thread that could have to be woken."""

    def _run_once(self) -> None:
        self._turns_left -= 1
        if self._turns_left < 0:
            raise WorldStandsStillError("the loop goes round and round and the history does not end")
        super()._run_once()  # type: ignore[misc]

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        self.complaints.append(f"an async generator was left to the garbage collector: {agen.__qualname__}")
        super()._asyncgen_finalizer_hook(agen)  # type: ignore[misc]


def _describe(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context.get('message')}: {error!r}"
