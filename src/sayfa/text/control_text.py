"""Finds the spellings of control tokens in text, and breaks those that users wrote.

Called by `chat_template` (to break) and by `tokenizer` (to find). A user's text is part of a rendered template, where a
spelled-out control token would become a real one and let the user speak in another's name. So before rendering a
private character, the mark, is put into each such spelling; the tokenizer takes it out again and encodes the rest as
plain text. What the user wrote stays complete; it only has no power.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sayfa.base.errors import ModelError

MAX_EDGE_CHARS = 1 << 24
"""Of all proper beginnings and endings together; models have up to a million. One token of a megabyte has a million of
each, of half a megabyte on average."""
# Characters that no standard gives a meaning; one that the request does not use becomes the mark.
_PRIVATE = [chr(code) for code in range(0xF8E0, 0xF900)]


class ControlTexts:
    """The spellings of a vocabulary's control tokens, found as a tokenizer finds them: leftmost, then longest.

    Raises ModelError for spellings so long that no model needs them.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if text)
        if sum(len(text) ** 2 for text in self._texts) > MAX_EDGE_CHARS:
            raise ModelError(
                f"the tokenizer has {len(self._texts):,} control tokens of up to {max(map(len, self._texts)):,} "
                "characters, which no model needs; its files are damaged"
            )
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        self._firsts = frozenset(text[0] for text in self._texts)
        self._beginnings = frozenset(text[:size] for text in self._texts for size in range(1, len(text)))
        self._endings = frozenset(text[size:] for text in self._texts for size in range(1, len(text)))
        # Most texts are told from the characters at their edges alone.
        self._last_of_beginnings = frozenset(text[-1] for text in self._beginnings)
        self._first_of_endings = frozenset(text[0] for text in self._endings)

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Give (start, end) of each spelling, in order, none over another."""
        at = 0
        for start in self._candidates(text):
            if start < at:
                continue
            for size in self._lengths:
                spelling = text[start : start + size]
                if spelling in self._texts:
                    at = start + len(spelling)  # at the text's end a slice is shorter than asked for
                    yield start, at
                    break

    def _candidates(self, text: str) -> list[int]:
        places: list[int] = []
        for first in self._firsts:
            at = text.find(first)
            while at >= 0:
                places.append(at)
                at = text.find(first, at + 1)
        return sorted(places)

    def broken(self, text: str, mark: str) -> str:
        """Put the mark behind the first character of each spelling.

        A text may also begin or end with a part of one, which its neighbour in the template could complete; the mark
        stands at that edge then. The edge is looked for behind white space, since templates trim.
        """
        pieces, at = [], 0
        for start, end in self.find(text):
            pieces += [text[at : start + 1], mark, text[start + 1 : end]]
            at = end
        if pieces:
            text = "".join(pieces) + text[at:]
        longest = self._lengths[0] if self._lengths else 0
        head = text.lstrip()
        if head[:1] in self._first_of_endings and any(head[:size] in self._endings for size in range(1, longest)):
            text = text[: len(text) - len(head)] + mark + head
        tail = text.rstrip()
        if tail[-1:] in self._last_of_beginnings and any(
            tail[-size:] in self._beginnings for size in range(1, longest)
        ):
            text = tail + mark + text[len(tail) :]
        return text

    def break_all(self, value: Any, mark: str) -> Any:
        """Copy data with every string in it broken, the names in objects too; what comes is plain JSON data."""
        if isinstance(value, str):
            return self.broken(value, mark)
        if isinstance(value, Mapping):
            return {self.break_all(key, mark): self.break_all(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.break_all(item, mark) for item in value]
        return value


def unused_marks(texts: Iterable[str], count: int) -> list[str]:
    """Choose private characters that none of the texts holds, spelled out or as a JSON escape.

    Raises ValueError if the texts hold nearly all of them, which no honest text does.
    """
    texts = list(texts)
    free = [
        mark for mark in _PRIVATE if not any(mark in text or f"\\u{ord(mark):04x}" in text.lower() for text in texts)
    ]
    if len(free) < count:
        raise ValueError("the text uses every private character")
    return free[:count]


def strings_in(value: Any) -> Iterator[str]:
    """Give every string in data, without recursion: what `ControlTexts.break_all` would look at."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
