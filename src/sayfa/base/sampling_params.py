"""What a client may ask of sampling. Frozen, crosses the wire, validates its own types and ranges.

Called by the server and by `LLM`; must not know vocabularies, contexts or tenants: what depends on the model is
checked where the model is known (`server.limits`, `llm`).
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from sayfa.base.errors import InvalidRequest
from sayfa.base.quoting import quoted

MAX_TOP_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling wishes of one request; the defaults are OpenAI's.

    temperature: 0 is greedy; below 1e-5 counts as 0.
    top_k: 0 or -1 switches it off. top_p in (0, 1]. min_p in [0, 1]: relative to the most likely token.
    repetition_penalty counts prompt and output; presence and frequency penalty count the output only.
    seed: None lets the engine draw one; the noise is keyed by (seed, branch, position).
    stop: strings, or one string, looked for by the text side only. stop_token_ids: looked for by the engine; the
        model's own end tokens are `eos_token_ids` and are put in by the text side, so that the engine needs no
        tokenizer.
    logprobs: None for none, else how many alternatives (0 = only the chosen token's). prompt_logprobs alike.
    max_tokens: None means up to the end of the context.
    A tuple counts as a list.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] = []
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = []
    eos_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # a text is a sequence of texts, too: as one it would mean each of its letters
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        for name in _LISTED:  # who reads them may join them to a list, or index an array by them
            if isinstance(values := getattr(self, name), tuple):
                msgspec.structs.force_setattr(self, name, list(values))

    def check(self) -> None:
        """Raise InvalidRequest naming the first field that has another type or is out of its closed range.

        Nobody but the wire looks at types before, so a caller in this process may have put anything in.
        """
        for name, kinds, low, high in _RANGES:
            value = getattr(self, name)
            if type(value) not in kinds and not _is_one(value, kinds):
                raise _wrong_type(name, value, kinds)
            if value is not None and not (low <= value <= high):
                raise InvalidRequest(f"`{name}` is {value!r}, but must lie in [{low}, {high}].", param=name)
        if not self.top_p > 0:
            raise InvalidRequest(f"`top_p` is {self.top_p!r}, but must be above 0 and at most 1.", param="top_p")
        if not self.repetition_penalty > 0:
            raise InvalidRequest(
                f"`repetition_penalty` is {self.repetition_penalty!r}, but must be above 0 and at most 100.",
                param="repetition_penalty",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"`min_tokens` is {self.min_tokens}, which is more than `max_tokens` ({self.max_tokens}).",
                param="min_tokens",
            )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, getattr(self, name), (bool,))
        self._check_lists()
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise InvalidRequest(
                "`allowed_token_ids` is empty, so that no token could be drawn; list one, or leave it out.",
                param="allowed_token_ids",
            )
        if self.min_tokens and self.allowed_token_ids and self.end_token_ids.issuperset(self.allowed_token_ids):
            raise InvalidRequest(
                "`allowed_token_ids` lists only tokens that end the answer, but `min_tokens` is "
                f"{self.min_tokens}; allow another one, or leave `min_tokens` out.",
                param="allowed_token_ids",
            )

    @property
    def end_token_ids(self) -> set[int]:
        """Token ids that end the answer, and so must not be drawn before `min_tokens`."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else self.eos_token_ids)}

    def _check_lists(self) -> None:
        for name, holder, kinds, limit in _LISTS:
            values = getattr(self, name)
            if not _is_one(values, holder):
                raise _wrong_type(name, values, holder)
            if not values:
                continue
            if limit is not None and len(values) > limit:
                raise InvalidRequest(f"`{name}` has {len(values)} entries; at most {limit} are allowed.", param=name)
            _check_entries(name, values, kinds)
        for text in self.stop:
            if not text:
                raise InvalidRequest("`stop` holds an empty string; leave it out or give text.", param="stop")
            if len(text) > MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"`stop` holds a string of {len(text)} characters; at most {MAX_STOP_CHARS}.", param="stop"
                )
        _check_entries("logit_bias", self.logit_bias.values(), _NUMBER)
        for bias in self.logit_bias.values():
            if not -100 <= bias <= 100:
                raise InvalidRequest(f"`logit_bias` holds {bias!r}; values lie in [-100, 100].", param="logit_bias")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a token id lies outside [0, vocab_size)."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"`{name}` holds the token id {token}, but ids of this model lie in [0, {vocab_size - 1}].",
                        param=name,
                    )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without noise."""
        return self.temperature < 1e-5


def _is_one(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether it is of these kinds, or made from one of them. A switch is no number, although Python says so."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _check_entries(name: str, entries: Iterable[Any], kinds: tuple[type, ...]) -> None:
    if set(map(type, entries)).issubset(kinds):  # quick: thousands of ids may be allowed
        return
    for entry in entries:
        if not _is_one(entry, kinds):
            raise InvalidRequest(
                f"`{name}` holds {quoted(entry, 80)} ({type(entry).__name__}), but its entries must be "
                f"{_WORDS[kinds]}s.",
                param=name,
            )


def _wrong_type(name: str, value: Any, kinds: tuple[type, ...]) -> InvalidRequest:
    return InvalidRequest(
        f"`{name}` is {quoted(value, 80)} ({type(value).__name__}), but must be "
        f"{_ARTICLE.get(kinds, 'a ')}{_WORDS[kinds]}.",
        param=name,
    )


_NUMBER = (float, int)
_WHOLE = (int,)
_WHOLE_OR_NONE = (int, type(None))
_SEVERAL = (list, tuple)
_SEVERAL_OR_NONE = (list, tuple, type(None))
_WORDS: dict[tuple[type, ...], str] = {
    _NUMBER: "number",
    _WHOLE: "whole number",
    _WHOLE_OR_NONE: "whole number or None",
    (str,): "string",
    (bool,): "True or False",
    (dict,): "dict from token ids to numbers",
    _SEVERAL: "list",
    _SEVERAL_OR_NONE: "list or None",
}
_ARTICLE: dict[tuple[type, ...], str] = {(bool,): ""}

# Closed ranges, tested as `low <= value <= high` being true, so that NaN fails each of them.
_RANGES: tuple[tuple[str, tuple[type, ...], float, float], ...] = (
    ("n", _WHOLE, 1, MAX_N),
    ("temperature", _NUMBER, 0.0, 100.0),
    ("top_p", _NUMBER, 0.0, 1.0),
    ("top_k", _WHOLE, -1, 2**31 - 1),
    ("min_p", _NUMBER, 0.0, 1.0),
    ("repetition_penalty", _NUMBER, 0.0, 100.0),
    ("presence_penalty", _NUMBER, -2.0, 2.0),
    ("frequency_penalty", _NUMBER, -2.0, 2.0),
    ("seed", _WHOLE_OR_NONE, -MAX_SEED - 1, MAX_SEED),
    ("max_tokens", _WHOLE_OR_NONE, 0, 2**31 - 1),
    ("min_tokens", _WHOLE, 0, 2**31 - 1),
    ("logprobs", _WHOLE_OR_NONE, 0, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", _WHOLE_OR_NONE, 0, MAX_TOP_LOGPROBS),
)
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_LISTED = ("stop", "stop_token_ids", "eos_token_ids", "allowed_token_ids")
_LISTS: tuple[tuple[str, tuple[type, ...], tuple[type, ...], int | None], ...] = (
    ("stop", _SEVERAL, (str,), MAX_STOP_STRINGS),
    ("stop_token_ids", _SEVERAL, _WHOLE, MAX_STOP_TOKEN_IDS),
    ("eos_token_ids", _SEVERAL, _WHOLE, None),
    ("allowed_token_ids", _SEVERAL_OR_NONE, _WHOLE, None),
    ("logit_bias", (dict,), _WHOLE, MAX_LOGIT_BIAS),
)
