"""How long the queue takes: an honest Retry-After, and whether a deadline can still be met.

Called by `engine.add`; learns from finished branches and from the time of steps. Must not know why things take long.
"""

import math
import random
from collections import deque

REMEMBERED = 64
"""Steps, and moments at which branches finished: many may finish at one, as those of a batch do."""
MIN_FINISHED = 8
"""With fewer finished branches than this nothing is promised or refused by estimate."""
MAX_RETRY_S = 120
JITTER = 0.25
"""Part by which answers differ at random, so that refused clients do not come back together."""


class QueueEstimate:
    """Seconds between finished answers: since work began, or over the last moments at which some finished."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._finished: deque[tuple[float, int]] = deque()
        """(when, how many) of the moments after `_since_s`; `_num_finished` in all."""
        self._num_finished = 0
        self._since_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=REMEMBERED)

    def note_finished(self, count: int, now_s: float) -> None:
        """Learn that `count` answers ended at `now_s`."""
        if len(self._finished) >= REMEMBERED:
            self._since_s, num_gone = self._finished.popleft()
            self._num_finished -= num_gone
        self._finished.append((now_s, count))
        self._num_finished += count

    def note_step(self, step_s: float) -> None:
        """Learn how long a step took."""
        self._steps_s.append(step_s)

    def least_s(self, num_steps: int) -> float:
        """Seconds that so many steps take if each is as short as the shortest of late; 0 if none is known."""
        return min(self._steps_s, default=0.0) * num_steps

    def begin(self, now_s: float) -> None:
        """Start anew after an idle time, which is not how long answers take."""
        self._finished.clear()
        self._num_finished = 0
        self._since_s = now_s

    def wait_s(self, num_answers: int, now_s: float) -> float | None:
        """Seconds until `num_answers` more have ended, or None if that is not known yet."""
        if self._num_finished < MIN_FINISHED:
            return None
        return (now_s - self._since_s) / self._num_finished * num_answers

    def retry_after_s(self, num_answers: int, now_s: float) -> int:
        """Whole seconds until half of a queue of so many is gone, with jitter; at least 1, at most MAX_RETRY_S."""
        wait_s = self.wait_s(num_answers, now_s)
        if wait_s is None:
            return 1
        factor = 1 + JITTER * (2 * self._rng.random() - 1)
        return max(1, min(MAX_RETRY_S, math.ceil(wait_s / 2 * factor)))
