"""Messages of a request to the ids of a prompt: checks, the model's chat template, the tokenizer.

Called by chat and /tokenize. Rules where OpenAI's documents leave a choice:
- `developer` is rendered as `system`: templates know that name.
- Tool calls of the history are rendered with their arguments as an object. Arguments that are no JSON object (models
  write such), or one nested too deep to be rendered, are wrapped as `{"arguments": TEXT}`; empty or null ones are `{}`.
  A turn is never refused for them (B045). Knows no sampling.
"""

from functools import partial
from typing import Any

import msgspec

from sayfa.base.errors import InvalidRequest
from sayfa.server import limits
from sayfa.server.context import ServerContext
from sayfa.server.openai.protocol import ChatRequest, Message, TokenizeRequest
from sayfa.text.chat_template import object_in

MESSAGE_SIZE = 128
"""What it costs to render a message of no text, in characters of text."""
_UNSERVED = {"function_call": "send past calls as `tool_calls`", "audio": "send what was said as text in `content`"}


async def chat_ids(context: ServerContext, body: ChatRequest | TokenizeRequest, figures: limits.Figures) -> list[int]:
    """Render and tokenize `body.messages`; raise InvalidRequest naming the message that cannot be rendered."""
    messages = [_plain(index, message) for index, message in enumerate(body.messages or ())]
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other.", param="continue_final_message"
        )
    if goes_on and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "`continue_final_message` needs a last message of the assistant.", param="continue_final_message"
        )
    opens = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    kwargs = body.chat_template_kwargs or {}

    def work() -> list[int]:
        check = partial(limits.check_rendered, figures=figures)
        return context.tools.chat_ids(messages, opens, goes_on, kwargs, check)

    size = limits.message_bytes(body.messages or ()) + MESSAGE_SIZE * len(messages)
    return await context.text_work(size, work)


def _plain(index: int, message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    for name, way_out in _UNSERVED.items():
        if getattr(message, name) is not None:
            raise InvalidRequest(
                f"`messages[{index}].{name}` cannot be obeyed: {way_out}.", param="messages",
                code="unsupported_parameter",
            )  # fmt: skip
    plain["content"] = _content(index, message)
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (text := getattr(message, name)) is not None:
            plain[name] = text
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(index, call) for call in message.tool_calls]
    return plain


def _content(index: int, message: Message) -> str | list[dict[str, str]] | None:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return None if message.tool_calls else (message.refusal or "")
        raise InvalidRequest(f"`messages[{index}].content` is missing or null.", param="messages")
    if isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for number, part in enumerate(content):
        if part.type == "refusal" and message.role == "assistant" and part.refusal is not None:
            parts.append({"type": "text", "text": part.refusal})
            continue
        if part.type != "text":
            raise InvalidRequest(
                f"`messages[{index}].content[{number}]` is of type {part.type[:40]!r}; only text parts are served.",
                param="messages", code="unsupported_content_type",
            )  # fmt: skip
        if part.text is None:
            raise InvalidRequest(f"`messages[{index}].content[{number}].text` is missing.", param="messages")
        parts.append({"type": "text", "text": part.text})
    return parts


def _tool_call(index: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"`messages[{index}].tool_calls` holds a call without `function.name`.", param="messages")
    name, arguments = function["name"], _arguments(function.get("arguments"))
    return {"id": str(call.get("id") or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(value: Any) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if isinstance(value, str):
        read = object_in(value)
        return {"arguments": value} if read is None else read
    return {"arguments": msgspec.json.encode(value).decode()}
