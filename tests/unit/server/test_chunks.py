"""The bytes of stream events, read back: each field of each kind of event, and nothing beside them."""

import json
from typing import Any

import pytest

from sayfa.server.books import Usage
from sayfa.server.openai.chunks import Envelope, usage_object, whole

USAGE = Usage(prompt=7, cached=4, output=3)
USAGE_SHOWN = {
    "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4},
}  # fmt: skip
NASTY = 'quote " slash \\ line\nend \u2028 é 😀 </script> \x00'
MODES = ("none", "last", "all")


def envelope(chat: bool, mode: str) -> Envelope:
    return Envelope(chat=chat, answer_id="id-1", created_s=12, model='m"1', fingerprint="fp", usage_mode=mode)


def read(event: bytes) -> dict[str, Any]:
    """One event is one line of data and a blank line."""
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    value: dict[str, Any] = json.loads(event[6:])
    return value


def expected(chat: bool, mode: str, choice: dict[str, Any]) -> dict[str, Any]:
    """The event that holds this choice. Chat chunks say `"usage": null` where usage is asked for and not in them."""
    head = {
        "id": "id-1", "object": "chat.completion.chunk" if chat else "text_completion", "created": 12, "model": 'm"1',
        "system_fingerprint": "fp", "choices": [choice],
    }  # fmt: skip
    if mode == "all":
        return {**head, "usage": USAGE_SHOWN}
    return {**head, "usage": None} if chat and mode == "last" else head


def content(chat: bool, index: int, text: str) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text}} if chat else {"index": index, "text": text}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chat", [True, False])
def test_text(chat: bool, mode: str) -> None:
    """The beginnings are kept by choice: a second event of a choice and one of another choice are right, too."""
    made = envelope(chat, mode)
    for index, text in ((0, "Hello"), (0, NASTY), (13, "x"), (0, ""), (13, NASTY)):
        wanted = {**content(chat, index, text), "logprobs": None, "finish_reason": None}
        assert read(made.text(index, text, None, None, USAGE)) == expected(chat, mode, wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("logprobs", "tokens"), [({"content": [1]}, None), (None, [5, 6]), ({"content": []}, [])])
def test_text_with_logprobs_and_tokens(chat: bool, mode: str, logprobs: Any, tokens: list[int] | None) -> None:
    wanted = {**content(chat, 2, NASTY), "logprobs": logprobs, "finish_reason": None}
    if tokens is not None:
        wanted["token_ids"] = tokens
    event = envelope(chat, mode).text(2, NASTY, logprobs, tokens, USAGE)
    assert read(event) == expected(chat, mode, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_the_role_comes_with_empty_text(mode: str) -> None:
    delta = {"role": "assistant", "content": ""}
    wanted = {"index": 3, "delta": delta, "logprobs": None, "finish_reason": None}
    assert read(envelope(True, mode).role(3, USAGE)) == expected(True, mode, wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chat", [True, False])
def test_b006_the_reason_comes_alone(chat: bool, mode: str) -> None:
    wanted = {
        "index": 4, **({"delta": {}} if chat else {"text": ""}), "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    assert read(envelope(chat, mode).finish(4, "length", USAGE)) == expected(chat, mode, wanted)


@pytest.mark.parametrize("chat", [True, False])
def test_the_end_is_the_usage_if_asked_for_and_the_mark(chat: bool) -> None:
    assert envelope(chat, "none").end(USAGE) == b"data: [DONE]\n\n"
    for mode in ("last", "all"):
        event, mark, rest = envelope(chat, mode).end(USAGE).partition(b"data: [DONE]\n\n")
        assert (mark, rest) == (b"data: [DONE]\n\n", b"")
        shown = read(event)
        assert (shown["usage"], shown["choices"]) == (USAGE_SHOWN, [])
        assert shown["id"] == "id-1"


def test_what_is_not_streamed_is_the_same_json() -> None:
    assert usage_object(USAGE) == USAGE_SHOWN
    assert json.loads(whole({"text": NASTY, "usage": usage_object(USAGE)})) == {"text": NASTY, "usage": USAGE_SHOWN}
