"""Ask the time. The only place of engine, wire and server that does; tests bring a clock of their own.

Intervals, deadlines and timeouts are measured on `monotonic`; `wall` is for what people read (`created`, logs) and may
jump. Called by `runner`, `engine`, `wire`, `server` and `cli`; must not know what is being timed.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Two ways to ask the time, both in seconds."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never falls, never jumps with the calendar."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, as the machine believes; may jump in either direction."""
        ...


class SystemClock:
    """The machine's own clocks."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class AwakeClock:
    """Seconds during which this process ran: what a stall took (suspend, SIGSTOP, a starved machine) is left out.

    For limits on the silence of others: nobody is given up because we ourselves stood still. Its owner calls `tick`
    every `tick_s` seconds; between two ticks no more than three times that is counted.
    """

    def __init__(self, clock: Clock, tick_s: float = 1.0) -> None:
        self._clock = clock
        self._most_s = 3 * tick_s
        self._counted_s = 0.0
        self._ticked_s = clock.monotonic()

    def tick(self) -> None:
        """Say that we run."""
        self._counted_s = self.monotonic()
        self._ticked_s = self._clock.monotonic()

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, stalls left out."""
        return self._counted_s + min(self._clock.monotonic() - self._ticked_s, self._most_s)

    def wall(self) -> float:
        """The calendar, as the machine's clock tells it."""
        return self._clock.wall()


class FakeClock:
    """A clock that stands still until it is told to move; used by tests and simulations."""

    def __init__(self, start_s: float = 1000.0, wall_s: float = 1.7e9) -> None:
        self._monotonic_s = start_s
        self._wall_s = wall_s

    def monotonic(self) -> float:
        return self._monotonic_s

    def wall(self) -> float:
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks. Raises ValueError for a negative step, which `monotonic` cannot take."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s; use jump_wall")
        self._monotonic_s += seconds
        self._wall_s += seconds

    def jump_wall(self, seconds: float) -> None:
        """Set the calendar forward or back, as an operator or NTP would."""
        self._wall_s += seconds
