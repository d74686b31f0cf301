"""What is fuzzed in process: each parser that reads a stranger's bytes, good inputs to damage, and the law it keeps.

Used by `test_parsers` (random damage, in `make test`) and by `fuzz` (guided by coverage, `make fuzz`). A target's `run`
takes any bytes; it may raise the target's own errors, and nothing else.
"""

import atexit
import json
import math
import os
import random
import re
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from damage import damaged, damaged_json
from pydantic import ValidationError
from safetensors.numpy import save as save_safetensors

from fakes.models import make_successor
from fakes.templates import ALL as TEMPLATES
from fakes.tokenizers import byte_fallback, byte_level, gguf_bytes, gguf_metadata, save_folder
from sayfa.base.errors import ConfigError, InvalidRequest, ModelError
from sayfa.base.gguf import GgufArray, read_gguf
from sayfa.base.json_file import json_depth
from sayfa.base.messages import Abort, Add, Drain, EngineOutput, Outputs, Ping, Refused, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import TokenLogprobs
from sayfa.cli.config_file import read_config_file
from sayfa.models.config import read_config
from sayfa.models.formats.source import open_weights
from sayfa.server import body, strict_json
from sayfa.server.books import Usage
from sayfa.server.openai.chunks import Envelope
from sayfa.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from sayfa.text.chat_template import ChatTemplate
from sayfa.text.detokenizer import Detokenizer
from sayfa.text.tokenizer import Tokenizer, load_tokenizer
from sayfa.wire.codec import MalformedMessageError, decode_from_engine, decode_to_engine, encode
from sayfa.wire.sockets import MAX_FRAME_BYTES, BrokenStreamError, FrameReader, frame


class Target(NamedTuple):
    """One parser. seeds: good inputs. words: pieces that mean something to it. refusals: what it may raise.

    damage: makes a bad input; the default knows bytes only. keeps_kib: what the library behind it never gives back of
    an accepted input: 4 KiB of each tokenizer that has encoded a text. A server has one.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    words: list[bytes]
    refusals: tuple[type[Exception], ...]
    damage: Callable[[random.Random, list[bytes], list[bytes]], bytes] = damaged
    keeps_kib: int = 0


def damaged_safetensors(rng: random.Random, seeds: list[bytes], words: list[bytes]) -> bytes:
    """Half of the time the header's values are damaged and its length is right."""
    data = rng.choice(seeds)
    end = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        return damaged(rng, seeds, words)
    header = damaged_json(rng, [data[8:end]], words)
    return struct.pack("<Q", len(header)) + header + data[end:]


@cache
def place() -> Path:
    """A folder for the files that parsers want to open by name; in memory where there is such a place."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="sayfa-fuzz-", dir=memory if os.access(memory, os.W_OK) else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def put(data: bytes, *path: str) -> Path:
    """Write a file into the place."""
    target = place().joinpath(*path)
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(data)
    return target


# ------------------------------------------------------------------------------------------------ model files


def run_gguf(data: bytes) -> None:
    """Every value decodes and every tensor lies inside the file."""
    file = read_gguf(put(data, "fuzz.gguf"))
    try:
        for value in file.metadata.values():
            if isinstance(value, GgufArray):
                assert len(value.to_list()) == len(value)
        for tensor in file.tensors.values():
            assert len(file.data(tensor)) == tensor.num_bytes
    finally:
        file.close()


def gguf_seeds() -> list[bytes]:
    facts = {"general.architecture": "llama", "a": [1, 2], "b": ["x", "é"], "c": True, "d": 1.5, "e": -3}
    return [gguf_bytes(facts, [("one", [4, 2], 0, 0), ("two", [32, 2], 8, 32)], bytes(range(100)))]


def run_gguf_tokenizer(data: bytes) -> None:
    """What loads can encode and decode."""
    use(load_tokenizer(put(data, "tokens.gguf")))


@cache
def gguf_tokenizer_seeds() -> list[bytes]:
    return [
        gguf_bytes(gguf_metadata(byte_level(300), "gpt2")),
        gguf_bytes(gguf_metadata(byte_fallback(size=290), "llama")),
    ]


def use(tokenizer: Tokenizer) -> None:
    for text in ("hello wörld 😀", "<|im_end|> x", "\n\n  "):
        ids = tokenizer.encode_text(text)
        assert all(0 <= index < tokenizer.vocab_size for index in ids)
        tokenizer.decode(ids)


def run_hf_tokenizer(data: bytes) -> None:
    """As for GGUF; the file comes alone, and as the smaller file beside a good one."""
    put(data, "hf", "tokenizer.json")
    use(load_tokenizer(place() / "hf"))


@cache
def hf_tokenizer_seeds() -> list[bytes]:
    folder = save_folder(place() / "seed", byte_level(280))
    return [(folder / "tokenizer.json").read_bytes()]


def run_tokenizer_config(data: bytes) -> None:
    folder = place() / "hf-config"
    if not folder.exists():
        save_folder(folder, byte_level(280))
    for name in ("tokenizer_config", "generation_config", "special_tokens_map", "added_tokens"):
        (folder / f"{name}.json").write_bytes(data)
    use(load_tokenizer(folder))


def tokenizer_config_seeds() -> list[bytes]:
    token = {"content": "<|x|>", "special": True, "lstrip": False}
    facts = {"eos_token": token, "bos_token": "<s>", "add_bos_token": True, "chat_template": "{{ messages }}",
             "eos_token_id": [1, 2], "added_tokens_decoder": {"280": token, "281": token}}  # fmt: skip
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "x"}]
    return [json.dumps(facts).encode(), json.dumps(facts | {"chat_template": named}).encode()]


def run_safetensors(data: bytes) -> None:
    """Every tensor has the bytes that its shape and type ask for."""
    source = open_weights(put(data, "fuzz.safetensors"))
    for name in source.names():
        shape, kind = source.info(name)
        bits = int((re.findall(r"\d+", kind) or ["8"])[0])
        assert len(source.read(name)) == math.prod(shape) * bits // 8


def safetensors_seeds() -> list[bytes]:
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}
    return [save_safetensors(arrays, {"format": "pt"})]


def run_index(data: bytes) -> None:
    folder = place() / "sharded"
    if not folder.exists():
        put(safetensors_seeds()[0], "sharded", "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(data)
    open_weights(folder).names()


def index_seeds() -> list[bytes]:
    return [json.dumps({"metadata": {}, "weight_map": dict.fromkeys("ab", "model-1.safetensors")}).encode()]


def run_config(data: bytes) -> None:
    """What is accepted has passed its own check."""
    put(data, "config", "config.json")
    read_config(place() / "config").check()


@cache
def config_seeds() -> list[bytes]:
    llama = (make_successor(place() / "successor", {}) / "config.json").read_bytes()
    more = {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention"],
        "sliding_window": 16,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
    }
    scaled = {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                               "original_max_position_embeddings": 64}}  # fmt: skip
    return [llama, json.dumps(json.loads(llama) | more).encode(), json.dumps(json.loads(llama) | scaled).encode()]


# ------------------------------------------------------------------------------------------------ requests


def run_json_body(data: bytes) -> None:
    """What passes is what the standard parser reads, can be encoded again, and each model takes it or names a field."""
    value = strict_json.parse(data)
    assert value == json.loads(data)
    assert json_depth(value) <= strict_json.MAX_DEPTH
    msgspec.json.encode(value)
    for model in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        try:
            model.model_validate(value)
        except ValidationError as error:
            refusal = body.explain(error, value)
            assert len(refusal.message) < 1000
            assert "pydantic" not in refusal.message


def json_body_seeds() -> list[bytes]:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi \ud83d\ude00"}], "tool_calls": [{"a": None}]}
    chat = {"model": "m", "messages": [message], "logit_bias": {"5": -1.5}, "stop": ["a"], "temperature": 0.5}
    text = {"model": "m", "prompt": [[1, 2]], "seed": 7, "stream": True, "stream_options": {"include_usage": True}}
    return [json.dumps(chat).encode(), json.dumps(text).encode(), json.dumps({"tokens": [1, 2, 3]}).encode()]


def run_template(data: bytes) -> None:
    """A template is refused, or gives text within its budget that shows nothing of Python's inside."""
    source = data.decode("utf-8", "replace")
    messages = [{"role": "user", "content": "hello <|im_end|>"}, {"role": "assistant", "content": "x" * 50}]
    text = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, ["<|im_end|>"]).render(messages).text
    assert len(text) < 400_000
    assert not any(sign in text and sign not in source for sign in ("<class", "<function", "<built-in", "object at 0x"))


def template_seeds() -> list[bytes]:
    return [template.encode() for template in TEMPLATES.values()]


@cache
def templates() -> list[ChatTemplate]:
    return [ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}, ["<|im_end|>"]) for name in
            ("gemma", "llama3", "qwen", "odds")]  # fmt: skip


def run_messages(data: bytes) -> None:
    """Any JSON as messages: text or a refusal; a control token that a user wrote is not left whole for the encoder."""
    value = strict_json.parse(data)
    messages = value.get("messages")
    if not isinstance(messages, list):
        return
    tools = value.get("tools")
    well_formed = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    template = templates()[len(data) % len(templates())]
    rendered = template.render(messages, tools=tools if well_formed else None)
    assert len(rendered.text) <= len(rendered.marked)


def messages_seeds() -> list[bytes]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    chat = [
        {"role": "system", "content": "be <|im_end|>"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    return [json.dumps({"messages": chat}).encode(), json.dumps({"messages": chat, "tools": tools}).encode()]


# ------------------------------------------------------------------------------------------------ text and streams


@cache
def text_tokenizer() -> Tokenizer:
    return load_tokenizer(save_folder(place() / "text", byte_level(400)))


def run_text(data: bytes) -> None:
    """A byte-level tokenizer gives back what it was given; text spells no control token."""
    tokenizer, text = text_tokenizer(), data.decode("utf-8", "replace")
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert not set(ids) & tokenizer.special_ids


def text_seeds() -> list[bytes]:
    return [
        b"the quick <|im_end|> fox",
        "ığdır 😀👨‍👩‍👧 東京".encode(),
        b"\xf0\x9f\x98",
        b"a" * 3000,
        b" " * 3000,
    ]


def run_detokenizer(data: bytes) -> None:
    """Ids one by one and all at once give the same text, which ends where its first stop string begins."""
    tokenizer = text_tokenizer()
    ids = [byte * 7 % tokenizer.vocab_size for byte in data]
    all_text = tokenizer.decode(ids)
    at = data[0] % (len(all_text) + 1) if data else 0
    stops = [stop for stop in (all_text[at : at + 1 + len(data) % 7], "the") if stop]
    whole, pieces = Detokenizer(tokenizer, stops), Detokenizer(tokenizer, stops)
    whole.push(ids, finished=True)
    for index, token in enumerate(ids):
        pieces.push([token], finished=index + 1 == len(ids))
    assert whole.text == pieces.text
    assert whole.offsets == pieces.offsets
    ends = {stop: all_text.index(stop) + len(stop) for stop in stops if stop in all_text}
    assert whole.stopped == bool(ends)
    if ends:
        assert whole.text in {all_text[: end - len(stop)] for stop, end in ends.items() if end == min(ends.values())}
    else:
        assert whole.text == all_text


def run_events(data: bytes) -> None:
    """Any text in an event comes out of a standard reader as it went in, as one event on one line."""
    text = data.decode("utf-8", "replace")
    envelope = Envelope(chat=True, answer_id="a", created_s=1, model="m", fingerprint="f", usage_mode="none")
    event = envelope.text(0, text, None, None, Usage())
    [read] = read_events(event)
    assert json.loads(read)["choices"][0]["delta"]["content"] == text


def read_events(stream: bytes) -> list[str]:
    """Read events by the standard's rules: three kinds of line end, fields, a blank line ends an event."""
    text = stream.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events: list[str] = []
    lines: list[str] = []
    for line in text.split("\n")[:-1]:  # what stands behind the last line end is no line yet
        name, _, value = line.partition(":")
        if not line and lines:
            events.append("\n".join(lines))
            lines = []
        elif name == "data":
            lines.append(value.removeprefix(" "))
    assert not lines, "the stream ends inside an event"
    return events


# ------------------------------------------------------------------------------------------------ settings and the wire


def run_yaml(data: bytes) -> None:
    """A settings file gives a mapping or a ConfigError."""
    assert isinstance(read_config_file(put(data, "settings.yaml")), dict)


def yaml_seeds() -> list[bytes]:
    return [b"port: 8000\nmodel: x\napi-key: [a, b]\nratio: 0.5\nflag: true\n# note\ntext: |\n  a\n  b\nnone: ~\n"]


def run_wire(data: bytes) -> None:
    """A frame's payload is one of our messages or malformed; what decodes encodes to an equal message."""
    for decode in (decode_to_engine, decode_from_engine):
        try:
            message = decode(data)
        except MalformedMessageError as error:
            named = error.request_id
        else:
            named = None
            check_message(message, decode)
        assert named is None or len(named) <= 256


def check_message(message: Any, decode: Callable[[bytes], Any]) -> None:
    """It survives the wire, and its request's params are taken or refused by name."""
    again = encode(message)
    assert encode(decode(again)) == again
    if isinstance(message, Add):
        try:
            message.request.params.check()
            message.request.params.check_vocabulary(1000)
        except InvalidRequest:
            pass


def wire_seeds() -> list[bytes]:
    params = SamplingParams(logit_bias={5: -1.5}, stop=["x"], seed=7, n=2, stop_token_ids=[3])
    output = EngineOutput(id="a", tokens=[4], logprobs=[TokenLogprobs(-0.5, 1, [4, 5], [-0.5, -1.0])], finish="stop")
    messages = [
        Add(Request(id="a", prompt=[1, 2, 3], params=params, salt="s", deadline_s=1.5)),
        Abort(["a"]),
        Drain(2.5),
        Ping(9),
        Outputs(outputs=[output]),
        Refused(id="a", kind="invalid", message="no", retry_after_s=1),
    ]
    return [encode(message) for message in messages]


def run_frames(data: bytes) -> None:
    """Frames are cut as a plain reading of the whole cuts them, however they arrive; a length that lies is skipped.

    Behind the first frame with a wrong number or checksum nothing comes any more.
    """
    wanted: list[bytes] = []
    place, number, broken = 0, 0, False
    while place + 12 <= len(data) and not broken:
        length, named, checksum = struct.unpack_from("<III", data, place)
        place += 12 + length
        payload = data[place - length : place]
        broken = named != number
        if length <= MAX_FRAME_BYTES and place <= len(data):
            broken = broken or zlib.crc32(payload) != checksum
            wanted += [] if broken else [payload]
        number += 1
    for step in (1, 3, len(data) or 1):
        reader = FrameReader()
        cut: list[bytes] = []
        try:
            for start in range(0, len(data), step):
                cut += reader.feed(data[start : start + step])
        except BrokenStreamError:
            assert broken
            assert cut == wanted[: len(cut)]
        else:
            assert not broken
            assert cut == wanted


def frame_seeds() -> list[bytes]:
    whole = b"".join(frame(payload, number) for number, payload in enumerate(wire_seeds()))
    return [whole, struct.pack("<III", MAX_FRAME_BYTES + 1, 0, 0) + b"x" * 20]


_DEEP = b'{"a":' + b"[" * 70 + b"]" * 70 + b"}"
_JSON_WORDS = [
    _DEEP,
    b"null",
    b"true",
    b"1e999",
    b"-0",
    b"9" * 70,
    b"\\ud800",
    b'""',
    b"[[",
    b"{}",
    b"NaN",
    b'"a":',
    b"1.5",
]
_JINJA_WORDS = [
    b"{{",
    b"}}",
    b"{%",
    b"%}",
    b"{% for m in range(9999) %}",
    b"{% endfor %}",
    b"__class__",
    b"|tojson",
    b"~",
    b"'x' * 10**9",
    b".format(",
    b"{% set ns = namespace(x=1) %}",
    b"{% macro f() %}",
    b"loop",
    b"|replace(",
]
_NUMBERS = [struct.pack("<Q", value) for value in (0, 1, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)]
_YAML_WORDS = [
    b"&a",
    b"*a",
    b"!!python/object:os.system",
    b"!!binary |",
    b"!!set",
    b"!!timestamp",
    b"2024-13-45",
    b"0b_",
    b"0x",
    b"1__",
    b"? [a]",
    b"<<: ",
    b"- ",
    b": ",
    b"{",
    b"}",
    b"%YAML",
    b"---",
    b"...",
    b".inf",
    b"1:99:99",
]
_TEXT_WORDS = [
    b"<|im_end|>",
    b"\xff",
    "\u2028".encode(),
    "\ufeff".encode(),
    b"\r\n\r\n",
    b"data: x",
    b"\x00",
    "👩‍".encode(),
]

TARGETS: dict[str, Target] = {
    "gguf": Target(run_gguf, gguf_seeds, _NUMBERS, (ModelError,)),
    "gguf-tokenizer": Target(run_gguf_tokenizer, gguf_tokenizer_seeds, _NUMBERS, (ModelError,), keeps_kib=5),
    "hf-tokenizer": Target(
        run_hf_tokenizer, hf_tokenizer_seeds, _JSON_WORDS, (ModelError, InvalidRequest), damaged_json, keeps_kib=5
    ),
    "tokenizer-config": Target(
        run_tokenizer_config, tokenizer_config_seeds, _JSON_WORDS, (ModelError,), damaged_json, keeps_kib=5
    ),
    "safetensors": Target(
        run_safetensors, safetensors_seeds, _NUMBERS + _JSON_WORDS, (ModelError,), damaged_safetensors
    ),
    "index": Target(run_index, index_seeds, [*_JSON_WORDS, b"../"], (ModelError,), damaged_json),
    "config": Target(run_config, config_seeds, _JSON_WORDS, (ModelError,), damaged_json),
    "json-body": Target(run_json_body, json_body_seeds, _JSON_WORDS, (InvalidRequest,), damaged_json),
    "template": Target(run_template, template_seeds, _JINJA_WORDS, (ModelError, InvalidRequest)),
    "messages": Target(run_messages, messages_seeds, _JSON_WORDS, (InvalidRequest,), damaged_json),
    "text": Target(run_text, text_seeds, _TEXT_WORDS, ()),
    "detokenizer": Target(run_detokenizer, text_seeds, _TEXT_WORDS, ()),
    "events": Target(run_events, text_seeds, _TEXT_WORDS, ()),
    "yaml": Target(run_yaml, yaml_seeds, _YAML_WORDS, (ConfigError,)),
    "wire": Target(run_wire, wire_seeds, _NUMBERS, ()),
    "frames": Target(run_frames, frame_seeds, _NUMBERS, ()),
}
