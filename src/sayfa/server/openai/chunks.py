"""Bytes of stream events. The parts that are equal over a stream are encoded once; a token pays for its text only.

Called by the chat and completions handlers. B006: the event with `finish_reason` carries no text, ever. Knows no
engine.
"""

from typing import Any

import msgspec

from sayfa.base.faults import fault
from sayfa.server.books import Usage
from sayfa.server.sse import DONE

encode = msgspec.json.encode


def whole(answer: dict[str, Any]) -> bytes:
    """Encode an answer that is not streamed."""
    fault("server.answer")
    return encode(answer)


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage`."""
    fault("server.usage")
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


class Envelope:
    """What every event of one stream begins and ends with.

    chat: chat.completion.chunk, else text_completion. usage_mode: "none", "last" (one event at the end) or "all". In
    chat streams with usage the other events say `"usage": null`, as OpenAI's description of that object asks; a
    completion's `usage` may not be null there, so it is left out.
    """

    def __init__(
        self, *, chat: bool, answer_id: str, created_s: int, model: str, fingerprint: str, usage_mode: str
    ) -> None:
        head = {
            "id": answer_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._chat = chat
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._usage_mode = usage_mode
        self._end = b"]}\n\n" if usage_mode == "none" or not chat else b'],"usage":null}\n\n'
        self._starts: dict[int, bytes] = {}
        self._plain_tail = (
            b'},"logprobs":null,"finish_reason":null}' if chat else b',"logprobs":null,"finish_reason":null}'
        )

    def _start(self, index: int) -> bytes:
        start = self._starts.get(index)
        if start is None:
            opening = b'{"index":%d,"delta":{"content":' if self._chat else b'{"index":%d,"text":'
            start = self._starts[index] = self._head + opening % index
        return start

    def _closing(self, usage: Usage) -> bytes:
        if self._usage_mode != "all":
            return self._end
        return b'],"usage":' + encode(usage_object(usage)) + b"}\n\n"

    def role(self, index: int, usage: Usage) -> bytes:
        """The first event of a chat choice."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return self._head + choice + self._closing(usage)

    def text(self, index: int, text: str, logprobs: Any, tokens: list[int] | None, usage: Usage) -> bytes:
        """More text of a choice; logprobs is None or an object; tokens are shown if not None."""
        fault("server.event")
        if logprobs is None and tokens is None:
            return self._start(index) + encode(text) + self._plain_tail + self._closing(usage)
        tail = (b"}" if self._chat else b"") + b',"logprobs":' + encode(logprobs)
        if tokens is not None:
            tail += b',"token_ids":' + encode(tokens)
        return self._start(index) + encode(text) + tail + b',"finish_reason":null}' + self._closing(usage)

    def finish(self, index: int, reason: str, usage: Usage) -> bytes:
        """The last event of a choice: the reason alone."""
        empty = b'"delta":{}' if self._chat else b'"text":""'
        choice = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b}' % (index, empty, encode(reason))
        return self._head + choice + self._closing(usage)

    def end(self, usage: Usage) -> bytes:
        """The usage event, if it was asked for, and the end mark."""
        if self._usage_mode == "none":
            return DONE
        return self._head + b'],"usage":' + encode(usage_object(usage)) + b"}\n\n" + DONE
