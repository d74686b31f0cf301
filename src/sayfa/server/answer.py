"""One answer growing: tokens of one branch become text, log-probabilities and an end.

Called by `generate`, and by `llm_jobs` offline, once for each engine output. Streamed and plain responses are both made
of the pieces that come out here, so they cannot differ. Knows no HTTP and no response format.

Rules:
1. A token's offset is the number of characters of the whole text that were complete before it (parts of one character
   share an offset), an echoed prompt included.
2. A token is told (log-probabilities) not before the text in which it begins has been released; when a stop string
   cut the text, tokens that begin behind the cut are not told at all.
3. The pieces joined do not depend on how the engine's outputs were merged.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sayfa.base.messages import EngineOutput
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import TokenLogprobs
from sayfa.text.detokenizer import Detokenizer
from sayfa.text.tokenizer import Tokenizer


class Entry(NamedTuple):
    """A token as told to the client. logprobs is None for a prompt's first token, which nothing predicts."""

    offset: int
    token: int
    logprobs: TokenLogprobs | None


class Piece(NamedTuple):
    """What one engine output added to one answer. finish is set on the answer's last piece."""

    choice: int
    text: str
    tokens: list[int]
    entries: list[Entry]
    finish: str | None


class Branch:
    """One answer: its detokenizer, its counts, and the tokens that are not told yet.

    index: the choice's index in the response. wants_entries: whether log-probabilities are to be told.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, params: SamplingParams, wants_entries: bool) -> None:
        self.index = index
        self.num_tokens = 0
        self.sum_logprob = 0.0
        self.finish: str | None = None
        self._detokenizer = Detokenizer(
            tokenizer,
            params.stop,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._wants_entries = wants_entries
        self._origin = 0
        self._released = 0
        self._untold: list[Entry] = []

    def begin_with(self, text: str, entries: list[Entry]) -> Piece:
        """Put an echoed prompt before the answer."""
        self._released = self._origin = len(text)
        return Piece(self.index, text, [], entries, None)

    def push(self, output: EngineOutput) -> Piece:
        """Take an output in. After a piece with `finish` nothing more may be pushed."""
        tokens = output.tokens
        text, stopped = self._detokenizer.push(tokens, output.finish is not None)
        before = self.num_tokens
        self.num_tokens = self._detokenizer.num_tokens
        if stopped:
            tokens = tokens[: self.num_tokens - before]
        self.finish = "stop" if stopped else output.finish
        entries: list[Entry] = []
        if self._wants_entries:
            self._released += len(text)
            self._take(tokens, output.logprobs, before)
            entries = self._tell(everything=self.finish is not None and not stopped)
        return Piece(self.index, text, tokens, entries, self.finish)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._detokenizer.stop_string

    @property
    def mean_logprob(self) -> float:
        """By which `best_of` ranks; an empty answer ranks last."""
        return self.sum_logprob / self.num_tokens if self.num_tokens else float("-inf")

    def _take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], before: int) -> None:
        offsets = self._detokenizer.offsets[before:]
        for token, offset, values in zip(tokens, offsets, logprobs, strict=False):
            self._untold.append(Entry(self._origin + offset, token, values))
            self.sum_logprob += values.logprob

    def _tell(self, everything: bool) -> list[Entry]:
        count = len(self._untold)
        if not everything:
            count = next((i for i, entry in enumerate(self._untold) if entry.offset >= self._released), count)
        told, self._untold = self._untold[:count], self._untold[count:]
        return told


def echo_prompt(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[TokenLogprobs], skip_special: bool, wants_entries: bool
) -> tuple[str, list[Entry]]:
    """Text and entries of an echoed prompt. scores: of the positions 1.. of the prompt."""
    text = tokenizer.decode(ids, skip_special)
    if not wants_entries:
        return text, []
    meter = Detokenizer(tokenizer, (), False, skip_special)
    whole, _ = meter.push(ids, True)
    # A whole text may lose the space that its first token begins with.
    lost = len(whole) - len(text)
    values = [None, *scores]
    return text, [
        Entry(max(0, offset - lost), token, values[position] if position < len(values) else None)
        for position, (token, offset) in enumerate(zip(ids, meter.offsets, strict=True))
    ]
