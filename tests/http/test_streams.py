"""Laws of streams: one shape, one end, and the same text, counts and values as the plain answer.

B001, B005, B006, B007, B017, R17.
"""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from http_models import (
    Chat,
    Chunk,
    EmptyDelta,
    RoleDelta,
    Text,
    TextChunk,
    TextDelta,
    TextUsageChunk,
    UsageChunk,
    check,
)
from http_support import SayingEngine, chat_body, ids_of, joined, serving, stream, text_body, tokenizer

from sayfa.base.messages import EngineOutput, Request

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HARD_TEXTS = (
    "Hello world and the END",
    "family 👨‍👩‍👧‍👦 flag 🇹🇷 accents e\u0301 a\u0308 中文字 한국어",
    "İstanbul'da çok güzel ığüşöç",
    "العربية 'עברית' mixed",
    "  leading and trailing  \n\n",
)


async def test_b001_each_chunk_has_every_field_and_the_stream_is_one_answer() -> None:
    """B001: each chat chunk fits a model whose fields are all required; id, created and model never change."""
    async with serving() as (client, _):
        chunks = await stream(client, CHAT, chat_body(max_tokens=8))
        for chunk in chunks:
            check(chunk, Chunk)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        check(deltas[0], RoleDelta)
        check(deltas[-1], EmptyDelta)
        for delta in deltas[1:-1]:
            check(delta, TextDelta)
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons[-1] == "stop"
        assert reasons[:-1] == [None] * (len(reasons) - 1)


async def test_b001_completion_chunks_too() -> None:
    """The same for raw completions, with and without usage."""
    async with serving() as (client, _):
        for chunk in await stream(client, TEXT, text_body()):
            check(chunk, TextChunk)
        with_usage = await stream(client, TEXT, text_body(stream_options={"include_usage": True}))
        check(with_usage[-1], TextUsageChunk)
        for chunk in with_usage[:-1]:
            check(chunk, TextChunk)


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("merge", [1, 3])
async def test_b005_streamed_text_equals_plain_text_whatever_is_split(text: str, merge: int) -> None:
    """B005: every byte is a token of its own; each delta is whole characters, the deltas joined are the plain text."""
    engine = SayingEngine(lambda request, branch: ids_of(text, byte_by_byte=True))
    engine.merge = merge
    async with serving(engine) as (client, _):
        plain = check((await client.post(CHAT, json=chat_body())).json(), Chat)
        chunks = await stream(client, CHAT, chat_body())
    assert plain.choices[0].message.content == text
    assert joined(chunks) == text
    assert "\ufffd" not in joined(chunks)


async def test_b005_an_unfinished_character_at_the_end_is_dropped_in_both_modes() -> None:
    """When max_tokens ends inside a character, its bytes are dropped, streamed or not."""
    text = "ab👨"
    for limit in range(1, 7):
        engine = SayingEngine(lambda request, branch: ids_of(text, byte_by_byte=True))
        async with serving(engine) as (client, _):
            plain = (await client.post(CHAT, json=chat_body(max_tokens=limit))).json()
            chunks = await stream(client, CHAT, chat_body(max_tokens=limit))
        whole = text.encode()[:limit].decode(errors="ignore")
        assert plain["choices"][0]["message"]["content"] == whole == joined(chunks)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("merge", [1, 2, 5])
async def test_b006_the_chunk_with_the_reason_carries_no_text(path: str, merge: int) -> None:
    """B006: a client that stops reading at finish_reason loses nothing, however outputs were merged."""
    engine = SayingEngine("Hello world and the END")
    engine.merge = merge
    async with serving(engine) as (client, _):
        for seed in range(10):
            body = chat_body(max_tokens=5, seed=seed) if path == CHAT else text_body(max_tokens=5, seed=seed)
            last = [c for c in await stream(client, path, body) if c["choices"][0]["finish_reason"] is not None]
            assert len(last) == 1
            choice = last[0]["choices"][0]
            assert (choice["delta"] == {}) if path == CHAT else (choice["text"] == "")


ENDINGS: list[dict[str, Any]] = [
    {"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 17, "ignore_eos": True},
    {"max_tokens": 64, "ignore_eos": True}, {},
    {"stop": ["END"]}, {"stop": ["wor", "x"]}, {"stop": "the", "include_stop_str_in_output": True}, {"n": 3},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("ending", ENDINGS, ids=str)
@pytest.mark.parametrize("merge", [1, 4])
async def test_b007_streamed_usage_text_and_reason_equal_the_plain_ones(
    path: str, ending: dict[str, Any], merge: int
) -> None:
    """B007: the same three numbers, text and reason in both modes, in every ending; the usage chunk is the last."""
    engine = SayingEngine("Hello world and the END of it")
    engine.merge = merge
    body = chat_body(**ending) if path == CHAT else text_body(**{"max_tokens": 64, **ending})
    async with serving(engine) as (client, _):
        plain = (await client.post(path, json=body)).json()
        chunks = await stream(client, path, {**body, "stream_options": {"include_usage": True}})
    check(plain, Chat if path == CHAT else Text)
    usage = chunks[-1]["usage"]
    assert chunks[-1]["choices"] == []
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks[:-1])
    assert usage == plain["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for choice in plain["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert joined(chunks, choice["index"], path == CHAT) == text
        reasons = [
            c["finish_reason"]
            for chunk in chunks
            for c in chunk["choices"]
            if c["index"] == choice["index"] and c["finish_reason"] is not None
        ]
        assert reasons == [choice["finish_reason"]]


async def test_continuous_usage_grows_to_the_last_one() -> None:
    """With continuous_usage_stats each chunk has counts that never fall and end at the final ones."""
    async with serving() as (client, _):
        chunks = await stream(client, CHAT, chat_body(stream_options={"continuous_usage_stats": True}))
    for chunk in chunks:
        check(chunk, UsageChunk)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 2


@pytest.mark.parametrize("seed", range(12))
async def test_b017_nothing_of_a_stop_string_leaks_and_near_misses_are_released(seed: int) -> None:
    """B017, R17: for random texts, cuts and stop strings, stream = plain = the text up to the first match."""
    rng = random.Random(seed)
    text = "".join(rng.choice(["EN", "END.", "D", ".", " x", "E", "ş", "👍"]) for _ in range(20))
    stop = [rng.choice(["END.", "D.E", ".. x", "ş👍", "ENDX"]) for _ in range(2)]
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    cuts = [text.find(s) for s in stop if s in text and text.find(s) + len(s) == min(ends)]
    expected = text[: min(cuts)] if cuts else text
    engine = SayingEngine(lambda request, branch: ids_of(text, byte_by_byte=bool(seed % 2)))
    engine.merge = rng.choice([1, 2, 7])
    async with serving(engine) as (client, _):
        body = chat_body(stop=stop, max_tokens=200)
        plain = (await client.post(CHAT, json=body)).json()["choices"][0]
        chunks = await stream(client, CHAT, body)
    assert plain["message"]["content"] == expected == joined(chunks)
    assert plain["finish_reason"] == "stop"


async def test_a_stop_string_aborts_the_engine_in_one_step() -> None:
    """The engine is told to stop when the text side has found a stop string."""
    engine = SayingEngine(lambda request, branch: ids_of("Hello world" * 50))
    async with serving(engine) as (client, _):
        answer = (await client.post(CHAT, json=chat_body(stop=["world"], max_tokens=100))).json()
    assert answer["choices"][0]["message"]["content"] == "Hello "
    assert len(engine.aborted) == 1


async def test_branches_of_one_prompt_and_several_prompts_keep_their_places() -> None:
    """Choice i·n + k is branch k of prompt i, streamed or not; usage counts each prompt once."""
    engine = SayingEngine(lambda request, branch: ids_of(f"{len(request.prompt)}:{branch}"))
    async with serving(engine) as (client, _):
        body = text_body(prompt=["a", "bb", "ccc"], n=2)
        plain = (await client.post(TEXT, json=body)).json()
        chunks = await stream(client, TEXT, body)
    texts = [choice["text"] for choice in plain["choices"]]
    assert texts == ["1:0", "1:1", "2:0", "2:1", "3:0", "3:1"]
    assert [joined(chunks, index, chat=False) for index in range(6)] == texts
    assert plain["usage"]["prompt_tokens"] == 6


async def test_best_of_keeps_the_likeliest() -> None:
    """best_of: of the answers computed, the n with the highest mean log-probability are shown; all are counted."""
    engine = SayingEngine(lambda request, branch: [40 - branch] * 3)
    async with serving(engine) as (client, _):
        answer = (await client.post(TEXT, json=text_body(best_of=4, n=2, max_tokens=3))).json()
    tools = tokenizer()
    # The fake engine scores a token by its id: the lower, the likelier.
    assert [choice["text"] for choice in answer["choices"]] == [tools.decode([37] * 3), tools.decode([38] * 3)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 12


class FailingEngine(SayingEngine):
    """Fails each request at its second output."""

    def _output(self, request: Request, branch: int, answer: list[int], step: int) -> EngineOutput:
        output = super()._output(request, branch, answer, step)
        if step == 1:
            return msgspec.structs.replace(output, finish="error", error="/secret 0x1f", error_code="numerical_error")
        return output


async def test_an_error_after_the_start_is_one_event_and_the_end_mark() -> None:
    """An engine error inside a stream: one `data: {"error": …}`, then [DONE]; its text is ours, not the engine's."""
    async with serving(FailingEngine()) as (client, _):
        chunks = await stream(client, CHAT, chat_body())
        plain = await client.post(CHAT, json=chat_body())
    assert "error" in chunks[-1]
    assert chunks[-1]["error"]["code"] == "numerical_error"
    assert sum("error" in chunk for chunk in chunks) == 1
    assert plain.status_code == 500
    assert "/secret" not in plain.text
    assert "0x1f" not in plain.text


class EndingEngine(SayingEngine):
    """Ends each request at its second output because a drain's time is up."""

    def _output(self, request: Request, branch: int, answer: list[int], step: int) -> EngineOutput:
        output = super()._output(request, branch, answer, step)
        if step == 1:
            return msgspec.structs.replace(output, finish="error", error="the time is up", error_code="shutdown")
        return output


async def test_an_answer_that_a_drain_cuts_off_may_go_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """It is no failure of the engine: 503 with Retry-After, and no traceback in the log."""
    async with serving(EndingEngine()) as (client, _):
        chunks = await stream(client, CHAT, chat_body())
        plain = await client.post(CHAT, json=chat_body())
    assert chunks[-1]["error"]["code"] == "draining"
    assert (plain.status_code, plain.json()["error"]["code"]) == (503, "draining")
    assert int(plain.headers["retry-after"]) >= 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


class LateEngine(SayingEngine):
    """Lets the deadline of each request pass after its second token."""

    def _output(self, request: Request, branch: int, answer: list[int], step: int) -> EngineOutput:
        output = super()._output(request, branch, answer, step)
        return msgspec.structs.replace(output, finish="deadline") if step == 1 else output


async def test_a_deadline_that_passes_is_408_or_an_error_event() -> None:
    """`deadline_s`: an answer that is late is worthless, and is not given as if it were complete."""
    engine = LateEngine()
    async with serving(engine, default_deadline=9.0) as (client, _):
        plain = await client.post(CHAT, json=chat_body(deadline_s=2.5))
        chunks = await stream(client, CHAT, chat_body())
    assert plain.status_code == 408
    assert plain.json()["error"]["param"] == "deadline_s"
    assert chunks[-1]["error"]["code"] == "deadline_exceeded"
    left_s = [request.deadline_s or 0.0 for request in engine.requests]
    assert 1.5 < left_s[0] <= 2.5  # what reading the body took is off
    assert 8.0 < left_s[1] <= 9.0


async def test_the_death_of_the_engine_ends_streams_with_one_error() -> None:
    """Engine dead: a running stream ends with one error event, a plain request with 503 and Retry-After."""
    engine = SayingEngine(lambda request, branch: ids_of("Hello" * 50))
    async with serving(engine) as (client, _):
        engine.hold.clear()
        streaming = asyncio.create_task(stream(client, CHAT, chat_body(max_tokens=50)))
        plain = asyncio.create_task(client.post(CHAT, json=chat_body(max_tokens=50)))
        while len(engine.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(1.2)  # the stream's status line goes out after a second of silence
        engine.die()
        chunks, answer = await streaming, await plain
    assert [list(chunk) for chunk in chunks] == [["error"]]
    assert chunks[0]["error"]["code"] == "engine_dead"
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("min_tokens", [0, 1, 6, 9])
async def test_a_stop_string_waits_for_the_least_number_of_tokens(min_tokens: int) -> None:
    """As end tokens do; it is looked for in the text of the tokens behind."""
    text = "a b c d e f g"
    engine = SayingEngine(lambda request, branch: ids_of(text, byte_by_byte=True))
    async with serving(engine) as (client, _):
        body = text_body(stop=[" "], min_tokens=min_tokens, max_tokens=13)
        plain = check((await client.post(TEXT, json=body)).json(), Text)
        chunks = await stream(client, TEXT, body)
    wanted = text[: text.index(" ", min_tokens)]
    assert plain.choices[0].text == joined(chunks, chat=False) == wanted
    assert plain.choices[0].finish_reason == "stop"
