"""Decide what follows the death of an engine process: when to start the next one, when to give up, whom to refuse.

Pure rules over times and hashes; it starts and kills nothing itself. Called by `wire.process_client`; must not know
processes.
"""

import hashlib
import math
import signal
from collections import deque

import msgspec

from sayfa.base.clock import Clock
from sayfa.base.errors import InvalidRequest
from sayfa.base.faults import fault
from sayfa.base.log import logger
from sayfa.base.messages import Request

log = logger("wire")

MAX_RESTARTS = 5
RESTART_WINDOW_S = 300.0
MAX_DELAY_S = 60.0
QUARANTINE_S = 3600.0
MAX_REMEMBERED = 10_000
"""Hashes kept at most, so that the memory of deaths is bounded."""


def ending_words(code: int | None) -> str:
    """Say how a process ended, from its exit code as `subprocess` has it: negative for a signal, None for unknown."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        name = f"signal {-code}"
    return f"killed by {name}" + (": often the system, out of memory" if -code == signal.SIGKILL else "")


class RestartPolicy:
    """Back-off 0, 1, 2, 4 … seconds; the next death is the last after five restarts within five minutes, or after five
    in a row of which none has served.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._restarts: deque[float] = deque()
        self._fruitless = 0

    def next_delay_s(self) -> float | None:
        """Say how long to wait before the next start, or None to give up. Counts as a restart."""
        now_s = self._clock.monotonic()
        while self._restarts and now_s - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        recent = max(len(self._restarts), self._fruitless)
        if recent >= MAX_RESTARTS:
            return None
        self._restarts.append(now_s)
        self._fruitless += 1
        return 0.0 if recent == 0 else min(MAX_DELAY_S, 2.0 ** (recent - 1))

    def note_ready(self) -> None:
        """The last start led to an engine that serves."""
        self._fruitless = 0


class Quarantine:
    """Requests that were running at two engine deaths in a row are refused for an hour.

    A request is known by what it asks (a hash of prompt, adapter and parameters), since clients send it again under
    another id.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_last_death: set[bytes] = set()
        self._refused_until: dict[bytes, float] = {}

    def note_death(self, running: list[Request]) -> None:
        """Remember who was running when the engine died; whoever was so at the death before, too, is refused from now
        on.
        """
        try:
            self._note(running)
        except Exception:  # without this memory a request that kills engines may do so once more; the next one is due
            log.exception("who was running when the engine died could not be noted")

    def check(self, request: Request) -> None:
        """Raise InvalidRequest for a request that is still refused."""
        left_s = self.remaining_s(request)
        if left_s > 0:
            raise InvalidRequest(
                "this request was running each of the last two times that the engine ended; it is refused for "
                f"another {math.ceil(left_s / 60)} min. Change it, or report it to the operator.",
                code="quarantined",
            )

    def remaining_s(self, request: Request) -> float:
        """Seconds for which this request is still refused; 0 if it is welcome."""
        if not self._refused_until:
            return 0.0
        key = content_hash(request)
        until_s = self._refused_until.get(key)
        if until_s is None:
            return 0.0
        left_s = until_s - self._clock.monotonic()
        if left_s <= 0:
            del self._refused_until[key]
            return 0.0
        return left_s

    def _note(self, running: list[Request]) -> None:
        fault("client.quarantine")
        hashes = {content_hash(request) for request in running[:MAX_REMEMBERED]}
        until_s = self._clock.monotonic() + QUARANTINE_S
        for guilty in hashes & self._at_last_death:
            self._refused_until.pop(guilty, None)  # it goes to the end, and nobody else for it
            if len(self._refused_until) >= MAX_REMEMBERED:
                self._refused_until.pop(next(iter(self._refused_until)))
            self._refused_until[guilty] = until_s
        if hashes:
            self._at_last_death = hashes


_encoder = msgspec.msgpack.Encoder(order="deterministic")


def content_hash(request: Request) -> bytes:
    """Hash what a request asks, without its id, times and priority."""
    content = (request.prompt, request.params, request.adapter)
    return hashlib.blake2b(_encoder.encode(content), digest_size=16).digest()
