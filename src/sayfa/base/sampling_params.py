"""What a client may ask of sampling. Frozen, crosses the wire, validates its own ranges.

Called by the server and by `LLM`; must not know vocabularies, contexts or tenants: what depends on the model is
checked where the model is known (`server.limits`, `llm`).
"""

import math

import msgspec

from sayfa.base.errors import InvalidRequest

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
    stop: strings, looked for by the text side only. stop_token_ids: looked for by the engine; the model's own
        end tokens are `eos_token_ids` and are put in by the text side, so that the engine needs no tokenizer.
    logprobs: None for none, else how many alternatives (0 = only the chosen token's). prompt_logprobs alike.
    max_tokens: None means up to the end of the context.
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
    stop: list[str] = []
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = []
    eos_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def check(self) -> None:
        """Raise InvalidRequest naming the first field that is out of its closed range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
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
        self._check_lists()

    def _check_lists(self) -> None:
        for name, limit in (
            ("stop", MAX_STOP_STRINGS),
            ("stop_token_ids", MAX_STOP_TOKEN_IDS),
            ("logit_bias", MAX_LOGIT_BIAS),
        ):
            if len(getattr(self, name)) > limit:
                raise InvalidRequest(
                    f"`{name}` has {len(getattr(self, name))} entries; at most {limit} are allowed.", param=name
                )
        for text in self.stop:
            if not text:
                raise InvalidRequest("`stop` holds an empty string; leave it out or give text.", param="stop")
            if len(text) > MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"`stop` holds a string of {len(text)} characters; at most {MAX_STOP_CHARS}.", param="stop"
                )
        for bias in self.logit_bias.values():
            if not (math.isfinite(bias) and -100 <= bias <= 100):
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


# Closed ranges, tested as `low <= value <= high` being true, so that NaN fails each of them.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("n", 1, MAX_N),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("seed", -MAX_SEED - 1, MAX_SEED),
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
)
