"""Rendered chats equal what transformers' `apply_chat_template` gives, character for character."""

import random
from functools import lru_cache
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fakes.strings import random_string
from fakes.templates import ALL
from sayfa.base.errors import InvalidRequest
from sayfa.text.chat_template import ChatTemplate

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"ç": {}}}}},
    {"type": "function", "function": {"name": "b", "description": "<x> & 'y' \"z\"\n"}},
]


@pytest.fixture(scope="module")
def oracle() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **NAMED)


def conversation(rng: random.Random, with_tools: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": random_string(rng)})
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": random_string(rng)})
        answer: dict[str, Any] = {"role": "assistant", "content": random_string(rng)}
        if rng.random() < 0.3:
            answer["content"] = f"<think>\n{random_string(rng)}\n</think>\n\n" + answer["content"]
        if rng.random() < 0.2:
            answer["reasoning_content"] = random_string(rng)
        messages.append(answer)
        if with_tools and rng.random() < 0.5:
            call = {"name": "get", "arguments": {"q": random_string(rng), "n": rng.randrange(9)}}
            messages[-1]["tool_calls"] = [{"id": "1", "type": "function", "function": call}]
            messages.append({"role": "tool", "content": random_string(rng), "tool_call_id": "1", "name": None})
    if rng.random() < 0.7:
        messages.append({"role": "user", "content": random_string(rng)})
    return messages


@lru_cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(ALL[name], NAMED)


def both(oracle: PreTrainedTokenizerFast, name: str, messages: list[dict[str, Any]], **how: Any) -> tuple[Any, Any]:
    """Render with both; a refusal counts as the answer None."""
    options = how.pop("options", {})
    try:
        theirs = oracle.apply_chat_template(messages, chat_template=ALL[name], tokenize=False, **how, **options)
    except Exception:  # whatever their template raises
        theirs = None
    try:
        ours = compiled(name).render(messages, options=options, **how).text
    except InvalidRequest:
        ours = None
    return ours, theirs


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(15))
def test_random_conversations_render_the_same(oracle: PreTrainedTokenizerFast, name: str, seed: int) -> None:
    rng = random.Random(seed)
    rendered = 0
    for _ in range(8):
        with_tools = rng.random() < 0.3
        how: dict[str, Any] = {"tools": TOOLS if with_tools else None, "add_generation_prompt": rng.random() < 0.5}
        if name == "qwen" and rng.random() < 0.5:
            how["options"] = {"enable_thinking": rng.random() < 0.5}
        ours, theirs = both(oracle, name, conversation(rng, with_tools), **how)
        assert ours == theirs
        rendered += ours is not None
    assert rendered, "every conversation was refused; the comparison compares nothing"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(10))
def test_an_open_last_message_is_cut_at_the_same_place(oracle: PreTrainedTokenizerFast, name: str, seed: int) -> None:
    rng = random.Random(seed)
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "so" + rng.choice(["", " ", "\n x  "])},
    ]
    ours, theirs = both(oracle, name, messages, continue_final_message=True, add_generation_prompt=False)
    assert ours == theirs


@pytest.mark.parametrize("name", ["gemma"])
def test_parts_reach_a_template_that_walks_over_them(oracle: PreTrainedTokenizerFast, name: str) -> None:
    """B041: the list where the template wants it."""
    messages = [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}]
    ours, theirs = both(oracle, name, messages, add_generation_prompt=True)
    assert ours == theirs
    assert "ab" in ours


def test_messages_without_control_tokens_are_never_marked(oracle: PreTrainedTokenizerFast) -> None:
    template = ChatTemplate(ALL["chatml"], NAMED, ["<|im_start|>", "<|im_end|>"])
    rng = random.Random(3)
    for _ in range(50):
        rendered = template.render([{"role": "user", "content": random_string(rng)}])
        assert rendered.marked.replace(rendered.mark, "") == rendered.text
        assert rendered.text.count("<|im_end|>") == 1


@pytest.mark.parametrize(
    "source",
    [
        "{% for g in messages|groupby('role') %}{{ g.grouper }}={{ g.list|length }};{% endfor %}",
        "{% for _, g in messages|groupby('role') %}{{ g|map(attribute='content')|join }}{% endfor %}",
        "{% for g in messages|groupby('content') %}{{ g[0] }}{{ g['list'][0].role }}{{ g.list[-1].role }}{% endfor %}",
        "{% set g = (messages|groupby('role'))[0] %}{{ g.grouper is defined }}{{ g.other is defined }}{{ g.count(1) }}",
        "{{ (messages|groupby('role')|first).list[0].content }}",
    ],
)
def test_groups_have_their_key_and_their_list_by_name(oracle: PreTrainedTokenizerFast, source: str) -> None:
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "a"))]
    theirs = oracle.apply_chat_template(messages, chat_template=source, tokenize=False)
    assert ChatTemplate(source).render(messages, add_generation_prompt=False).text == theirs


@pytest.mark.parametrize(
    "shown",
    [
        "m.content|selectattr('type', 'equalto', 'text')|map(attribute='text')|join('')",
        "m.content[0].text",
        "m.content if m.content is string else m.content|map(attribute='text')|join(';')",
    ],
)
def test_parts_that_filters_or_an_index_read_are_shown(oracle: PreTrainedTokenizerFast, shown: str) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ SHOWN }}\n{% endfor %}".replace("SHOWN", shown)
    messages = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("a ", "<b>")]}]
    theirs = oracle.apply_chat_template(messages, chat_template=source, tokenize=False)
    assert ChatTemplate(source).render(messages, add_generation_prompt=False).text == theirs
