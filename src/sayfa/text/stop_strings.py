"""Looks for stop strings in text that comes in pieces. Called by `text.detokenizer` only; knows no tokens.

The rule does not depend on how the text is cut: the stop string that is *complete* first ends the text; of several
that end at the same character, the longest. Text is held back only while it may still be the beginning of one.
"""

from collections.abc import Iterable
from functools import lru_cache

from sayfa.base.faults import fault


class StopFinder:
    """One automaton (Knuth, Morris, Pratt) for each stop string, moved on character by character.

    Invariants: `_states[i]` is the length of the longest beginning of stop string i that the text so far ends with, so
    `max(_states)` characters are to be held back, fewer than the longest stop string has. Costs O(new characters × stop
    strings), whatever was seen before.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)

    @property
    def held(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._states, default=0)

    def find(self, text: str) -> tuple[int, int] | None:
        """Move on over `text`; give (characters of `text` up to the match's end, length of the match), or None.

        After a match the finder is used up.
        """
        fault("text.stop_strings")
        best: tuple[int, int] | None = None
        for index, stop in enumerate(self._stops):
            end = self._advance(index, stop, text if best is None else text[: best[0]])
            # Longer ones come first, so one that ends at the same place counts only if nothing did before.
            if end is not None and (best is None or end < best[0]):
                best = end, len(stop)
        return best

    def _advance(self, index: int, stop: str, text: str) -> int | None:
        state, fallback, size, at = self._states[index], self._fallbacks[index], len(stop), 0
        while at < len(text):
            if state == 0:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            char = text[at]
            while state and stop[state] != char:
                state = fallback[state - 1]
            state += stop[state] == char
            at += 1
            if state == size:
                return at
        self._states[index] = state
        return None


@lru_cache(maxsize=64)  # the answers of a request share theirs: a thousand of them took seconds and 300 MB
def _fallbacks(stop: str) -> list[int]:
    """Give for each beginning of `stop` the length of its longest proper beginning that is also its end. Only read."""
    table, state = [0] * len(stop), 0
    for at in range(1, len(stop)):
        while state and stop[state] != stop[at]:
            state = table[state - 1]
        state += stop[state] == stop[at]
        table[at] = state
    return table
