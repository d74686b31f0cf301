"""Models of all answers in which every field is required: what typed clients of other languages generate."""

from typing import Any, Literal

import msgspec


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """No defaults, no unknown fields."""


class PromptDetails(Strict):
    cached_tokens: int


class Usage(Strict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(Strict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Strict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Strict):
    content: list[TokenLogprob]
    refusal: None


class RoleDelta(Strict):
    role: Literal["assistant"]
    content: str


class TextDelta(Strict):
    content: str


class EmptyDelta(Strict):
    pass


class ChunkChoice(Strict):
    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Chunk(Strict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]


class UsageChunk(Chunk):
    usage: Usage | None


class ChatMessage(Strict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Strict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class Chat(Strict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(Strict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Strict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextChunkChoice(Strict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Text(Strict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class TextChunk(Strict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]


class TextUsageChunk(TextChunk):
    usage: Usage


class ErrorBody(Strict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Strict):
    error: ErrorBody


def check(value: Any, model: type[msgspec.Struct]) -> Any:
    """Convert or fail."""
    return msgspec.convert(value, model, strict=True)
