"""Token ids of one answer to text, as they come, and the end at a stop string.

Called by the server and by `llm`, once for each choice; the plain answer is the same machine fed in other pieces, so
streamed and plain texts are equal by construction. It must not know requests or HTTP.

    tokens → true bytes → whole characters → │ seen by the client │ held: may begin a stop string │
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from sayfa.base.faults import fault
from sayfa.text.stop_strings import StopFinder
from sayfa.text.utf8 import Utf8Decoder


class TokenBytes(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """True bytes of a token."""
        ...


class Detokenizer:
    """The text of one answer.

    Invariants: 1. the deltas joined are what `text` says; 2. nothing of a stop string, nor anything behind it, is in
    them (with `include_stop` the stop string itself is), but in the text of the first `min_tokens` tokens none is
    looked for; 3. each delta is whole characters; an unfinished character at
    the end is dropped; 4. `offsets[i]` is where token i begins in the text, in characters, and stays inside it;
    5. a call costs the same however much text there is already.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        *,
        min_tokens: int = 0,
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._special = tokenizer.special_ids if skip_special else frozenset()
        self._finder = StopFinder(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._utf8 = Utf8Decoder()
        self._sent: list[str] = []
        self._held = ""
        self._num_chars = 0  # decoded so far
        self._num_given = 0  # given out so far, or certain to be
        self.offsets: list[int] = []
        self.stop_string: str | None = None
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was given out so far."""
        return "".join(self._sent)

    @property
    def num_tokens(self) -> int:
        """How many tokens were taken, the one that completed a stop string included."""
        return len(self.offsets)

    def push(self, token_ids: Iterable[int], finished: bool = False) -> tuple[str, bool]:
        """Take tokens; give the text that became certain, and whether a stop string ended the answer.

        `finished` says that no token follows: what was held back is given out. After the end further tokens are
        ignored. Raises InvalidRequest for an unknown id.
        """
        fault("text.detokenize")
        delta: list[str] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.offsets.append(self._num_chars)
            if token_id not in self._special:
                delta.append(self._take(self._utf8.push(self._token_bytes(token_id))))
        if finished and not self.stopped:
            delta.append(self._give(self._held))
            self._held = ""
        text = "".join(delta)
        if text:
            self._sent.append(text)
        return text, self.stopped

    def _take(self, new: str) -> str:
        """Add new characters, and give those that cannot be part of a stop string any more."""
        self._num_chars += len(new)
        if self._finder is None or not new or self.num_tokens <= self._min_tokens:
            return self._give(new)
        match = self._finder.find(new)
        text = self._held + new
        if match is not None:
            return self._end(text[: len(self._held) + match[0]], match[1])
        keep = len(text) - self._finder.held
        self._held = text[keep:]
        return self._give(text[:keep])

    def _give(self, text: str) -> str:
        self._num_given += len(text)
        return text

    def _end(self, text: str, stop_chars: int) -> str:
        """End the answer: `text` is what was held and what is new, up to the end of the stop string."""
        start = len(text) - stop_chars
        self.stop_string = text[start:]
        self.stopped = True
        self._held = ""
        given = self._give(text if self._include_stop else text[:start])
        # Tokens that began inside the stop string have no place in the text; they point at its end.
        for index in range(len(self.offsets) - 1, -1, -1):
            if self.offsets[index] <= self._num_given:
                break
            self.offsets[index] = self._num_given
        return given
