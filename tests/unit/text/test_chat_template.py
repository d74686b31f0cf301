"""What goes into a chat template, and what comes back when it cannot be rendered."""

import json
import math
from datetime import UTC, datetime
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from fakes.templates import ALL, CHATML, GEMMA, MISTRAL, QWEN
from sayfa.base.errors import InvalidRequest, ModelError
from sayfa.text.chat_template import MAX_SOURCE_CHARS, ChatTemplate, load_chat_template

USER = {"role": "user", "content": "hi"}
ONLY_PARTS = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
ASSIGNED = "{% for m in messages %}{% set c = m.content %}{% for part in c %}[{{ part.text }}]{% endfor %}{% endfor %}"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_template_for_text_sees_the_parts_joined_by_a_line_break(role: str) -> None:
    """B041."""
    template = ChatTemplate(CHATML)
    for content, text in ((parts("a"), "a"), (parts("a", "b"), "a\nb"), ([], "")):
        assert template.render([{"role": role, "content": content}]) == template.render(
            [{"role": role, "content": text}]
        )


@pytest.mark.parametrize("source", [ONLY_PARTS, ASSIGNED])
def test_a_template_for_parts_sees_a_list_even_for_plain_text(source: str) -> None:
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": parts("a", "b")}]).text == "[a][b]"
    assert template.render([USER]).text == "[hi]"


LIST_ONLY = [
    "{{ m.content|selectattr('type', 'equalto', 'text')|map(attribute='text')|join('') }}",
    "{{ m['content'][0].text }}",
    "{% set first = m.content|first %}{{ first['text']|trim }}",
    "{% for i in range(m.content|length) %}{{ m.content[i].text }}{% endfor %}",
    "{% macro shown(x) %}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}{{ shown(m.content) }}",
    "{% for kind, value in m|dictsort if kind == 'content' %}{% for p in value %}{{ p.text }}{% endfor %}{% endfor %}",
]
BOTH = [
    "{% macro shown(x) %}{% if x is string %}{{ x }}{% else %}{% for p in x %}{{ p.text }}{% endfor %}{% endif %}"
    "{% endmacro %}{{ shown(m.content) }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content|map(attribute='text')|join }}{% endif %}",
]
TEXT_ONLY = [
    "{{ m.content }}", "{{ m.content|trim }}", "{{ m.content|upper }}", "{{ m.content|tojson }}", "{{ m.content[:] }}",
    "{{ m.content.split('</think>')[-1] }}", "{{ m.content if m.content is string else '' }}",
    "{% for char in m.content %}{{ char }}{% endfor %}", "{% if m.content[0] != '/' %}{{ m.content }}{% endif %}",
]  # fmt: skip


def chat(body: str, before: str = "") -> ChatTemplate:
    return ChatTemplate(before + "{% for m in messages %}[" + body + "]{% endfor %}")


@pytest.mark.parametrize("body", LIST_ONLY)
def test_a_template_that_reads_parts_in_any_way_shows_a_plain_text(body: str) -> None:
    """Over the letters of a text it finds nothing to show, and the user's message would be lost."""
    for content in ("hi", parts("hi")):
        assert chat(body).render([{"role": "user", "content": content}]).text == "[hi]"


@pytest.mark.parametrize("body", BOTH)
def test_a_template_that_reads_both_in_any_way_gets_what_was_sent(body: str) -> None:
    for content, shown in (("hi", "[hi]"), (parts("hi"), "[hi]"), (parts("a", "b"), "[ab]")):
        assert chat(body).render([{"role": "user", "content": content}]).text == shown


@pytest.mark.parametrize("body", TEXT_ONLY)
def test_a_template_that_reads_text_alone_gets_text(body: str) -> None:
    text = chat(body).render([{"role": "user", "content": "a\nb"}]).text
    assert text.lower() in ("[a\nb]", '["a\\nb"]')
    assert chat(body).render([{"role": "user", "content": parts("a", "b")}]).text == text


def test_a_template_that_refuses_a_user_s_message_alone_is_asked_with_a_system_message() -> None:
    before = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
    template = chat(LIST_ONLY[0], before)
    assert template.render([{"role": "system", "content": "s"}, USER]).text == "[s][hi]"


def test_a_template_that_shows_no_message_at_load_is_judged_by_its_source() -> None:
    before = "{% if messages|length < 3 %}{{ raise_exception('no') }}{% endif %}"
    body = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    assert chat(body, before).render([USER] * 3).text == "[hi][hi][hi]"


def test_a_template_that_knows_both_gets_what_was_sent() -> None:
    template = ChatTemplate(GEMMA, {"bos_token": ""})
    for content in ("a", parts("a")):
        text = template.render([{"role": "user", "content": content}]).text
        assert text == "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:"}}],
        [{"type": "x" * 999}],
        [{"text": "a"}],
        ["a"],
        [None],
        5,
        {},
    ],
)
def test_an_unknown_part_is_refused_by_its_place(content: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content") as caught:
        ChatTemplate(CHATML).render([USER, {"role": "user", "content": content}])
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("message", [{}, {"content": "x"}, {"role": 3}, "x", None])
def test_a_message_without_a_role_is_refused_by_its_place(message: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
        ChatTemplate(CHATML).render([USER, message])


def test_no_messages_are_refused() -> None:
    """B034."""
    with pytest.raises(InvalidRequest, match="empty"):
        ChatTemplate(CHATML).render([])


def test_the_template_s_own_refusal_reaches_the_client_in_its_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        ChatTemplate(MISTRAL, {"bos_token": "", "eos_token": ""}).render([USER, USER])
    assert (caught.value.param, caught.value.code) == ("messages", "refused_by_template")


@pytest.mark.parametrize(
    "source", ["{{ messages[7].content }}", "{{ 1 + 'a' }}", "{{ messages.content.x.y }}", "{{ 1 / 0 }}"]
)
def test_any_other_error_tells_nothing_of_the_inside(source: str) -> None:
    """T20."""
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.code == "template_error"
    assert caught.value.message == (
        "The model's chat template cannot render these messages; check their roles and contents."
    )


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x|nosuchfilter }}", "{% nosuch %}", "{{ " + "(" * 3000, "{% if 1 %}" * 3000]
)
def test_a_template_that_cannot_be_compiled_is_the_model_s_fault(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source)


def test_options_are_the_names_that_the_template_knows() -> None:
    template = ChatTemplate(QWEN)
    assert "enable_thinking" in template.options
    assert template.options.isdisjoint({"messages", "tools", "add_generation_prompt", "namespace", "message"})
    assert "<think>" in template.render([USER], options={"enable_thinking": False}).text
    assert "<think>" not in template.render([USER], options={"enable_thinking": True}).text


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "nothing", "__class__", "self", "", 3, "x" * 100])
def test_other_options_are_refused_with_the_known_names(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="enable_thinking"):
        ChatTemplate(QWEN).render([USER], options={name: True})


def test_a_token_that_has_a_name_is_no_option_and_takes_no_variables_place() -> None:
    source = "{{ image_token }}{{ messages[0].content }}{{ thinking }}"
    template = ChatTemplate(source, {"image_token": "<image>", "messages": "<m>", "self": "<s>"})
    assert template.options == {"thinking"}
    assert template.render([USER], options={"thinking": 1}).text == f"<image>{USER['content']}1"


def test_a_long_name_is_quoted_with_both_quotes() -> None:
    with pytest.raises(InvalidRequest, match=rf"has '{'x' * 80}'…, but"):
        ChatTemplate(QWEN).render([USER], options={"x" * 100: True})


@pytest.mark.parametrize("value", [[], {}, math.nan, math.inf, 2**60, "x" * 5000, b"x", object()])
def test_options_are_plain_values(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"chat_template_kwargs\.enable_thinking"):
        ChatTemplate(QWEN).render([USER], options={"enable_thinking": value})


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"path": "a"}', '{"path": "a"}'), ({"path": "a"}, '{"path": "a"}'), ("{}", "{}"), (None, "{}"),
        ('{"path": "a', '{"path": "a'), ("", ""), ("null", "null"), ("[1]", "[1]"), ("\ud800", "\ud800"),
        ('{"a":' * 3000 + "1" + "}" * 3000, '{"a":' * 3000 + "1" + "}" * 3000),
    ],
)  # fmt: skip
def test_past_tool_calls_with_any_arguments_are_served(arguments: Any, shown: str) -> None:
    """B045: one broken tool call must not end the conversation."""
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "r"}, USER]
    text = ChatTemplate(QWEN).render(messages).text
    assert f'<tool_call>\n{{"name": "get", "arguments": {shown}}}\n</tool_call>' in text


@pytest.mark.parametrize("content", ["hi", "<|im_end|>"])
def test_messages_nested_without_end_are_refused_in_words(content: str) -> None:
    """Offline nobody bounded the depth before."""
    deep: dict[str, Any] = {}
    for _ in range(800):
        deep = {"a": deep}
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": deep}}
    template = ChatTemplate(CHATML, {}, ["<|im_start|>", "<|im_end|>"])
    with pytest.raises(InvalidRequest, match="nested deeper than 128 levels"):
        template.render([{"role": "user", "content": content}, {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "wrap", [lambda text: (text,), lambda text: [(text,)], lambda text: MappingProxyType({0: text})]
)
def test_t29_control_tokens_have_no_power_in_whatever_holds_them(wrap: Any) -> None:
    """Offline a message may hold what no JSON has."""
    source = "{% for m in messages %}{{ m.note[0] if m.note[0] is string else m.note[0][0] }}{% endfor %}"
    template = ChatTemplate(source, {}, ["<|im_end|>"])
    rendered = template.render([{**USER, "note": wrap("a<|im_end|>b")}])
    assert rendered.text == "a<|im_end|>b"
    assert rendered.mark
    assert "<|im_end|>" not in rendered.marked


@pytest.mark.parametrize("calls", ["x", [1], {}, [["a"]]])
def test_tool_calls_of_another_form_are_refused_by_their_place(calls: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
        ChatTemplate(QWEN).render([USER, {"role": "assistant", "content": "x", "tool_calls": calls}])


def test_an_open_last_message_needs_text_and_no_prompt_behind_it() -> None:
    template = ChatTemplate(CHATML)
    answer = {"role": "assistant", "content": "I think "}
    rendered = template.render([USER, answer], add_generation_prompt=False, continue_final_message=True)
    assert rendered.text.endswith("<|im_start|>assistant\nI think ")
    with pytest.raises(InvalidRequest, match="exclude each other"):
        template.render([USER, answer], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        template.render([USER, {"role": "assistant"}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="does not print"):
        ChatTemplate("x").render([USER, answer], add_generation_prompt=False, continue_final_message=True)


def test_the_messages_given_are_left_as_they_were() -> None:
    messages = [USER, {"role": "assistant", "content": parts("a"), "tool_calls": None, "x": None}]
    before = repr(messages)
    ChatTemplate(GEMMA, {"bos_token": ""}, ["a"]).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert repr(messages) == before


def test_the_clock_is_handed_in() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", now=lambda: datetime(2024, 7, 26, tzinfo=UTC))
    assert template.render([USER]).text == "26 July 2024"


def test_private_characters_in_messages_are_no_marks() -> None:
    """A user who sends the mark themselves gains nothing: another one is chosen, or the request is refused."""
    private = "".join(chr(code) for code in range(0xF8E0, 0xF8F0))
    template = ChatTemplate(CHATML, {}, ["<|im_start|>", "<|im_end|>"])
    rendered = template.render([{"role": "user", "content": private + "<|im_end|>"}])
    assert rendered.mark not in private
    assert private in rendered.text
    every = "".join(chr(code) for code in range(0xF8E0, 0xF900))
    with pytest.raises(InvalidRequest, match="private characters"):
        template.render([{"role": "user", "content": every + "<|im_end|>"}])
    assert every in template.render([{"role": "user", "content": every}]).text


@pytest.mark.parametrize("name", ALL)
def test_long_conversations_stay_within_the_budget(name: str) -> None:
    """An honest template must never meet the bounds: a thousand messages, and one of a megabyte."""
    template = ChatTemplate(ALL[name], {"bos_token": "<s>", "eos_token": "</s>"})
    for size, count in ((100, 500), (500_000, 1)):
        messages = [USER | {"content": "word " * (size // 5)}, {"role": "assistant", "content": "ok"}] * count
        assert len(template.render(messages[:-1]).text) > 0


def test_a_template_too_long_is_the_model_s_fault() -> None:
    with pytest.raises(ModelError, match=rf"has {MAX_SOURCE_CHARS + 1} characters"):
        ChatTemplate("x" * (MAX_SOURCE_CHARS + 1))
    assert ChatTemplate("x" * MAX_SOURCE_CHARS).render([USER]).text == "x" * MAX_SOURCE_CHARS


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_past_reasoning_is_found_under_each_of_its_names(name: str) -> None:
    """Clients send it under one name, templates read it under another."""
    source = "{% for m in messages %}[{{ m.thinking }}|{{ m.reasoning_content }}]{% endfor %}"
    message = {"role": "assistant", "content": "x", name: "because"}
    assert ChatTemplate(source).render([USER, message]).text == "[|][because|because]"
    message[name] = None
    assert ChatTemplate(source).render([USER, message]).text == "[|][|]"


def test_a_tool_call_without_a_function_is_left_as_it_is() -> None:
    source = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    for call in ({"id": "1"}, {"id": "1", "function": "get"}):
        assert json.loads(ChatTemplate(source).render([{"role": "assistant", "tool_calls": [call]}]).text) == [call]


def test_the_operator_s_template_takes_the_place_of_the_model_s() -> None:
    model = SimpleNamespace(chat_template="model", special_tokens={"bos_token": "<s>"}, control_texts=["<s>"])
    for given, text in ((None, "model"), ("{{ bos_token }}", "<s>"), ("", "")):
        template = load_chat_template(model, given)  # type: ignore[arg-type]
        assert template is not None
        assert template.render([USER]).text == text
    model.chat_template = None
    assert load_chat_template(model) is None  # type: ignore[arg-type]
