"""Laws of refusals: a wrong input is a 400 (or its own status) in OpenAI's form that names the field; it harms nobody.

B020, B030, B032, B033, B034, B038, B073, T10, T11, T15, T20.
"""

import itertools
import json
import re
import resource
import time
from typing import Any

import pytest
from http_models import Chat, Error, check
from http_support import CONTEXT, SayingEngine, chat_body, ids_of, serving, text_body

from sayfa.base.messages import Refused

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
LEAKS = re.compile(
    r"/(?:usr|home|work|tmp|src|opt)|0x[0-9a-f]{4}|Traceback|sayfa\.|pydantic|starlette|Error\(|line \d+, in"
)


def refused(response: Any, status: int = 400, param: str | None = None) -> str:
    """Check an error answer's form; return its message."""
    assert response.status_code == status, (response.status_code, response.text)
    assert response.headers["content-type"] == "application/json"
    error = check(response.json(), Error).error
    assert not LEAKS.search(response.text), response.text
    if param is not None:
        assert error.param == param, response.text
    return str(error.message)


@pytest.mark.parametrize("streamed", [False, True])
async def test_b073_every_error_has_the_one_form(streamed: bool) -> None:
    """B073: `{"error": {message, type, param, code}}` with the right status, plain or streamed, for bad JSON, missing
    fields, unknown models and routes, wrong types, methods, content types and keys, and for what is too long."""
    async with serving(api_key=["k" * 20], max_body_bytes=5000) as (client, _):
        key = {"authorization": "Bearer " + "k" * 20}
        extra = {"stream": True} if streamed else {}

        async def post(body: Any, path: str = CHAT, **headers: str) -> Any:
            content = body if isinstance(body, bytes) else json.dumps({**body, **extra}).encode()
            return await client.post(path, content=content, headers={**JSON, **key, **headers})

        refused(await post(b'{"model": "tiny", '))
        refused(await post({"model": "tiny"}), param="messages")
        refused(await post(chat_body(model="gpt-9")), 404, "model")
        refused(await post(chat_body(temperature="warm")), param="temperature")
        refused(await post(chat_body(messages=[{"role": "user", "content": "x" * (CONTEXT + 1)}])), param="messages")
        refused(await post(chat_body(), "/v1/nothing"), 404)
        refused(await client.get(CHAT, headers=key), 405)
        refused(await post(chat_body(), **{"content-type": "text/plain"}), 415)
        refused(await post(chat_body(), **{"content-encoding": "gzip"}), 415)
        refused(await post(chat_body(), authorization="Bearer wrong"), 401)
        refused(await client.post(CHAT, json=chat_body()), 401)
        refused(await post(chat_body(user="x" * 6000)), 413)


async def test_405_names_the_allowed_methods() -> None:
    """RFC 9110 asks for Allow, with every method that the path takes."""
    async with serving() as (client, _):
        assert (await client.get(CHAT)).headers["allow"] == "POST"
        assert (await client.delete("/v1/models/tiny")).headers["allow"] == "GET, HEAD"
        assert (await client.delete("/ping")).headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize("stop", [None, []])
async def test_b020_null_and_empty_stop_lists_mean_none(stop: Any) -> None:
    """B020: clients send null by default."""
    async with serving() as (client, _):
        answer = check((await client.post(CHAT, json=chat_body(stop=stop))).json(), Chat)
    assert answer.choices[0].message.content == "Hello world"


@pytest.mark.parametrize("stop", ["", [""], ["a", None], 5, {"a": 1}, ["x"] * 17, ["x" * 2000], True])
async def test_b020_wrong_stops_are_refused_by_name(stop: Any) -> None:
    """B020: an empty string, wrong types and too many are 400 naming `stop`."""
    async with serving() as (client, _):
        refused(await client.post(CHAT, json=chat_body(stop=stop)), param="stop")


@pytest.mark.parametrize("token", [-1, 10_000, 2**31, 2**63])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
async def test_b030_ids_outside_the_vocabulary(token: int, field: str) -> None:
    """B030: 400 naming the field; the engine never sees the request."""
    engine = SayingEngine()
    async with serving(engine) as (client, _):
        value: Any = {str(token): 1.0} if field == "logit_bias" else [token]
        refused(await client.post(CHAT, json=chat_body(**{field: value, "min_tokens": 1})), param=field)
        refused(await client.post(TEXT, json=text_body(prompt=[1, token])), param="prompt")
    assert engine.requests == []


RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 1e-9, 2, 1], [-1, 1e6, "1", "NaN", True, [1]]),
    "top_p": ([1, 0.5], [-1, 0, 1.1, "x"]),
    "repetition_penalty": ([1, 0.5], [0, -1, 1e9]),
    "top_k": ([-1, 0, 5], [-2, 2**31, 2**70, 1.5]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [3]),
    "seed": ([0, -5, 2**63 - 1], [2**63, 1.5, "a"]),
    "n": ([1, 2], [0, -1, 17, 5_000_000, 2**63]),
    "priority": ([-100, 0, 100], [101, 1.5]),
    "deadline_s": ([0.5, 100], [0, -1, 1e9]),
    "min_tokens": ([0, 2], [-1, 2**40]),
    "cache_salt": (["a"], ["", "x" * 300, 5]),
}


@pytest.mark.parametrize("field", RANGES)
async def test_b032_t11_each_numeric_field_has_a_closed_range(field: str) -> None:
    """B032, T11: in range is served, out of range or of another type is 400 naming the field."""
    good, bad = RANGES[field]
    async with serving() as (client, _):
        for value in good:
            response = await client.post(CHAT, json=chat_body(**{field: value}))
            assert response.status_code == 200, response.text
        for value in bad:
            refused(await client.post(CHAT, json=chat_body(**{field: value})), param=field)
        refused(await client.post(CHAT, content=f'{{"model":"tiny","messages":[],"{field}":NaN}}', headers=JSON))
        refused(await client.post(CHAT, content=json.dumps(chat_body())[:-1] + f',"{field}":1e999}}', headers=JSON))


async def test_b032_all_pairs_end() -> None:
    """B032: every pair of extreme values is answered or refused, never a 500."""
    pairs = itertools.product([-1, 0, 1e-9, 2, 1e6, "1"], [-1, 0, 1, 1.1], [0, -1, 1, 1e9])
    async with serving() as (client, _):
        for temperature, top_p, penalty in pairs:
            body = chat_body(temperature=temperature, top_p=top_p, repetition_penalty=penalty)
            response = await client.post(CHAT, json=body)
            fits = temperature in (0, 1e-9, 2) and top_p == 1 and penalty == 1
            assert response.status_code == (200 if fits else 400)


BOMBS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat_body(logprobs=True, top_logprobs=10**9)),
    (TEXT, text_body(logprobs=10**9)),
    (CHAT, chat_body(n=5_000_000)),
    (TEXT, text_body(best_of=10**12)),
    (TEXT, text_body(prompt_logprobs=-1)),
    (TEXT, text_body(prompt_logprobs=50_000)),
    (TEXT, text_body(max_tokens=2**63)),
    (TEXT, text_body(prompt=["x"] * 1_000_000)),
    (TEXT, text_body(prompt=["x"] * 257)),
    (TEXT, text_body(prompt=[1] * 1_000_000)),
    (TEXT, text_body(prompt="x" * 1_000_000)),
    (CHAT, chat_body(stop=["x"] * 100_000)),
    (CHAT, chat_body(stop_token_ids=[1] * 100_000)),
    (CHAT, chat_body(logit_bias={str(i): 0 for i in range(2000)})),
    (CHAT, chat_body(allowed_token_ids=[1] * 20_000)),
    ("/tokenize", {"prompt": "x" * 1_000_000}),
    ("/detokenize", {"tokens": [1] * 1_000_000}),
]


@pytest.mark.parametrize(("path", "body"), BOMBS, ids=[f"{p}-{list(b)[-1]}-{i}" for i, (p, b) in enumerate(BOMBS)])
async def test_b033_t10_counts_that_multiply_are_refused_before_any_work(path: str, body: dict[str, Any]) -> None:
    """B033, T10: 400 in well under a second of this slow machine, the engine unasked, memory hardly grown."""
    engine = SayingEngine()
    content = json.dumps(body).encode()
    async with serving(engine) as (client, _):
        await client.post(path, content=content, headers=JSON)
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        refused(await client.post(path, content=content, headers=JSON))
        spent = time.process_time() - started
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert engine.requests == []
    assert spent < 0.05 + len(content) / 10e6, spent
    assert grown_kb < 5 * 1024 + 4 * len(content) / 1024


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []]])
async def test_b034_an_empty_prompt_is_refused_in_each_spelling(prompt: Any) -> None:
    """B034: there is nothing to continue."""
    async with serving() as (client, _):
        refused(await client.post(TEXT, json=text_body(prompt=prompt)), param="prompt")
        assert (await client.post(TEXT, json=text_body(prompt="  \n"))).status_code == 200
        refused(await client.post(CHAT, json=chat_body(messages=[])), param="messages")
        empty = chat_body(messages=[{"role": "user", "content": ""}])
        assert (await client.post(CHAT, json=empty)).status_code == 200


async def test_b038_the_rules_of_max_tokens() -> None:
    """B038: absent = null = to the context (chat) or 16 (completions); max_completion_tokens wins; negative is 400."""
    engine = SayingEngine(lambda request, branch: [5] * 1000)
    async with serving(engine) as (client, _):

        async def length(path: str, body: dict[str, Any]) -> int:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["finish_reason"] == "length"
            return int(response.json()["usage"]["completion_tokens"])

        prompt = len(ids_of("<|im_start|>")) and (await client.post("/tokenize", json=chat_body())).json()["count"]
        assert await length(CHAT, chat_body()) == CONTEXT - prompt
        assert await length(CHAT, chat_body(max_tokens=None)) == CONTEXT - prompt
        assert await length(CHAT, chat_body(max_completion_tokens=7)) == 7
        assert await length(CHAT, chat_body(max_completion_tokens=7, max_tokens=9)) == 7
        assert await length(TEXT, text_body()) == 16
        assert await length(TEXT, text_body(max_tokens=None)) == 16
        assert await length(TEXT, text_body(prompt=[1] * (CONTEXT - 1))) == 1
        refused(await client.post(CHAT, json=chat_body(max_tokens=-1)), param="max_tokens")
        refused(await client.post(CHAT, json=chat_body(max_completion_tokens=0)), param="max_completion_tokens")
        both = chat_body(max_completion_tokens=7, max_tokens=-1)
        refused(await client.post(CHAT, json=both), param="max_tokens")
        refused(await client.post(TEXT, json=text_body(max_tokens=-1)), param="max_tokens")


async def test_b038_a_default_length_is_each_prompt_s_own() -> None:
    """A long prompt beside it does not cut the answer to a short one."""
    async with serving(SayingEngine(lambda request, branch: [5] * 1000)) as (client, _):
        body = text_body(prompt=[[1] * (CONTEXT - 2), [1] * 5], return_token_ids=True)
        choices = (await client.post(TEXT, json=body)).json()["choices"]
    assert [len(choice["token_ids"]) for choice in choices] == [2, 16]


@pytest.mark.parametrize("as_text", [False, True])
async def test_a_prompt_that_fills_the_context_can_be_scored(as_text: bool) -> None:
    """Scoring needs no room for an answer, however the prompt is written; one token more is too long."""
    body = {"max_tokens": 0, "echo": True, "logprobs": 1}
    async with serving(SayingEngine()) as (client, _):
        for num_tokens, status in ((CONTEXT, 200), (CONTEXT + 1, 400)):
            prompt: Any = "~" * num_tokens if as_text else ids_of("~") * num_tokens
            response = await client.post(TEXT, json=text_body(prompt=prompt, **body))
            assert response.status_code == status, response.text


async def test_a_refusal_names_the_field_that_was_sent() -> None:
    """Chat has two names for the length, and other ones for log-probabilities than completions."""
    long = {"max_completion_tokens": CONTEXT}
    async with serving(SayingEngine()) as (client, _):
        message = refused(await client.post(CHAT, json=chat_body(**long)), param="max_completion_tokens")
        assert "`max_tokens`" not in message
        message = refused(await client.post(CHAT, json=chat_body(**long, min_tokens=CONTEXT + 1)), param="min_tokens")
        assert "`max_tokens`" not in message
        refused(await client.post(CHAT, json=chat_body(max_tokens=CONTEXT)), param="max_tokens")
    async with serving(SayingEngine(max_model_len=1_000_000)) as (client, _):
        dear = {"max_completion_tokens": 900_000}
        message = refused(await client.post(CHAT, json=chat_body(**dear, n=16)), param="max_completion_tokens")
        assert "`max_tokens`" not in message
        scored = {**dear, "logprobs": True, "top_logprobs": 20}
        assert "`logprobs`" not in refused(await client.post(CHAT, json=chat_body(**scored)), param="top_logprobs")
        for path, body in ((CHAT, chat_body(prompt_logprobs=20)), (TEXT, text_body(prompt_logprobs=20))):
            assert "`logprobs`" not in refused(await client.post(path, json=body), param="prompt_logprobs")


async def test_a_context_overflow_names_both_numbers_and_is_never_a_cut() -> None:
    """Too long a prompt, or a prompt and max_tokens together: 400 with the context and the length."""
    engine = SayingEngine()
    async with serving(engine) as (client, _):
        message = refused(await client.post(TEXT, json=text_body(prompt=[1] * (CONTEXT + 5))), param="prompt")
        assert str(CONTEXT) in message
        assert str(CONTEXT + 5) in message
        message = refused(await client.post(TEXT, json=text_body(prompt=[1] * 200, max_tokens=57)), param="max_tokens")
        for number in (57, CONTEXT, 56, 200):
            assert str(number) in message
        refused(await client.post(TEXT, json=text_body(prompt=[1] * CONTEXT)), param="prompt")
        refused(await client.post(TEXT, json=text_body(min_tokens=CONTEXT, max_tokens=CONTEXT)))
    assert engine.requests == []


BROKEN_BODIES = {
    "empty": b"",
    "not json": b"hello",
    "list": b"[1]",
    "invalid utf-8": b'{"model": "\xff"}',
    "lone surrogate": rb'{"model": "\ud800"}',
    "duplicate key": b'{"model": "tiny", "model": "tiny"}',
    "nan": b'{"model": NaN}',
    "infinity": b'{"model": -Infinity}',
    "deep list": b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
    "deep unclosed": b"[" * 1_000_000,
    "deep object": b'{"a":' * 70 + b"1" + b"}" * 70,
    "long number": b'{"a": ' + b"1" * 65 + b"}",
    "many keys": b"{" + b",".join(b'"k%d":1' % i for i in range(10_001)) + b"}",
    "many containers": b'{"a": [' + b"[]," * 200_000 + b"[]]}",
    "trailing": b'{"a": 1} x',
    "control character": b'{"a": "\x01"}',
}


@pytest.mark.parametrize("name", BROKEN_BODIES)
async def test_t15_broken_json_is_refused_quickly(name: str) -> None:
    """T15: each is a 400 with the code `invalid_json`, within a tenth of a second of work.

    The shortest of three times counts: beside others a processor takes several times as long for the same work.
    """
    times = []
    async with serving() as (client, _):
        for _ in range(3):
            started = time.process_time()
            response = await client.post(CHAT, content=BROKEN_BODIES[name], headers=JSON)
            times.append(time.process_time() - started)
    assert min(times) < 0.3
    refused(response)
    assert response.json()["error"]["code"] == "invalid_json"


async def test_t15_brackets_in_strings_are_no_nesting_and_depth_64_is_allowed() -> None:
    """The bound counts structure, not text."""
    async with serving() as (client, _):
        body = chat_body(messages=[{"role": "user", "content": '[{"' * 35 + "9" * 80}])
        assert (await client.post(CHAT, json=body)).status_code == 200
        nested: Any = 1
        for _ in range(63):
            nested = [nested]
        assert (await client.post(CHAT, json=chat_body(unknown=nested))).status_code == 200


async def test_unknown_fields_are_accepted_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown fields are ignored as OpenAI does, and named in the log one time."""
    async with serving() as (client, _):
        for _ in range(3):
            assert (await client.post(CHAT, json=chat_body(zz_new_field=1))).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "zz_new_field" in record.getMessage()]
    assert len(lines) == 1


UNSERVED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("guided_json", {"guided_json": {"type": "object"}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
    ("chat_template", {"chat_template": "{{ 1 }}"}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 5}),
    ("prompt_embeds", {"prompt_embeds": "AAAA"}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("bad_words", {"bad_words": ["a"]}),
    ("logits_processors", {"logits_processors": ["a.b"]}),
    ("documents", {"documents": [{"text": "a"}]}),
    ("thinking_token_budget", {"thinking_token_budget": 5}),
    ("return_tokens_as_token_ids", {"return_tokens_as_token_ids": True}),
    ("n_predict", {"n_predict": 5}),
    ("n_probs", {"n_probs": 5}),
    ("repeat_penalty", {"repeat_penalty": 1.1}),
    ("typical_p", {"typical_p": 0.9}),
    ("mirostat", {"mirostat": 2}),
    ("dry_multiplier", {"dry_multiplier": 0.8}),
    ("xtc_probability", {"xtc_probability": 0.5}),
    ("echo", {"echo": True}),
    ("best_of", {"best_of": 2}),
    ("add_special_tokens", {"add_special_tokens": True}),
]


@pytest.mark.parametrize(("name", "fields"), UNSERVED)
async def test_what_is_not_served_yet_is_said_and_never_ignored(name: str, fields: dict[str, Any]) -> None:
    """A field that would change the answer and cannot be obeyed is a 400 that says so."""
    async with serving() as (client, _):
        message = refused(await client.post(CHAT, json=chat_body(**fields)), param=name)
        assert "cannot be obeyed" in message
        assert (await client.post(CHAT, json=chat_body(response_format={"type": "text"}, tools=[]))).status_code == 200
        refused(await client.post(TEXT, json=text_body(suffix="end")), param="suffix")
        refused(await client.post(TEXT, json=text_body(best_of=2, stream=True)), param="best_of")
        refused(await client.post(TEXT, json=text_body(n=3, best_of=2)), param="best_of")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": 5}, "`stop` is 5, but must be a string or a list."),
        ({"stop": {"a": 1}}, "`stop` is an object, but must be a string or a list."),
        ({"stop": ["a", None]}, "`stop[1]` is null, but must be a string."),
        ({"tool_choice": ["a"]}, "`tool_choice` is a list, but must be a string or an object."),
        ({"logit_bias": {"1": "x"}}, "`logit_bias.1` is 'x', but must be a number."),
    ],
)
async def test_a_field_with_several_forms_is_refused_at_the_place_of_the_fault(
    fields: dict[str, Any], told: str
) -> None:
    """What may be there is told in full, and no name that is not the caller's."""
    async with serving() as (client, _):
        assert refused(await client.post(CHAT, json=chat_body(**fields))) == told


async def test_values_that_ask_for_nothing_are_served() -> None:
    """Many clients send every field they know, with the value that switches it off."""
    off: dict[str, Any] = {
        "tools": [], "tool_choice": "auto", "functions": [], "function_call": "auto", "n_probs": 0,
        "bad_words": [], "documents": None, "logits_processors": [], "add_special_tokens": False,
        "repeat_penalty": 1.0, "typical_p": 1.0, "mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0,
        "return_tokens_as_token_ids": False,
    }  # fmt: skip
    async with serving() as (client, _):
        for path, body in ((CHAT, chat_body(echo=False, best_of=1, **off)), (TEXT, text_body(**off))):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
        assert (await client.post(TEXT, json=text_body(echo=True, add_special_tokens=True))).status_code == 200


async def test_messages_are_named_by_their_place() -> None:
    """Wrong roles, parts and contents: the message's index is in the text."""
    wrong: list[tuple[Any, str]] = [
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls"),
        ("hello", "messages[1]"),
        ({"role": "user", "content": ["x"]}, "`messages[1].content[0]` is 'x', but must be an object."),
        ({"role": "user", "content": [{"text": "x"}]}, "`messages[1].content[0].type` is missing."),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "`messages[1].content[0].text` is 5"),
        ({"role": "user", "content": {"a": 1}}, "`messages[1].content` is an object, but must be a string or a list."),
    ]
    async with serving() as (client, _):
        for message, place in wrong:
            body = chat_body(messages=[{"role": "user", "content": "a"}, message])
            assert place in refused(await client.post(CHAT, json=body), param="messages")


async def test_t20_a_bug_of_ours_is_a_fixed_sentence_with_the_request_id() -> None:
    """T20: an unexpected exception gives a 500 that says nothing of the machine, plain or streamed."""

    def broken(request: Any, branch: int) -> list[int]:
        raise RuntimeError("/usr/lib/secret 0xdeadbeef")

    class Engine(SayingEngine):
        async def generate(self, request: Any) -> Any:
            broken(request, 0)
            yield None

    async with serving(Engine()) as (client, _):
        for extra in ({}, {"stream": True}):
            response = await client.post(CHAT, json=chat_body(**extra))
            refused(response, 500)
            assert "secret" not in response.text
            assert response.json()["error"]["code"] == "internal_error"
        assert (await client.get("/health")).status_code == 200


async def test_a_refusal_by_the_engine_keeps_its_status_and_retry_after() -> None:
    """A full queue is 503 with Retry-After, streamed or not; what can never fit is 400."""
    engine = SayingEngine()
    async with serving(engine) as (client, _):
        engine.refuse_with = lambda r: Refused(id=r.id, kind="overloaded", message="the queue is full", retry_after_s=7)
        for extra in ({}, {"stream": True}):
            response = await client.post(CHAT, json=chat_body(**extra))
            refused(response, 503)
            assert int(response.headers["retry-after"]) in (7, 8)
        engine.refuse_with = lambda r: Refused(id=r.id, kind="invalid", message="never fits", param="messages")
        refused(await client.post(CHAT, json=chat_body(stream=True)), param="messages")
