"""Log-probabilities in the two forms that clients know: chat's list of objects, completions' parallel lists.

Called by the handlers, in a thread where they are many. What belongs to one position is encoded here, so that the whole
answer is put together of bytes: to encode it in one call would hold the interpreter's lock for as long. Values are
those of `TokenLogprobs` (before temperature and truncation), floored at -9999.0, so they are always JSON numbers
(B013). A token that is part of a character is shown as `bytes:\\xf0\\x9f` with its true bytes beside it (B015). Knows
no streams.
"""

import math
from typing import Any

import msgspec

from sayfa.base.faults import fault
from sayfa.base.step import TokenLogprobs
from sayfa.server.answer import Entry
from sayfa.text.tokenizer import Tokenizer

FLOOR = -9999.0


def size_of(num_positions: int, num_top: int) -> int:
    """How much work it is to put so many in form, in characters of text."""
    return 8 * num_positions * (num_top + 1)


def finite(value: float) -> float:
    """The value as a JSON number."""
    fault("server.logprobs")
    return value if math.isfinite(value) and value > FLOOR else FLOOR


def show(data: bytes) -> str:
    """A token as text; parts of characters in a form that tells them apart."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _raw(value: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _one(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": show(data), "logprob": finite(logprob), "bytes": list(data)}


def chat_logprobs(tokenizer: Tokenizer, entries: list[Entry], num_top: int) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    content: list[msgspec.Raw] = []
    for entry in entries:
        values = entry.logprobs
        if values is None:
            continue
        item = _one(tokenizer, entry.token, values.logprob)
        top = zip(values.top_ids[:num_top], values.top_logprobs[:num_top], strict=True)
        item["top_logprobs"] = [_one(tokenizer, token, logprob) for token, logprob in top]
        content.append(_raw(item))
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, entries: list[Entry], num_top: int) -> dict[str, Any]:
    """The `logprobs` object of a completion choice. A prompt's first token has null values: nothing predicts it."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[msgspec.Raw | None] = []
    offsets: list[int] = []
    for entry in entries:
        shown = show(tokenizer.token_bytes(entry.token))
        tokens.append(shown)
        offsets.append(entry.offset)
        if entry.logprobs is None:
            logprobs.append(None)
            tops.append(None)
            continue
        values = entry.logprobs
        logprobs.append(finite(values.logprob))
        top: dict[str, float] = {}
        for token, logprob in zip(values.top_ids[:num_top], values.top_logprobs[:num_top], strict=True):
            # Two ids may read the same; the list is ordered, so the first is the likelier.
            top.setdefault(show(tokenizer.token_bytes(token)), finite(logprob))
        top.setdefault(shown, finite(values.logprob))
        tops.append(_raw(top))
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(
    tokenizer: Tokenizer, ids: list[int], scores: list[TokenLogprobs], num_top: int
) -> list[msgspec.Raw | None]:
    """vLLM's `prompt_logprobs`: for each prompt token a map from id to value, rank and text; the first is null."""
    shown: list[msgspec.Raw | None] = [None]
    for token, values in zip(ids[1:], scores, strict=False):
        top = zip(values.top_ids[:num_top], values.top_logprobs[:num_top], strict=True)
        position = {
            str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": show(tokenizer.token_bytes(other))}
            for rank, (other, logprob) in enumerate(top, start=1)
        }
        position[str(token)] = {
            "logprob": finite(values.logprob),
            "rank": values.rank,
            "decoded_token": show(tokenizer.token_bytes(token)),
        }
        shown.append(_raw(position))
    return shown
