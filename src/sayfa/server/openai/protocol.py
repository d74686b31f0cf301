"""What may be asked: the request models of all routes, as OpenAI's clients and vLLM's users send them.

Types are strict (no "1" for 1, no true for 1). Ranges and costs are `limits`' duty, meanings the handlers'. A field
that is known but not served is refused by name in `refuse_unserved`, so that nothing is ignored in silence which
would change an answer; fields that change nothing here (`store`, `metadata`, …) are accepted. Called by the handlers;
knows no engine.
"""

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, WrapValidator
from pydantic_core import CoreSchema

from sayfa.base.errors import InvalidRequest

Role = Literal["system", "developer", "user", "assistant", "tool"]


def _id_keys(value: Any) -> Any:
    """Token ids as keys of a JSON object are strings; read them as numbers."""
    if not isinstance(value, dict):
        return value
    read: dict[Any, Any] = {}
    for key, bias in value.items():
        digits = key.removeprefix("-") if isinstance(key, str) else ""
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
            raise ValueError("must map token ids (integers as strings) to numbers in [-100, 100]")
        if int(key) in read:
            raise ValueError(f"holds the token id {int(key)} twice")
        if type(bias) not in (int, float):
            return {int(key): bias}  # one finding, not one for each
        read[int(key)] = bias
    return read


def _plain(value: Any) -> Any:
    """An object of plain values; of one that holds something else, that alone: one finding, not four for each entry."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if entry is not None and not isinstance(entry, str | int | float):
                return {key: entry}
    return value


def _prompt(value: Any, _validate: Any) -> Any:
    """Tell the four spellings apart by the first entry; trying each on a list of a million would cost seconds."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        first = value[0] if value else 0
        if isinstance(first, list):
            fits = all(type(part) is list and _all_are(part, int) for part in value)
        else:
            fits = _all_are(value, str if isinstance(first, str) else int)
        if fits:
            return value
    raise ValueError("must be a text, a list of token ids, or a list of either")


def _all_are(values: list[Any], kind: type) -> bool:
    return set(map(type, values)) <= {kind}


T = TypeVar("T")


class _FirstFault:
    """Ends the reading of a list at its first wrong entry: findings for a million of them cost seconds and a gigabyte.

    pydantic's own `FailFast` cannot be hashed, and so not stand in a union.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        if schema["type"] != "list":
            raise TypeError(f"{source} is no list")
        return cast(CoreSchema, {**schema, "fail_fast": True})


Several = Annotated[list[T], _FirstFault()]
Prompt = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_prompt)]
LogitBias = Annotated[dict[int, float] | None, BeforeValidator(_id_keys)]
TemplateOptions = Annotated[dict[str, str | int | float | bool | None] | None, BeforeValidator(_plain)]


class Open(BaseModel):
    """Base of request models: strict types, unknown fields kept to be reported."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Open):
    """include_usage: one more chunk with the counts at the end. continuous_usage_stats: counts in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(Open):
    """Only `{"type": "text"}` is served."""

    type: str


class Sampled(Open):
    """Fields that chat and completions share, OpenAI's first and then those that OpenAI lacks."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias = None
    seed: int | None = None
    stop: str | Several[str] | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Several[int] | None = None
    allowed_token_ids: Several[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = Field(None, description="Lower runs earlier; 0 is normal; in [-100, 100].")
    deadline_s: float | None = Field(None, description="Seconds after which the answer is worthless (then 408).")
    cache_salt: str | None = Field(None, description="Requests share cached prefixes only under the same salt.")
    return_token_ids: bool | None = None


class ContentPart(Open):
    """A part of a message's content; only text is served, an assistant's refusal among it."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Open):
    """A message of the conversation so far."""

    role: Role
    content: str | Several[ContentPart] | None = None
    name: str | None = None
    tool_calls: Several[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="Past reasoning, for templates that show it.")
    reasoning: str | None = Field(None, description="The same by its newer name.")
    function_call: Any = None
    audio: Any = None


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Several[Message]
    max_completion_tokens: int | None = Field(None, description="Wins over `max_tokens` if both are given.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Several[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions = None
    modalities: Several[str] | None = None

    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Open):
    """POST /tokenize: ids of a prompt, or of a chat after the template."""

    model: str | None = None
    prompt: str | None = None
    messages: Several[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateOptions = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Open):
    """POST /detokenize: text of ids."""

    model: str | None = None
    tokens: Several[int]


_GRAMMAR_FIELDS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
    "grammar", "json_schema", "regex", "ebnf",
)  # fmt: skip
_OTHER_FIELDS = {
    "chat_template": "a template comes from the model or the operator, never from a request",
    "functions": "tool calls are not served yet",
    "function_call": "tool calls are not served yet",
    "audio": "only text is served",
    "web_search_options": "this server fetches nothing",
    "use_beam_search": "beam search is not served yet",
    "truncate_prompt_tokens": "a prompt is never cut; send a shorter one",
    "kv_transfer_params": "transfer between engines is not served yet",
    "lora_request": "adapters are not served yet",
    "prompt_embeds": "prompts are text or token ids",
    "bad_words": "words cannot be forbidden; `logit_bias` forbids tokens",
    "logits_processors": "no program runs for a request",
    "documents": "no documents are given to the template; put their text into the messages",
    "thinking_token_budget": "reasoning is not told apart; `max_tokens` bounds all of the answer",
    "return_tokens_as_token_ids": "tokens are shown as text; `return_token_ids` gives the ids",
    "n_predict": "that field's name is `max_tokens` here",
    "n_probs": "that field's name is `logprobs` here",
    "repeat_penalty": "that field's name is `repetition_penalty` here",
    "typical_p": "this sampler is not served",
    "mirostat": "this sampler is not served",
    "dry_multiplier": "this sampler is not served",
    "xtc_probability": "this sampler is not served",
}
"""Of OpenAI, vLLM and llama-server: what would change the answer, and why it does not here."""
_CHAT_FIELDS = {
    "echo": "a chat answers with the new text only",
    "best_of": "the best of several is picked in /v1/completions only",
    "add_special_tokens": "the chat template alone writes them",
}
_NEUTRAL = {
    "function_call": "auto", "repeat_penalty": 1, "typical_p": 1, "best_of": 1, "n_predict": -1,
    "thinking_token_budget": -1,
}  # fmt: skip
"""Values, beside null, false, 0, "none" and what is empty, that ask for nothing; many clients send all they know."""


def usage_mode(body: Sampled) -> str:
    """How `stream_options` wants the counts: "none", "last" or "all"."""
    options = body.stream_options
    if options is None:
        return "none"
    if options.continuous_usage_stats:
        return "all"
    return "last" if options.include_usage else "none"


def refuse_unserved(request: Sampled) -> None:
    """Raise InvalidRequest for a field that would change the answer and cannot be obeyed yet."""
    extra = request.model_extra or {}
    for name in _GRAMMAR_FIELDS:
        if extra.get(name) is not None:
            raise _unserved(name, "structured output is not served yet")
    for name, why in (_OTHER_FIELDS | (_CHAT_FIELDS if isinstance(request, ChatRequest) else {})).items():
        if extra.get(name) not in (None, False, "none", [], {}, _NEUTRAL.get(name)):
            raise _unserved(name, why)
    if isinstance(request, CompletionRequest):
        if request.suffix:
            raise _unserved("suffix", "text cannot be inserted before a suffix")
        if (extra.get("response_format") or {"type": "text"}) != {"type": "text"}:
            raise _unserved("response_format", 'structured output is not served yet; only {"type": "text"} is')
        return
    if isinstance(request, ChatRequest):
        _refuse_unserved_chat(request)


def _refuse_unserved_chat(request: ChatRequest) -> None:
    if request.response_format is not None and request.response_format.type != "text":
        raise _unserved("response_format", 'structured output is not served yet; only {"type": "text"} is')
    if request.tools:
        raise _unserved("tools", "tool calls are not served yet")
    if request.tool_choice not in (None, "none", "auto"):
        raise _unserved("tool_choice", "tool calls are not served yet")
    if request.modalities not in (None, [], ["text"]):
        raise _unserved("modalities", "only text is served")


def _unserved(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"`{name}` cannot be obeyed: {why}. Leave it out.", param=name, code="unsupported_parameter")
