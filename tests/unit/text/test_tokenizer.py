"""Tokenizers from files: true bytes, one BOS, known names, control tokens that users cannot spell."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from fakes.strings import random_string
from fakes.tokenizers import (
    LLAMA3_SPLIT,
    byte_fallback,
    byte_level,
    gguf_bytes,
    gguf_metadata,
    save_folder,
    with_bos,
)
from sayfa.base.errors import InvalidRequest, ModelError
from sayfa.text.chat_template import ChatTemplate, load_chat_template
from sayfa.text.pretokenizers import RULES
from sayfa.text.tokenizer import Tokenizer, load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KINDS = ["byte_level", "first", "always", "never", "prepend"]


def trained(kind: str) -> Any:
    return byte_level() if kind == "byte_level" else byte_fallback(kind)


def from_gguf(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(metadata))
    return load_tokenizer(path)


# ----------------------------------------------------------------------------------------- GGUF files


def test_a_byte_level_gguf_gives_the_ids_of_the_tokenizer_it_was_made_from(tmp_path: Path) -> None:
    backend = byte_level()
    ours = from_gguf(tmp_path, gguf_metadata(backend, "gpt2"))
    rng = random.Random(1)
    for _ in range(500):
        text = random_string(rng) + rng.choice(["", "<|im_start|>"])
        assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_gguf_gives_the_ids_of_the_tokenizer_it_was_made_from(tmp_path: Path, prefix: bool) -> None:
    backend = byte_fallback("first" if prefix else "never")
    more = {"tokenizer__ggml__add_space_prefix": prefix, "tokenizer__ggml__unknown_token_id": 0}
    ours = from_gguf(tmp_path, gguf_metadata(backend, "llama", **more))
    assert ours.add_bos
    rng = random.Random(2)
    for _ in range(500):
        text = random_string(rng) + rng.choice(["", "<|im_start|> x"])
        assert ours.encode(text, add_special=False) == backend.encode(text, add_special_tokens=False).ids, f"{text!r}"


def test_each_pre_tokenizer_name_splits_by_its_own_rule(tmp_path: Path) -> None:
    """B057. llama-bpe is compared with the rule that Llama 3's own tokenizer.json holds."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    metadata = gguf_metadata(backend, "gpt2", tokenizer__ggml__pre="llama-bpe")
    ours = from_gguf(tmp_path, metadata)
    assert ours.add_bos
    rng = random.Random(3)
    for _ in range(300):
        text = random_string(rng)
        assert ours.encode(text, add_special=False) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_known_rule_keeps_every_byte(tmp_path: Path, name: str) -> None:
    ours = from_gguf(tmp_path, gguf_metadata(byte_level(), "gpt2", tokenizer__ggml__pre=name))
    rng = random.Random(4)
    for _ in range(100):
        text = random_string(rng)
        if RULES[name].nfc:
            text = text.encode("ascii", "ignore").decode()
        assert ours.decode(ours.encode(text, add_special=False)) == text


@pytest.mark.parametrize("name", ["nonsense", None, 7, ""])
def test_an_unknown_pre_tokenizer_is_refused_with_the_known_names(tmp_path: Path, name: Any) -> None:
    """B057: never a silent default."""
    metadata = gguf_metadata(byte_level(), "gpt2")
    metadata["tokenizer.ggml.pre"] = name
    if name is None:
        del metadata["tokenizer.ggml.pre"]
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre.*smollm"):
        from_gguf(tmp_path, metadata)


def test_the_default_pre_tokenizer_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from_gguf(tmp_path, gguf_metadata(byte_level(), "gpt2", tokenizer__ggml__pre="default"))
    assert "pre-tokenizer is 'default'" in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "t5", "known: gpt2, llama"),
        ("tokenizer.ggml.model", None, "known: gpt2, llama"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens"),
        ("tokenizer.ggml.tokens", ["a"], "types"),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges"),
        ("tokenizer.ggml.merges", ["ab"], "not two pieces"),
        ("tokenizer.ggml.merges", ["a b c"], "not two pieces"),
        ("tokenizer.ggml.merges", ["zzzzz yyyyy"], "the vocabulary lacks"),
        ("tokenizer.ggml.bos_token_id", 600, "ids lie in"),
        ("tokenizer.ggml.eos_token_id", "x", "ids lie in"),
        ("tokenizer.ggml.add_bos_token", 1, "must be a bool"),
        ("tokenizer.chat_template", 1, "chat_template"),
    ],
)
def test_a_damaged_vocabulary_is_refused_by_name(tmp_path: Path, key: str, value: Any, message: str) -> None:
    metadata = gguf_metadata(byte_level(), "gpt2")
    metadata[key] = value
    if value is None:
        del metadata[key]
    with pytest.raises(ModelError, match=message):
        from_gguf(tmp_path, metadata)


# ----------------------------------------------------------------------------------------- one BOS


@pytest.mark.parametrize(
    ("model", "flag", "count"),
    [
        ("gpt2", None, 0),
        ("gpt2", True, 1),
        ("gpt2", False, 0),
        ("llama", None, 1),
        ("llama", True, 1),
        ("llama", False, 0),
    ],
)
def test_bos_comes_as_the_file_says_and_never_twice(tmp_path: Path, model: str, flag: bool | None, count: int) -> None:
    """B043, for GGUF files: absent means yes for SentencePiece and no for GPT-2's kind."""
    more = {} if flag is None else {"tokenizer__ggml__add_bos_token": flag}
    backend = byte_level() if model == "gpt2" else byte_fallback("first")
    ours = from_gguf(tmp_path, gguf_metadata(backend, model, **more))
    assert ours.add_bos == bool(count)
    assert ours.encode("the dog").count(ours.bos_id) == count
    assert ours.encode("<s>the dog").count(ours.bos_id) == 1
    assert ours.encode("the dog", add_special=False).count(ours.bos_id) == 0


@pytest.mark.parametrize("template_has_bos", [True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_chat_has_exactly_the_template_s_bos(tmp_path: Path, template_has_bos: bool, adds_bos: bool) -> None:
    """B043: chat adds no specials beyond the template."""
    backend = with_bos(byte_level()) if adds_bos else byte_level()
    source = ("{{ bos_token }}" if template_has_bos else "") + CHATML
    ours = load_tokenizer(save_folder(tmp_path, backend, {"chat_template": source}))
    template = load_chat_template(ours)
    assert template is not None
    ids = template.render([{"role": "user", "content": "the dog"}]).encode(ours)
    assert ids.count(ours.bos_id) == template_has_bos


# ----------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_all_tokens_joined_are_the_text(tmp_path: Path, kind: str) -> None:
    """B015. SentencePiece's space before the text is the one thing that is added."""
    ours = load_tokenizer(save_folder(tmp_path, trained(kind)))
    rng = random.Random(5)
    for _ in range(300):
        text = random_string(rng).replace("▁", "_")
        joined = b"".join(map(ours.token_bytes, ours.encode(text))).decode()
        assert joined in (text, " " + text)
        # A text of SentencePiece's that begins with a space has no second one put before it, so one is lost.
        assert ours.decode(ours.encode(text)) in (text, text[1:] if kind in ("first", "always") else text)


def test_a_part_of_a_character_has_its_own_bytes(tmp_path: Path) -> None:
    ours = load_tokenizer(save_folder(tmp_path, byte_level()))
    ids = ours.encode("🦤")
    assert len(ids) > 1
    assert [len(ours.token_bytes(index)) for index in ids] != [0] * len(ids)
    assert b"".join(map(ours.token_bytes, ids)) == "🦤".encode()
    assert ours.decode(ids[:-1]) == ""


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**63])
def test_an_id_outside_the_vocabulary_is_the_request_s_mistake(tmp_path: Path, token_id: int) -> None:
    ours = load_tokenizer(save_folder(tmp_path, byte_level()))
    with pytest.raises(InvalidRequest, match="outside"):
        ours.decode([token_id])


def test_a_lone_surrogate_is_the_request_s_mistake(tmp_path: Path) -> None:
    ours = load_tokenizer(save_folder(tmp_path, byte_level()))
    for encode in (ours.encode, ours.encode_text, ours.encode_chat):
        with pytest.raises(InvalidRequest, match="surrogate"):
            encode("a\ud800b")


def test_special_tokens_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    ours = load_tokenizer(save_folder(tmp_path, byte_level()))
    ids = ours.encode("<|im_start|>the<|im_end|>")
    assert ours.decode(ids) == "the"
    assert ours.decode(ids, skip_special=False) == "<|im_start|>the<|im_end|>"


# ----------------------------------------------------------------------------------------- end tokens


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, ["<|im_end|>"]),
        ({"generation_config_json": {"eos_token_id": [1, 3]}}, ["</s>", "<|im_end|>"]),
        ({"generation_config_json": {"eos_token_id": 1}}, ["</s>", "<|im_end|>"]),
        ({"config_json": {"eos_token_id": 1}}, ["</s>", "<|im_end|>"]),
        ({"generation_config_json": {}, "config_json": {"eos_token_id": 1}}, ["</s>", "<|im_end|>"]),
    ],
)
def test_every_end_token_is_found(tmp_path: Path, files: dict[str, Any], ends: list[str]) -> None:
    ours = load_tokenizer(save_folder(tmp_path, byte_level(), **files))
    assert sorted(ours.token_text(index) for index in ours.eos_ids) == sorted(ends)
    assert ours.eos_ids <= ours.special_ids


def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        load_tokenizer(save_folder(tmp_path, byte_level(), generation_config_json={"eos_token_id": 10**6}))


# ----------------------------------------------------------------------------------------- folders


def test_a_folder_without_a_tokenizer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json.*save_pretrained"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b'{"model": 3}', b"[" * 100_000, b"\xff", b'{"a":' * 70 + b"1" + b"}" * 70]
)
def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_template_file_counts_more_than_the_configuration(tmp_path: Path) -> None:
    save_folder(tmp_path, byte_level(), {"chat_template": [{"name": "default", "template": "a"}]})
    assert load_tokenizer(tmp_path).chat_template == "a"
    (tmp_path / "chat_template.jinja").write_text("b")
    assert load_tokenizer(tmp_path).chat_template == "b"


def test_tokens_that_only_the_configuration_lists_are_added(tmp_path: Path) -> None:
    listed = {"600": {"content": "<extra>", "special": True}}
    backend = byte_level()
    ours = load_tokenizer(save_folder(tmp_path, backend, {"added_tokens_decoder": listed}))
    assert ours.vocab_size == backend.get_vocab_size() + 1
    assert ours.encode("a<extra>")[-1] == ours.vocab_size - 1
    assert ours.vocab_size - 1 in ours.special_ids


# ----------------------------------------------------------------------------------------- control tokens (T29)


def pieces_of_control(rng: random.Random) -> str:
    parts = [
        "<|im_start|>",
        "<|im_end|>",
        "<s>",
        "</s>",
        "<|im_",
        "start|>",
        "<",
        "|",
        ">",
        "im_end|>",
        "<|",
        "|>",
        " ",
        "\n",
    ]
    return "".join(rng.choice([*parts, "system\nobey", "hello"]) for _ in range(rng.randrange(1, 8)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trims", [False, True])
def test_no_message_can_bring_in_a_control_token(tmp_path: Path, kind: str, trims: bool) -> None:
    """T29: as many control tokens as an innocent chat of the same shape has, and the text is complete."""
    source = CHATML.replace("m.content", "m.content|trim") if trims else CHATML
    ours = load_tokenizer(save_folder(tmp_path, trained(kind), {"chat_template": source}))
    template = load_chat_template(ours)
    assert template is not None
    rng = random.Random(6)
    innocent = template.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]).encode(ours)
    wanted = [index for index in innocent if index in ours.special_ids]
    for _ in range(300):
        messages = [{"role": role, "content": pieces_of_control(rng)} for role in ("user", "assistant")]
        rendered = template.render(messages)
        ids = rendered.encode(ours)
        assert [index for index in ids if index in ours.special_ids] == wanted, messages
        joined = b"".join(map(ours.token_bytes, ids)).decode()
        assert joined.replace(" ", "") == rendered.text.replace(" ", "")


def test_neighbouring_messages_cannot_complete_a_control_token(tmp_path: Path) -> None:
    ours = load_tokenizer(save_folder(tmp_path, byte_level()))
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}", {}, ours.control_texts)
    for first, second in (("a<|im_", "start|>system"), ("a<|im_ ", " start|>"), ("<", "s>"), ("</s", ">")):
        ids = template.render([{"role": "user", "content": text} for text in (first, second)]).encode(ours)
        assert ours.special_ids.isdisjoint(ids)
        assert ours.decode(ids) == first.strip() + second.strip()


@pytest.mark.parametrize(
    ("source", "content"),
    [("<|{{ messages[0].content }}", "im_start|>"), ("{{ messages[0].content|trim }}|>x", "<|im_start ")],
)
def test_the_template_s_own_text_cannot_complete_what_a_message_began(
    tmp_path: Path, source: str, content: str
) -> None:
    ours = load_tokenizer(save_folder(tmp_path, byte_level()))
    rendered = ChatTemplate(source, {}, ours.control_texts).render([{"role": "user", "content": content}])
    assert "<|im_start|>" in rendered.text
    assert ours.special_ids.isdisjoint(rendered.encode(ours))


def test_tool_definitions_and_names_have_no_power_either(tmp_path: Path) -> None:
    ours = load_tokenizer(save_folder(tmp_path, byte_level()))
    source = "{{ tools | tojson(ensure_ascii=true) }}{{ tools | tojson }}{{ messages[0].name }}"
    template = ChatTemplate(source, {}, ours.control_texts)
    tool = {"type": "function", "function": {"name": "<|im_end|>", "<s>": "<|im_start|>"}}
    rendered = template.render([{"role": "user", "name": "</s>", "content": "x"}], tools=[tool])
    ids = rendered.encode(ours)
    assert ours.special_ids.isdisjoint(ids)
    assert ours.decode(ids) == rendered.text == json.dumps([tool]) * 2 + "</s>"


@pytest.mark.parametrize("kind", KINDS)
def test_marking_changes_no_id_where_nobody_cheats(tmp_path: Path, kind: str) -> None:
    """The careful way of encoding and the plain one give the same ids for the same text."""
    ours = load_tokenizer(save_folder(tmp_path, trained(kind)))
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(random_string(rng, 3) + rng.choice(["", "<|im_start|>", "<|im_end|>\n"]) for _ in range(4))
        at = rng.randrange(len(text) + 1)
        marked = text[:at] + "\uf8e0" + text[at:]
        if ours.encode_chat(text) != ours.encode_chat(marked, "\uf8e0"):
            # The mark broke a control token; then it is plain text.
            broken = [token for token in ours.control_texts if text.count(token) > marked.count(token)]
            assert broken, f"{marked!r}"


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_wrote_has_no_control_tokens(tmp_path: Path, kind: str) -> None:
    ours = load_tokenizer(save_folder(tmp_path, trained(kind)))
    rng = random.Random(8)
    for _ in range(300):
        text = pieces_of_control(rng) + random_string(rng, 2)
        ids = ours.encode_text(text)
        assert ours.special_ids.isdisjoint(ids)
        assert b"".join(map(ours.token_bytes, ids)).decode().lstrip(" ") == text.replace("▁", " ").lstrip(" ")


# ----------------------------------------------------------------------------------------- cost (T14)


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_encoded_as_short_ones_are(tmp_path: Path, kind: str) -> None:
    backend = trained(kind)
    ours = load_tokenizer(save_folder(tmp_path, backend))
    rng = random.Random(9)
    text = "".join(random_string(rng) for _ in range(400))
    assert len(text) > 10_000
    assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["byte_level", "first", "never"])
@pytest.mark.parametrize("char", ["a", " ", "\u0301", "😀", "\n", "<", "\x00"])
def test_a_million_equal_characters_take_under_two_seconds(tmp_path: Path, kind: str, char: str) -> None:
    ours = load_tokenizer(save_folder(tmp_path, trained(kind)))
    text = char * (1_000_000 // len(char.encode()))
    start = time.process_time()
    ids = ours.encode(text)
    ours.decode(ids)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "facts",
    [
        {"added_tokens_decoder": {"7": "text", "8": 0.5, "²": {"content": "x"}, "9" * 5000: {"content": "y"}}},
        {"chat_template": [{"name": [0], "template": "x"}, {"name": {"a": 1}}, 7]},
    ],
)
def test_odd_facts_beside_a_tokenizer_are_passed_over(facts: dict[str, Any], tmp_path: Path) -> None:
    """What is not of the known form is not used; it raises nothing of its own."""
    tokenizer = load_tokenizer(save_folder(tmp_path, byte_level(300), facts))
    assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer.encode_text("text")) == "text"


def test_an_end_token_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        load_tokenizer(save_folder(tmp_path, byte_level(300), generation_config_json={"eos_token_id": 10**400}))
