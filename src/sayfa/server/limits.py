"""Admission: the one place that bounds what a request may cost, for all routes, before any work is done for it.

Called by every POST handler through `TABLE`; a test fails for a route that is not in it. Order: ranges and list
lengths, then a cost in answers, tokens and log-probability values (Python integers, so that nothing wraps), then
bytes of text against the context, and only then may text be tokenized; afterwards the exact lengths. A prompt is
never cut. Knows no tokens' texts and no engine but its figures.
"""

from collections.abc import Collection, Sequence

import msgspec

from sayfa.base.config import ServerOptions
from sayfa.base.errors import InvalidRequest
from sayfa.base.faults import fault
from sayfa.base.messages import EngineInfo
from sayfa.base.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from sayfa.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    Sampled,
    TokenizeRequest,
)

BYTES_PER_TOKEN = 8
"""A text of more bytes than this times the context cannot fit; it is refused before it is tokenized."""
RENDERED_CHARS_PER_TOKEN = 4 * BYTES_PER_TOKEN
"""The same of a rendered conversation, in characters: a template's marks are tokens of a dozen characters and more."""
MAX_ANSWERS = 1024
MAX_COST_TOKENS = 4_000_000
MAX_LOGPROB_VALUES = 8_000_000
MAX_ALLOWED_IDS = 10_000
MAX_SALT_CHARS = 256
MAX_PRIORITY = 100
MAX_DEADLINE_S = 1e7
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

TABLE: dict[str, str] = {
    "/v1/chat/completions": "admit_chat",
    "/v1/completions": "admit_completion",
    "/tokenize": "admit_tokenize",
    "/detokenize": "admit_detokenize",
    "/ping": "costs nothing: no body is read",
}
"""Route → the function here that admits its requests."""


class Figures(msgspec.Struct, frozen=True):
    """What limits depend on."""

    context_tokens: int
    vocab_size: int
    max_n: int
    max_prompts: int

    @classmethod
    def of(cls, info: EngineInfo, vocab_size: int, options: ServerOptions) -> "Figures":
        """Take the figures out of their three sources. Ids must be known to both the model and its tokenizer."""
        return cls(info.max_model_len, min(info.vocab_size, vocab_size), options.max_n, options.max_prompts)


def admit_chat(request: ChatRequest, figures: Figures, eos_ids: Collection[int]) -> SamplingParams:
    """Check a chat request's cost before tokenizing; raise InvalidRequest naming the field."""
    if not request.messages:
        raise InvalidRequest("`messages` is empty; send at least one message.", param="messages")
    for name, value in (("max_tokens", request.max_tokens), ("max_completion_tokens", request.max_completion_tokens)):
        if value is not None:  # the one that loses, too: a wrong value is a mistake wherever it stands
            _check_range(name, value, 1, 2**31 - 1)
    max_tokens, length_field = asked_length(request)
    if max_tokens is not None and request.min_tokens is not None and request.min_tokens > max_tokens:
        raise InvalidRequest(
            f"`min_tokens` is {request.min_tokens}, which is more than `{length_field}` ({max_tokens}).",
            param="min_tokens",
        )
    if request.top_logprobs is not None:
        _check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not request.logprobs:
            raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    n = 1 if request.n is None else request.n
    _check_range("n", n, 1, figures.max_n)
    params = _params(request, eos_ids, n=n, max_tokens=max_tokens, logprobs=logprobs)
    _check_cost(params, figures, 1, length_field, "top_logprobs")
    check_text_bytes(message_bytes(request.messages), figures, "messages")
    return params


def asked_length(request: ChatRequest) -> tuple[int | None, str]:
    """The most tokens that a chat asks for, if it asks, and the field that says so."""
    if request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def admit_completion(request: CompletionRequest, figures: Figures, eos_ids: Collection[int]) -> SamplingParams:
    """Check a completion request's cost before tokenizing; raise InvalidRequest naming the field."""
    prompts = split_prompts(request.prompt)
    if len(prompts) > figures.max_prompts:
        raise InvalidRequest(
            f"`prompt` lists {len(prompts)} prompts; at most {figures.max_prompts} are allowed.", param="prompt"
        )
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("`prompt` is empty; there is nothing to continue.", param="prompt")
        if not isinstance(prompt, str):
            _check_context(len(prompt), 0 if max_tokens == 0 else None, figures, "prompt")
            check_ids("prompt", prompt, figures)
    n = 1 if request.n is None else request.n
    _check_range("n", n, 1, figures.max_n)
    best_of = n if request.best_of is None else request.best_of
    _check_range("best_of", best_of, 1, figures.max_n)
    if best_of < n:
        raise InvalidRequest(f"`best_of` is {best_of}, but must be at least `n` ({n}).", param="best_of")
    if best_of > n and request.stream:
        raise InvalidRequest("`best_of` above `n` cannot be streamed: the best is known at the end.", param="best_of")
    _check_range("max_tokens", max_tokens, 0, 2**31 - 1)
    if max_tokens == 0 and not request.echo:
        raise InvalidRequest("`max_tokens` is 0, which needs `echo: true` (to score a prompt).", param="max_tokens")
    if request.logprobs is not None:
        _check_range("logprobs", request.logprobs, 0, MAX_TOP_LOGPROBS)
    logprobs = request.logprobs if request.logprobs is not None or best_of == n else 0
    params = _params(request, eos_ids, n=best_of, max_tokens=max_tokens, logprobs=logprobs)
    if request.echo and request.logprobs is not None:
        wanted = max(request.logprobs, params.prompt_logprobs or 0)
        params = msgspec.structs.replace(params, prompt_logprobs=wanted)
    _check_cost(params, figures, len(prompts))
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text_bytes(_utf8_bytes(prompt), figures, "prompt")
    return params


def admit_tokenize(request: TokenizeRequest, figures: Figures) -> None:
    """Check the length of a text that only wants its ids."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("Send either `prompt` or `messages`.", param="prompt")
    if request.prompt is not None:
        check_text_bytes(_utf8_bytes(request.prompt), figures, "prompt")
    elif not request.messages:
        raise InvalidRequest("`messages` is empty; send at least one message.", param="messages")
    else:
        check_text_bytes(message_bytes(request.messages), figures, "messages")


def admit_detokenize(request: DetokenizeRequest, figures: Figures) -> None:
    """Check the number and range of ids that only want their text."""
    limit = BYTES_PER_TOKEN * figures.context_tokens
    if len(request.tokens) > limit:
        raise InvalidRequest(
            f"`tokens` has {len(request.tokens)} entries; at most {limit} are allowed.", param="tokens"
        )
    check_ids("tokens", request.tokens, figures)


def admit_lengths(
    prompts: Sequence[Sequence[int]], params: SamplingParams, figures: Figures, param: str, length_field: str | None
) -> None:
    """Check prompts against the context, now that their exact lengths are known.

    length_field: by which the caller chose max_tokens, so that it must fit behind each prompt; None for a default. Then
    the engine ends each answer where its own prompt leaves no more room, whatever the others' lengths are.
    """
    fault("server.admit")
    longest = max(map(len, prompts))
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest(f"`{param}` is empty; there is nothing to continue.", param=param)
    needed = params.max_tokens if length_field or params.max_tokens == 0 else None
    _check_context(longest, needed, figures, param, length_field or "max_tokens")
    room = figures.context_tokens - longest
    if params.min_tokens > room:
        raise InvalidRequest(
            f"`min_tokens` is {params.min_tokens}, but the context of {figures.context_tokens} tokens leaves room for "
            f"{room} after a prompt of {longest}.", param="min_tokens", code="context_length_exceeded",
        )  # fmt: skip


def split_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Bring the four spellings of `prompt` to one: a list of texts and id lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` is empty; there is nothing to continue.", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def check_ids(name: str, ids: Sequence[int], figures: Figures) -> None:
    """Raise InvalidRequest if an id is not one of the vocabulary's."""
    if ids and not (min(ids) >= 0 and max(ids) < figures.vocab_size):
        wrong = next(token for token in ids if not 0 <= token < figures.vocab_size)
        raise InvalidRequest(
            f"`{name}` holds the token id {wrong}, but ids of this model lie in [0, {figures.vocab_size - 1}].",
            param=name,
        )


def check_text_bytes(num_bytes: int, figures: Figures, param: str) -> None:
    """Raise InvalidRequest for a text that cannot fit, however its bytes fall into tokens."""
    limit = BYTES_PER_TOKEN * figures.context_tokens
    if num_bytes > limit:
        raise InvalidRequest(
            f"`{param}` has {num_bytes} bytes of text, but this model's context is {figures.context_tokens} tokens; "
            f"texts above {limit} bytes are refused. Send a shorter one.", param=param, code="context_length_exceeded",
        )  # fmt: skip


def check_rendered(text: str, figures: Figures) -> None:
    """Raise InvalidRequest for a conversation of which the template made more than fits: many short messages."""
    limit = RENDERED_CHARS_PER_TOKEN * figures.context_tokens
    if len(text) > limit:
        raise InvalidRequest(
            f"`messages` come to {len(text)} characters with what the model's chat template puts around them; above "
            f"{limit} they are refused, since the context is {figures.context_tokens} tokens. Send fewer.",
            param="messages", code="context_length_exceeded",
        )  # fmt: skip


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def message_bytes(messages: Sequence[Message]) -> int:
    """All that a template may show of messages, in bytes."""
    total = 0
    for message in messages:
        parts = message.content if isinstance(message.content, list) else ()
        texts = [message.content, message.refusal, message.name, message.tool_call_id, message.reasoning_content]
        texts += [message.reasoning, *(text for part in parts for text in (part.text, part.refusal))]
        total += sum(_utf8_bytes(text) for text in texts if isinstance(text, str))
        for call in message.tool_calls or ():
            total += len(msgspec.json.encode(call))
    return total


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"`{name}` is {value}, but must lie in [{low}, {high}].", param=name)


def _check_context(
    num_prompt: int, max_tokens: int | None, figures: Figures, param: str, length_field: str = "max_tokens"
) -> None:
    context = figures.context_tokens
    room = context - num_prompt
    if max_tokens == 0 and room == 0:
        return  # scoring needs no room for an answer
    if room < 1:
        raise InvalidRequest(
            f"This model's context is {context} tokens, but the prompt has {num_prompt}, which leaves no room for an "
            "answer. Send a shorter prompt.", param=param, code="context_length_exceeded",
        )  # fmt: skip
    if max_tokens is not None and max_tokens > room:
        raise InvalidRequest(
            f"`{length_field}` is {max_tokens}, but this model's context of {context} tokens leaves room for {room} "
            f"after a prompt of {num_prompt}; lower `{length_field}` or shorten the prompt.",
            param=length_field, code="context_length_exceeded",
        )  # fmt: skip


def _check_cost(
    params: SamplingParams,
    figures: Figures,
    num_prompts: int,
    length_field: str = "max_tokens",
    logprobs_field: str = "logprobs",
) -> None:
    """Bound what multiplies. The fields: by which this route's callers ask for length and log-probabilities."""
    answers = num_prompts * params.n
    if answers > MAX_ANSWERS:
        raise InvalidRequest(
            f"The request asks for {answers} answers ({num_prompts} prompts × {params.n}); at most {MAX_ANSWERS}.",
            param="n",
        )
    longest = figures.context_tokens
    length = longest if params.max_tokens is None else min(params.max_tokens, longest)
    tokens = answers * length
    if tokens > MAX_COST_TOKENS:
        raise InvalidRequest(
            f"The request may generate {tokens} tokens ({answers} answers × {length}); at most {MAX_COST_TOKENS}. "
            f"Lower `n` or `{length_field}`, or send fewer prompts.", param=length_field,
        )  # fmt: skip
    values = tokens * (params.logprobs + 1) if params.logprobs is not None else 0
    values += num_prompts * longest * (params.prompt_logprobs + 1) if params.prompt_logprobs is not None else 0
    if values > MAX_LOGPROB_VALUES:
        field = "prompt_logprobs" if params.logprobs is None else logprobs_field
        raise InvalidRequest(
            f"The request may need {values} log-probabilities; at most {MAX_LOGPROB_VALUES}. Lower `{field}`, `n` or "
            f"`{length_field}`.", param=field,
        )  # fmt: skip
    params.check_vocabulary(figures.vocab_size)


def _params(
    request: Sampled, eos_ids: Collection[int], *, n: int, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Build and check SamplingParams. Fields that are absent or null take their defaults."""
    if request.priority is not None:
        _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.deadline_s is not None:
        _check_range("deadline_s", request.deadline_s, 0.001, MAX_DEADLINE_S)
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(f"`cache_salt` must have 1 to {MAX_SALT_CHARS} characters.", param="cache_salt")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("`stream_options` needs `stream: true`.", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("`prompt_logprobs` cannot be streamed; no event holds them.", param="prompt_logprobs")
    if request.allowed_token_ids is not None and not 1 <= len(request.allowed_token_ids) <= MAX_ALLOWED_IDS:
        raise InvalidRequest(f"`allowed_token_ids` must list 1 to {MAX_ALLOWED_IDS} ids.", param="allowed_token_ids")
    given = {
        name: value
        for name in (
            "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias", "allowed_token_ids", "seed", "min_tokens", "include_stop_str_in_output", "stop_token_ids",
            "ignore_eos", "prompt_logprobs", "skip_special_tokens",
        )
        if (value := getattr(request, name)) is not None
    }  # fmt: skip
    stop = [request.stop] if isinstance(request.stop, str) else list(request.stop or ())
    params = SamplingParams(
        n=n, max_tokens=max_tokens, logprobs=logprobs, stop=stop, eos_token_ids=sorted(eos_ids), **given
    )
    params.check()
    return params
