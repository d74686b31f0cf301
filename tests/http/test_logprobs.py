"""Laws of log-probabilities: streamed = plain, offsets point into the text as sent, bytes are true, numbers are finite.

B011, B013, B015, B037, B040.
"""

import json
import threading
from typing import Any

import msgspec
import pytest
from http_models import Chat, Text, check
from http_support import (
    SayingEngine,
    chat_body,
    ids_of,
    joined,
    score,
    serving,
    stream,
    text_body,
    tokenizer,
)

from sayfa.base.messages import EngineOutput, Request
from sayfa.base.step import TokenLogprobs
from sayfa.server.openai import logprobs

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def joined_logprobs(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The parallel lists of all chunks, one behind the other."""
    whole: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                whole[name] += values
    return whole


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("byte_by_byte", [False, True])
@pytest.mark.parametrize("stop", [None, "END"])
async def test_b011_offsets_point_at_the_tokens_in_the_text_as_sent(
    echo: bool, byte_by_byte: bool, stop: str | None
) -> None:
    """B011: over the grid of stream, echo and stop; streamed lists joined equal the plain ones."""
    said = "Hello wörld 👍 END more"
    engine = SayingEngine(lambda request, branch: ids_of(said, byte_by_byte))
    body = text_body(prompt="Sağ ol", echo=echo, logprobs=1, max_tokens=60, stop=stop)
    async with serving(engine) as (client, _):
        plain = check((await client.post(TEXT, json=body)).json(), Text).choices[0]
        chunks = await stream(client, TEXT, body)
    text, values = plain.text, plain.logprobs
    assert text == ("Sağ ol" if echo else "") + (said[: said.index("END")] if stop else said)
    assert joined(chunks, chat=False) == text
    assert joined_logprobs(chunks) == msgspec.to_builtins(values)
    assert len(values.tokens) == len(values.token_logprobs) == len(values.top_logprobs) == len(values.text_offset)
    for token, offset in zip(values.tokens, values.text_offset, strict=True):
        assert 0 <= offset < len(text)
        if not token.startswith("bytes:"):
            seen = text[offset : offset + len(token)]
            assert token.startswith(seen)
            assert seen == token or offset + len(token) > len(text)


async def test_without_logprobs_the_field_is_null_and_echo_still_works() -> None:
    """The other half of the grid."""
    for echo in (False, True):
        async with serving() as (client, _):
            body = text_body(echo=echo)
            plain = check((await client.post(TEXT, json=body)).json(), Text).choices[0]
            chunks = await stream(client, TEXT, body)
        assert plain.logprobs is None
        assert plain.text == ("Say" if echo else "") + "Hello world" == joined(chunks, chat=False)
        assert all(choice["logprobs"] is None for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("num_top", [0, 1, 3])
async def test_b015_chat_bytes_joined_are_the_content(num_top: int) -> None:
    """B015: with characters split over tokens, bytes are true and joined give the content; tokens are told apart."""
    said = "ok 👨‍👩‍👧‍👦 ğ"
    engine = SayingEngine(lambda request, branch: ids_of(said, byte_by_byte=True))
    body = chat_body(logprobs=True, top_logprobs=num_top)
    async with serving(engine) as (client, _):
        plain = check((await client.post(CHAT, json=body)).json(), Chat).choices[0]
        chunks = await stream(client, CHAT, body)
    content = plain.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == plain.message.content == said
    assert all(len(token.top_logprobs) == num_top for token in content)
    partial = {token.token for token in content if token.bytes[0] >= 0x80}
    assert len(partial) == len({tuple(token.bytes) for token in content if token.bytes[0] >= 0x80})
    streamed = [
        item
        for chunk in chunks
        for choice in chunk["choices"]
        for item in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == msgspec.to_builtins(content)


class MinusInfinityEngine(SayingEngine):
    """Reports minus infinity for the alternatives, as `top_k=1` would."""

    def _output(self, request: Request, branch: int, answer: list[int], step: int) -> EngineOutput:
        output = super()._output(request, branch, answer, step)
        broken = [TokenLogprobs(0.0, 1, [5, 6], [0.0, float("-inf")]) for _ in output.logprobs]
        return msgspec.structs.replace(output, logprobs=broken)


@pytest.mark.parametrize(
    "body", [text_body(logprobs=2, top_k=1), chat_body(logprobs=True, top_logprobs=2)], ids=["t", "c"]
)
async def test_b013_all_numbers_are_finite_json(body: dict[str, Any]) -> None:
    """B013: whatever the engine reports, the answer is strict JSON with a floor of -9999."""
    path = TEXT if "prompt" in body else CHAT
    async with serving(MinusInfinityEngine()) as (client, _):
        response = await client.post(path, json=body)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(response.content, parse_constant=refuse)
    assert response.status_code == 200
    assert "-9999.0" in response.text


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_b037_scoring_a_prompt(logprobs: int | None) -> None:
    """B037: echo with max_tokens 0 gives the prompt, its values and no tokens; without echo it is a 400."""
    async with serving(SayingEngine(lambda request, branch: [])) as (client, _):
        body = text_body(prompt="Score me", echo=True, max_tokens=0, logprobs=logprobs)
        plain = await client.post(TEXT, json=body)
        chunks = await stream(client, TEXT, body)
        refused = await client.post(TEXT, json=text_body(max_tokens=0))
    answer = check(plain.json(), Text)
    assert answer.choices[0].text == "Score me" == joined(chunks, chat=False)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    if logprobs is not None:
        values = answer.choices[0].logprobs
        ids = ids_of("Score me")
        assert len(values.tokens) == len(ids)
        assert values.token_logprobs[0] is None
        assert values.token_logprobs[1:] == [score(token, at, 0).logprob for at, token in enumerate(ids) if at]
        assert joined_logprobs(chunks) == msgspec.to_builtins(values)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_b040_echo_of_token_ids(logprobs: int | None) -> None:
    """B040: an ids prompt is echoed as its decoded text, alone and in a list, streamed and plain; offsets fit."""
    ids = ids_of("Hello the END")
    async with serving() as (client, _):
        for prompt, expected in ((ids, ["Hello the END"]), ([ids, ids_of("ing")], ["Hello the END", "ing"])):
            body = text_body(prompt=prompt, echo=True, logprobs=logprobs)
            plain = check((await client.post(TEXT, json=body)).json(), Text)
            chunks = await stream(client, TEXT, body)
            for index, text in enumerate(expected):
                choice = plain.choices[index]
                assert choice.text == f"{text}Hello world" == joined(chunks, index, chat=False)
                for token, offset in zip(
                    *((choice.logprobs.tokens, choice.logprobs.text_offset) if logprobs else ((), ())), strict=True
                ):
                    assert choice.text[offset:].startswith(token)


async def test_prompt_logprobs_and_token_ids_as_vllm_shows_them() -> None:
    """prompt_logprobs: null first, then a map with the prompt's own token; return_token_ids shows what was computed."""
    async with serving() as (client, _):
        body = text_body(prompt_logprobs=2, return_token_ids=True)
        choice = (await client.post(TEXT, json=body)).json()["choices"][0]
        chat = (await client.post(CHAT, json=chat_body(prompt_logprobs=0, return_token_ids=True))).json()
        chunks = await stream(client, CHAT, chat_body(return_token_ids=True))
    ids = ids_of("Say")
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == ids_of("Hello world") == chat["choices"][0]["token_ids"]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids") or []] == choice["token_ids"]
    assert choice["prompt_logprobs"][0] is None
    for token, position in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        assert position[str(token)]["decoded_token"] == tokenizer().token_text(token)
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])


async def test_prompt_logprobs_cannot_be_streamed() -> None:
    """There is no event for them, so it is said."""
    async with serving() as (client, _):
        response = await client.post(TEXT, json=text_body(prompt_logprobs=1, stream=True))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("num_prompt", [10, 1000])
@pytest.mark.parametrize("streamed", [False, True])
async def test_many_are_put_in_form_in_another_thread(
    num_prompt: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand positions with 20 values beside each held all streams up for half a second."""
    threads: set[int] = set()
    show = logprobs.show

    def noted(data: bytes) -> str:
        threads.add(threading.get_ident())
        return show(data)

    monkeypatch.setattr(logprobs, "show", noted)
    body = text_body(prompt=[5] * num_prompt, max_tokens=1, echo=True, logprobs=20, stream=streamed)
    async with serving(SayingEngine(max_model_len=2000)) as (client, _):
        response = await client.post(TEXT, json=body)
    assert response.status_code == 200, response.text
    assert (threading.get_ident() in threads) == (num_prompt == 10 or streamed), (
        "the answer's own token is told at once"
    )
    assert (len(threads) > (1 if streamed else 0) and threads != {threading.get_ident()}) == (num_prompt == 1000)
