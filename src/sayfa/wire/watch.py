"""Watch whether an engine process gets on: by steps once it serves, by phases and signs of life as it loads.

Called by `wire.process_client`, which passes on what the engine says and acts on what is found here. Pure rules over
times and figures; it sends, ends and starts nothing itself.

A load has no limit in all: a large model on a slow disk takes as long as it takes. It has hung when for two minutes no
phase was told, nothing came from the disk and the process did not compute; or when it computes and tells nothing for
half an hour.
"""

from typing import Literal, NamedTuple

from sayfa.base.clock import AwakeClock, Clock
from sayfa.base.messages import Ping, Pong
from sayfa.wire.client import Health

PING_INTERVAL_S = 1.0
"""How often the engine is asked for its progress; an idle engine does nothing but answer these."""
STALLED_S, STALLED_STEPS = 10.0, 20.0
STUCK_S, STUCK_STEPS = 120.0, 1000.0
FIRST_STEP_S = 3600.0
"""The first step of an engine, of which nothing is known that it could be measured by, may take so long."""
LOAD_STALLED_S = 30.0
LOAD_STUCK_S = 120.0
"""A loading process that tells nothing, reads nothing and computes nothing for so long has hung."""
LOAD_MUTE_S = 1800.0
"""One that reads or computes may be silent for so long."""
LEAST_CPU_S = 0.05
"""Processor time between two looks that counts as computing; a process that only polls takes less."""

Verdict = Literal["moving", "stalled", "stuck"]
Act = Literal["wait", "ask", "end"]
"""What to do: nothing, let the process say once what it is at, or end it."""


_UNHEARD = "start"
"""The phase of a process that has told none yet."""


class Signs(NamedTuple):
    """What the kernel tells of a process: processor time in seconds, bytes fetched from storage. Both only grow."""

    cpu_s: float
    read_bytes: int

    def shows_work_since(self, before: "Signs") -> bool:
        """Whether it has read, or computed for more than a process does that only polls."""
        return self.read_bytes > before.read_bytes or self.cpu_s - before.cpu_s >= LEAST_CPU_S


def judge_stall(since_step_s: float, busy: bool, expected_step_s: float) -> Verdict:
    """Tell a slow engine from one that does not move, by what its steps take lately and not by a fixed time alone.

    A step over a long prompt may cost as much as some hundred short ones: stalled is 20 times the expected step and ten
    seconds at least, stuck 1,000 times and two minutes at least. An engine of which no step is known has an hour.
    """
    if not busy or since_step_s <= max(STALLED_S, STALLED_STEPS * expected_step_s):
        return "moving"
    limit_s = max(STUCK_S, STUCK_STEPS * expected_step_s) if expected_step_s > 0 else FIRST_STEP_S
    return "stuck" if since_step_s > limit_s else "stalled"


def judge_load(since_told_s: float, since_sign_s: float) -> Verdict:
    """Tell a slow load from one that hangs: seconds since the last news of a phase, and since the last sign of life."""
    silent_s = min(since_told_s, since_sign_s)
    if silent_s > LOAD_STUCK_S or since_told_s > LOAD_MUTE_S:
        return "stuck"
    return "stalled" if silent_s > LOAD_STALLED_S else "moving"


class Watch:
    """Progress of the engine processes of one client. Times are on `awake`: our own standstill is no one's silence."""

    def __init__(self, clock: Clock) -> None:
        self.awake = AwakeClock(clock, PING_INTERVAL_S)
        self.phase = ""
        self._progress_s = self.awake.monotonic()
        self._pong: Pong | None = None
        self._pings = 0
        self._done = 0.0
        self._signs: Signs | None = None
        self._sign_s = self._progress_s
        self._verdict: Verdict = "moving"

    def health(self, alive: bool, waiting: bool) -> Health:
        """alive: the process has said hello. waiting: a request of ours has not ended."""
        busy = waiting or (self._pong is not None and self._pong.busy)
        expected_s = self._pong.expected_step_s if self._pong is not None else 0.0
        return Health(alive, self.awake.monotonic() - self._progress_s, busy, expected_s)

    def ping(self) -> Ping:
        """The next question for its progress."""
        self._pings += 1
        return Ping(self._pings)

    def moved(self) -> None:
        """Something came of it, or nothing was owed until now."""
        self._progress_s = self.awake.monotonic()

    def note_pong(self, pong: Pong) -> None:
        """The engine said how many steps it has made."""
        moved = self._pong is None or pong.steps != self._pong.steps or not pong.busy
        self._pong = pong
        if moved:
            since_s = self.awake.monotonic() - (pong.since_step_s if pong.busy else 0.0)
            self._progress_s = max(self._progress_s, since_s)  # a stall of both is no lack of progress

    def note_start(self) -> None:
        """A process was started; what was known is of another one."""
        self._pong = self._signs = None
        self.phase, self._done = _UNHEARD, 0.0
        self.moved()
        self._sign_s = self._progress_s

    def note_phase(self, phase: str, done: float) -> None:
        """The loading process said how far it is; the same again is no progress."""
        if (phase, done) != (self.phase, self._done):
            self.phase, self._done = phase, done
            self.moved()

    @property
    def can_be_asked(self) -> bool:
        """Whether the process has told a phase. Before that it has no handler for our question, and would end of it."""
        return self.phase != _UNHEARD

    def look_at_steps(self, waiting: bool) -> tuple[Act, str]:
        """Say what to do about a serving process, and what was found; waiting: a request of ours has not ended."""
        health = self.health(True, waiting)
        act = self._act_on(judge_stall(health.since_step_s, health.busy, health.expected_step_s))
        return act, f"has made no step for {health.since_step_s:.0f} s"

    def look_at_load(self, signs: Signs | None) -> tuple[Act, str]:
        """Say what to do about a loading process, and what was found; to be called each `PING_INTERVAL_S`.

        signs: None where the kernel tells nothing; such a process is given the time of one that computes.
        """
        now_s = self.awake.monotonic()
        before, self._signs = self._signs, signs
        if signs is None or (before is not None and signs.shows_work_since(before)):
            self._sign_s = now_s
        since_s = now_s - self._progress_s
        act = self._act_on(judge_load(since_s, now_s - self._sign_s))
        return act, f"tells of no progress in loading for {since_s:.0f} s (in {self.phase})"

    def _act_on(self, verdict: Verdict) -> Act:
        before, self._verdict = self._verdict, verdict
        if verdict in ("moving", before):
            return "wait"
        if verdict == "stuck":
            return "end"
        return "ask" if before == "moving" else "wait"
