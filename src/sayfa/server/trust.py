"""Whether the engine can be trusted: repeated failures in computing make the server not ready.

Called by `generate` at each such failure and each answer, by `health` and the page of metrics. One request with numbers
that are not finite, or that fails its step, may be a matter of that request; several of different content are a matter
of the weights (a bad bit in memory, a damaged file) or of an engine that is broken, and whatever it says is doubtful.
Knows no HTTP.

The rule: not ready while, of the requests that ended in the last ten minutes on this start of the engine, three of
different content failed in computing, and they are at least one in ten. So one request that is sent again and again
proves nothing, nor do a few strange ones among thousands. Requests that come all the same are served. It is over when
the engine is started anew, since it reads its weights again, or ten minutes after the errors.
"""

import logging
from collections import deque
from dataclasses import dataclass

from sayfa.base.clock import Clock
from sayfa.base.messages import Request
from sayfa.wire.supervisor import content_hash

log = logging.getLogger("sayfa.server")

WINDOW_S = 600.0
MIN_CONTENTS = 3
MIN_SHARE = 0.1
FAILURES = ("numerical_error", "step_failed")
"""Codes of the failures that count; all others are somebody's wish or a matter of time."""
MAX_REMEMBERED = 1000
"""Contents of errors kept at most; more of them change nothing."""
_BUCKET_S = 10.0


@dataclass
class _Bucket:
    """What ended in ten seconds: a bounded memory for any number of requests."""

    begin_s: float
    num_ended: int = 0
    num_errors: int = 0


class Trust:
    """Remembers the failures of the last ten minutes. Each time is on the monotonic clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._errors: deque[tuple[float, bytes]] = deque(maxlen=MAX_REMEMBERED)
        self._ended: deque[_Bucket] = deque()
        self._told = False

    def note_end(self) -> None:
        """An answer of the engine ended well."""
        self._note(0)

    def note_error(self, request: Request) -> None:
        """A request failed in computing."""
        self._errors.append((self._clock.monotonic(), content_hash(request)))
        self._note(1)
        self.why_not()  # so that the log tells at once

    def _note(self, num_errors: int) -> None:
        now_s = self._clock.monotonic()
        if not self._ended or now_s - self._ended[-1].begin_s >= _BUCKET_S:
            self._ended.append(_Bucket(now_s))
        self._ended[-1].num_ended += 1
        self._ended[-1].num_errors += num_errors
        self._forget(now_s)

    def forget_all(self) -> None:
        """An engine was started, with weights that it read anew."""
        self._errors.clear()
        self._ended.clear()
        self._told = False

    def why_not(self) -> str:
        """A sentence if the engine is not to be trusted, else the empty string."""
        if not self._errors:
            return self._tell("")
        self._forget(self._clock.monotonic())
        contents = len({content for _, content in self._errors})
        num_ended = sum(bucket.num_ended for bucket in self._ended)
        num_errors = sum(bucket.num_errors for bucket in self._ended)
        if contents < MIN_CONTENTS or num_errors < MIN_SHARE * num_ended:
            return self._tell("")
        return self._tell(
            f"{num_errors} of {num_ended} requests within {WINDOW_S / 60:.0f} minutes, {contents} of them with "
            "different content, failed in computing (a step that raises, or numbers that are not finite); the engine "
            "or its weights in memory may be damaged: restart the server, and compare the model's files with their "
            "checksums"
        )

    def _forget(self, now_s: float) -> None:
        while self._errors and now_s - self._errors[0][0] > WINDOW_S:
            self._errors.popleft()
        while self._ended and now_s - self._ended[0].begin_s > WINDOW_S + _BUCKET_S:
            self._ended.popleft()

    def _tell(self, reason: str) -> str:
        if bool(reason) != self._told:
            self._told = bool(reason)
            if reason:
                log.error("not ready any more: %s", reason)
            else:
                log.warning("ready again: few or no failures in computing in the last %.0f minutes", WINDOW_S / 60)
        return reason
