"""Chat messages to the text that a model was trained on, through the template that came with the model.

Called by the server and by `llm`, in threads. It must not know HTTP, engines or which model this is. The template is a
stranger's program: it runs in `template_sandbox` within a budget, and an error in it is an error of the request.

Rules:
1. The text equals what Hugging Face's `apply_chat_template` gives for the same template and messages.
2. Content given as parts: a template that shows parts sees the list; any other sees the texts joined by a line break.
   A template that only shows lists gets text as a list of one part. Which it is shows when a probe is rendered at load.
3. Control tokens that are spelled out in messages or tools have no power (see `control_text`).
4. Keys with the value None are left out of messages, as Hugging Face does.
5. The arguments of past tool calls come as JSON text (OpenAI's form) and templates want the object: text that is a
   JSON object is handed on as that object, any other text as it is.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
from jinja2 import meta, nodes

from sayfa.base.errors import ConfigError, InvalidRequest, ModelError
from sayfa.base.json_file import json_depth
from sayfa.base.quoting import quoted
from sayfa.text.control_text import ControlTexts, strings_in, unused_marks
from sayfa.text.template_budget import MAX_DEPTH, Budget, OverBudgetError
from sayfa.text.template_sandbox import RefusedByTemplate, Sandbox
from sayfa.text.tokenizer import Tokenizer

MAX_SOURCE_CHARS = 1 << 20
MAX_OPTION_CHARS = 4_096
SPARE_CHARS = 1 << 18
MAX_NESTING = 2 * MAX_DEPTH
"""Of all that a template is given: what it may write out, and the levels around that. Walked over by recursion."""

_RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token")
) | {"raise_exception", "strftime_now", "namespace", "range", "dict"}
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBE = "qzxprobe"
_PROBE_CPU_S = 0.02
_RAW_PROBE = re.compile(rf"""text["']\s*:\s*["']{_PROBE}""")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class RenderedChat(NamedTuple):
    """`text` is what the model is to read. `marked` is the same with `mark` inside control tokens that users wrote."""

    text: str
    marked: str
    mark: str

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Encode for the model: only the template's own control tokens are control tokens."""
        return tokenizer.encode_chat(self.marked, self.mark)


class ChatTemplate:
    """One compiled template; may be used by several threads at once.

    source: the template. special_tokens: `bos_token` and so on, which templates may print. control_texts: spellings
    that messages must not smuggle in. now: tells the date to templates that print it. Raises ModelError for a template
    that cannot be compiled or asks for something that does not exist here.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        control_texts: Iterable[str] = (),
        now: Callable[[], datetime] | None = None,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelError(f"The chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are read.")
        self.source = source
        self._special = dict(special_tokens or {})
        self._control = ControlTexts(control_texts)
        self._sandbox = Sandbox(now or (lambda: datetime.now().astimezone()))
        try:
            tree = self._sandbox.parse(source)
            self.options = frozenset(meta.find_undeclared_variables(tree) - _RESERVED - self._special.keys())
            self._template = self._sandbox.from_string(tree)
            self._wants_parts, self._knows_text = self._probed_forms() or _content_forms(tree)
        except jinja2.TemplateError as error:
            place = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            problem = (error.message or "").rstrip(".")
            raise ModelError(f"The chat template cannot be compiled{place}: {problem}.") from None
        except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError):
            raise ModelError("The chat template cannot be compiled: it is nested too deep.") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render messages, given as plain JSON data (OpenAI's form).

        continue_final_message leaves the last message open, so that the model goes on with it. options are values for
        variables of the template, for example `enable_thinking`; their names are in `self.options`. Raises
        InvalidRequest for messages that the template refuses, and for a rendering that costs too much.
        """
        if not messages:
            raise InvalidRequest("`messages` is empty; send at least one message.", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "`continue_final_message` and `add_generation_prompt` exclude each other; set the latter to false.",
                param="continue_final_message",
            )
        chat = [self._message(index, message) for index, message in enumerate(messages)]
        data: dict[str, Any] = {
            "messages": chat,
            "tools": list(tools) if tools else None,
            "options": self._checked(options),
        }
        if json_depth(data) > MAX_NESTING:
            raise InvalidRequest(
                f"The messages are nested deeper than {MAX_NESTING} levels; send what lies so deep as text.",
                param="messages",
            )
        mark, tag = self._marks(data, continue_final_message)
        if mark:
            data = {key: self._control.break_all(value, mark) for key, value in data.items()}
        last_text = _open_end(data["messages"], tag + " ") if continue_final_message else ""
        marked = self._run(data, add_generation_prompt, mark)
        if continue_final_message:
            marked = _cut_at(marked, tag, last_text)
        return RenderedChat(marked.replace(mark, "") if mark else marked, marked, mark)

    def _run(self, data: dict[str, Any], add_generation_prompt: bool, mark: str) -> str:
        num_chars = sum(map(len, strings_in(data))) + len(self.source)
        try:
            return self._within(Budget(4 * num_chars + SPARE_CHARS), data, add_generation_prompt, mark)
        except RefusedByTemplate as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error.message}", param="messages",
                code="refused_by_template",
            ) from None  # fmt: skip
        except OverBudgetError as error:
            raise InvalidRequest(
                f"The model's chat template costs too much for these messages: {error}.", param="messages",
                code="template_too_costly",
            ) from None  # fmt: skip
        except Exception:  # whatever a stranger's program may raise
            raise InvalidRequest(
                "The model's chat template cannot render these messages; check their roles and contents.",
                param="messages", code="template_error",
            ) from None  # fmt: skip

    def _within(self, budget: Budget, data: dict[str, Any], add_generation_prompt: bool, mark: str) -> str:
        current = self._sandbox.current
        current.value, current.mark = budget, mark
        try:
            return self._template.render({
                **self._special,  # first: a model's files may give a token any name
                **data["options"],
                "messages": data["messages"],
                "tools": data["tools"],
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            })  # fmt: skip
        finally:
            current.value, current.mark = None, ""

    # ------------------------------------------------------------------------------------- what it reads

    def _probed_forms(self) -> tuple[bool, bool] | None:
        """Tell whether parts are shown, and whether text is; None if a user's message is shown in neither form."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            for roles in (("user",), ("system", "user")):
                forms = self._shows(roles, parts), self._shows(roles, _PROBE)
                if any(forms):
                    return forms
        except OverBudgetError:
            pass
        return None

    def _shows(self, roles: Sequence[str], content: Any) -> bool:
        messages = [{"role": role, "content": content} for role in roles]
        budget = Budget(4 * len(self.source) + SPARE_CHARS, max_cpu_s=_PROBE_CPU_S)
        try:
            text = self._within(budget, {"messages": messages, "tools": None, "options": {}}, True, "").casefold()
        except OverBudgetError:
            raise
        except Exception:  # a stranger's program does not take it
            return False
        # A template for text alone may write a list as Python or JSON writes it.
        return _PROBE in text and not _RAW_PROBE.search(text)

    # ------------------------------------------------------------------------------------- what comes in

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"`messages[{index}]` has no `role`.", param=f"messages[{index}]")
        made = {key: value for key, value in message.items() if value is not None}
        if "content" in made:
            made["content"] = self._content(index, made["content"])
        if "tool_calls" in made:
            made["tool_calls"] = _tool_calls(index, made["tool_calls"])
        reasoning = next((made[name] for name in _REASONING if name in made), None)
        if reasoning is not None:
            made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
        return made

    def _content(self, index: int, content: Any) -> Any:
        param = f"messages[{index}].content"
        if isinstance(content, str):
            only_parts = self._wants_parts and not self._knows_text
            return [{"type": "text", "text": content}] if only_parts else content
        if not isinstance(content, list):
            raise InvalidRequest(f"`{param}` must be text or a list of parts.", param=param)
        parts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
                shown = quoted(kind, 60) if isinstance(kind, str) else "no `type`"
                raise InvalidRequest(f"`{param}` holds a part of {shown}; this model reads text only.", param=param)
            parts.append({"type": "text", "text": part["text"]})
        return parts if self._wants_parts else "\n".join(part["text"] for part in parts)

    def _checked(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        for name, value in (options or {}).items():
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise InvalidRequest(
                    f"`chat_template_kwargs` has {quoted(name, 80)}, but this model's template knows: {known}.",
                    param="chat_template_kwargs",
                )
            if not _is_scalar(value):
                raise InvalidRequest(
                    f"`chat_template_kwargs.{name}` must be text of up to {MAX_OPTION_CHARS} characters, "
                    "a finite number, true, false or null.",
                    param="chat_template_kwargs",
                )
        return dict(options or {})

    def _marks(self, data: dict[str, Any], needs_tag: bool) -> tuple[str, str]:
        """Choose the mark and the tag of the open end; the mark is empty where nothing has to be broken."""
        texts = list(strings_in(data))
        breaks = any(self._control.broken(text, "\0") != text for text in texts)
        if not breaks and not needs_tag:
            return "", ""
        try:
            mark, tag = unused_marks([*texts, self.source], 2)
        except ValueError:
            raise InvalidRequest(
                "The messages use nearly all private characters from U+F8E0 to U+F8FF; leave these out.",
                param="messages",
            ) from None
        return (mark if breaks else ""), tag


def read_template(file: str) -> str:
    """Read the operator's template and see that it can be compiled. Raises ConfigError naming setting and file."""
    try:
        with Path(file).open(encoding="utf-8") as opened:
            source = opened.read(MAX_SOURCE_CHARS + 1)
    except OSError as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"--chat-template {file} cannot be read: it is no UTF-8 text") from None
    if len(source) > MAX_SOURCE_CHARS:
        raise ConfigError(f"--chat-template {file} cannot be used: at most {MAX_SOURCE_CHARS} characters are read")
    try:
        ChatTemplate(source)
    except ModelError as error:
        raise ConfigError(f"--chat-template {file} cannot be used: {error}") from None
    return source


def load_chat_template(tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate | None:
    """Compile the template of a model, or `source` from the operator in its place; None where there is neither."""
    source = source if source is not None else tokenizer.chat_template
    if source is None:
        return None
    return ChatTemplate(source, tokenizer.special_tokens, tokenizer.control_texts)


def _tool_calls(index: int, calls: Any) -> list[dict[str, Any]]:
    """Copy past tool calls with their arguments as objects (rule 5)."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequest(f"`messages[{index}].tool_calls` must be a list of objects.", param=f"messages[{index}]")
    made = [dict(call) for call in calls]
    for call in made:
        function = call.get("function")
        if isinstance(function, Mapping):
            call["function"] = {**function, "arguments": _arguments(function.get("arguments"))}
    return made


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return {} if value is None else value
    parsed = object_in(value)
    return value if parsed is None else parsed


def object_in(text: str) -> dict[str, Any] | None:
    """Read a text that is a JSON object; None for any other, and for one deeper than a template may write out."""
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    # The budget counts the level of plain values, too.
    return parsed if isinstance(parsed, dict) and json_depth(parsed) < MAX_DEPTH else None


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_OPTION_CHARS
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and abs(value) < 2**53)


def _open_end(messages: list[dict[str, Any]], tag: str) -> str:
    """Put the tag behind the last text of the last message; give that text."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + tag
        return content
    if isinstance(content, list) and content:
        text = str(content[-1]["text"])
        content[-1] = {**content[-1], "text": text + tag}
        return text
    raise InvalidRequest(
        "`continue_final_message` needs a last message with text in its `content`.", param="continue_final_message"
    )


def _cut_at(text: str, tag: str, last_text: str) -> str:
    """Cut where the tag stands. A template that trims took the space behind it; then the text's own end is trimmed."""
    at = text.rfind(tag)
    if at < 0 or last_text.strip() not in text:
        raise InvalidRequest(
            "`continue_final_message`: the model's chat template does not print the last message as it is.",
            param="continue_final_message", code="template_error",
        )  # fmt: skip
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()


def _content_forms(tree: nodes.Template) -> tuple[bool, bool]:
    """Tell from the source of a template whether it walks over parts, and whether it also handles content as text."""
    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    wants_parts = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    knows_text = any(
        test.name in ("string", "iterable", "sequence", "mapping") and _is_content(test.node, names)
        for test in tree.find_all(nodes.Test)
    )
    return wants_parts, knows_text


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
