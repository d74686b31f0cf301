"""What one rendering of a template may cost. Called by `template_sandbox` only; knows nothing of templates.

A template comes with a model, and models come from strangers: a few characters can ask for unbounded time or memory.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

MAX_STEPS = 400_000
MAX_CPU_S = 0.25
MAX_NODES = 100_000
MAX_DEPTH = 64
MAX_INT_BITS = 4_096
MAX_CHARS_FACTOR = 32
_STEPS_BETWEEN_LOOKS = 64


# What a template may keep items in; a dict is one too, but is looked through by its items.
CONTAINERS: tuple[type[Any], ...] = (list, tuple, type({}.items()), type({}.keys()), type({}.values()))


class OverBudgetError(Exception):
    """The rendering costs more than it may. The message says which bound was met."""


class Budget:
    """Counts steps, looks at this thread's CPU time, and bounds the size of each value before it is made.

    max_chars: bound of every string that comes into being, of all strings in one container, and of the whole output;
    all strings ever made may have 32 times as many. The time is CPU time of the thread, so that a busy machine does
    not turn an honest template away.
    """

    def __init__(
        self, max_chars: int, cpu_s: Callable[[], float] = time.thread_time, max_cpu_s: float = MAX_CPU_S
    ) -> None:
        self.max_chars = max_chars
        self._cpu_s = cpu_s
        self._deadline_s = cpu_s() + max_cpu_s
        self._chars_left = MAX_CHARS_FACTOR * max_chars
        self._steps = 0
        self._next_look = _STEPS_BETWEEN_LOOKS

    def spend(self, steps: int = 1) -> None:
        """Count steps; one stands for a loop's turn, a call, or about a thousand characters handled."""
        self._steps += steps
        if self._steps >= self._next_look:
            self._next_look = self._steps + _STEPS_BETWEEN_LOOKS
            if self._steps > MAX_STEPS:
                raise OverBudgetError("too many steps")
            if self._cpu_s() > self._deadline_s:
                raise OverBudgetError("too much time")

    def chars(self, count: int) -> None:
        """Allow a string of `count` characters."""
        self._chars_left -= count
        if count > self.max_chars or self._chars_left < 0:
            raise OverBudgetError("too much text")
        self.spend(1 + (count >> 10))

    def items(self, count: int) -> None:
        """Allow a list of `count` items."""
        if count > MAX_NODES:
            raise OverBudgetError("a list of too many items")
        self.spend(1 + (count >> 6))

    def bits(self, count: int) -> None:
        """Allow a whole number of `count` bits."""
        if count > MAX_INT_BITS:
            raise OverBudgetError("too large a number")

    def weigh(self, value: Any, indent: int = 0) -> int:
        """Allow a nested value to exist; give how many characters it has at most when written as text.

        `indent` is how many go before each item for a level.
        """
        nodes, chars, depth, level = 0, 0, 0, [value]
        while level:
            depth += 1
            nodes += len(level)
            if nodes > MAX_NODES or depth > MAX_DEPTH:
                raise OverBudgetError("too large a value")
            chars += 4 * len(level) + indent * depth * len(level)
            below: list[Any] = []
            for item in level:
                if isinstance(item, str):
                    chars += len(item)
                elif isinstance(item, dict):
                    below += [*item.keys(), *item.values()]
                elif isinstance(item, CONTAINERS):
                    below += item
                if len(below) > MAX_NODES:
                    raise OverBudgetError("too large a value")
            level = below
        if chars > self.max_chars:
            raise OverBudgetError("too much text")
        self.spend(1 + (nodes >> 4))
        return chars


class CurrentBudget(threading.local):
    """The budget of the rendering that this thread is at, and its mark; outside of one there is nothing to spend."""

    value: Budget | None = None
    mark: str = ""

    def get(self) -> Budget:
        """Give the budget; raise OverBudgetError where no rendering is under way."""
        if self.value is None:
            raise OverBudgetError("no rendering is under way")
        return self.value
