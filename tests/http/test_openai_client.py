"""The official client, as its users call it, against every endpoint, plain and streamed (F34).

Its models check every answer; on top, `strict_models` and the API description check the same answers in other tests.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from http_support import MODEL, SayingEngine, ids_of, serving
from openai import AsyncOpenAI

from sayfa.base.messages import EngineOutput, Request

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def official(engine: SayingEngine | None = None, key: str = "none", **options: Any) -> AsyncIterator[AsyncOpenAI]:
    """The client over the app without sockets."""
    async with serving(engine, **options) as (_, app):
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False))
        client = AsyncOpenAI(base_url="http://localhost/v1", api_key=key, http_client=http, max_retries=0)
        async with client:
            yield client


async def test_models() -> None:
    """List and retrieve."""
    async with official() as client:
        names = [model.id async for model in client.models.list()]
        assert names == [MODEL, "alias"]
        assert (await client.models.retrieve(MODEL)).owned_by == "sayfa"
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other/name")
        assert caught.value.code == "model_not_found"


async def test_chat_plain_with_everything() -> None:
    """All parameters that are served, n, logprobs, usage, and fields that OpenAI lacks through extra_body."""
    engine = SayingEngine()
    async with official(engine) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, max_completion_tokens=20, temperature=0.5, top_p=0.9, seed=7,
            presence_penalty=0.1, frequency_penalty=0.1, logit_bias={"5": 1}, stop=["zzz"], logprobs=True,
            top_logprobs=2, user="u", metadata={"a": "b"}, store=False,
            extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": False, "min_tokens": 1,
                        "priority": 3, "deadline_s": 30, "cache_salt": "s", "stop_token_ids": [9],
                        "skip_special_tokens": True, "include_stop_str_in_output": False},
        )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    request = engine.requests[0]
    params = request.params
    assert request.priority == 3
    assert request.deadline_s is not None
    assert 29.0 < request.deadline_s <= 30.0  # what reading the body took is off
    assert (params.n, params.max_tokens, params.top_k, params.min_p, params.seed) == (2, 20, 5, 0.1, 7)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.5, 0.9, 1.1)
    assert (params.logit_bias, params.stop, params.stop_token_ids, params.min_tokens) == ({5: 1.0}, ["zzz"], [9], 1)
    assert params.logprobs == 2


async def test_chat_streamed_through_the_clients_own_accumulator() -> None:
    """The client's stream helper joins deltas, log-probabilities and usage as ours mean them."""
    async with (
        official() as client,
        client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1, stream_options={"include_usage": True}
        ) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world"
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == 2
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content is not None
    assert [token.token for token in final.choices[0].logprobs.content] == ["Hello", " world"]


async def test_completions_plain_and_streamed() -> None:
    """Text, list, ids and list of ids as prompts; echo; logprobs; best_of."""
    async with official() as client:
        prompts: list[Any] = ["Say", ["Say", "So"], ids_of("Say"), [ids_of("Say"), ids_of("So")]]
        for prompt in prompts:
            plain = await client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=5)
            texts = ["SayHello world", "SoHello world"][: len(plain.choices)]
            assert [choice.text for choice in plain.choices] == texts
            streamed = ["", ""]
            async for chunk in await client.completions.create(model=MODEL, prompt=prompt, echo=True, stream=True):
                for choice in chunk.choices:
                    streamed[choice.index] += choice.text
            assert [text for text in streamed if text] == texts
        assert len((await client.completions.create(model=MODEL, prompt="a", best_of=3, n=2)).choices) == 2


async def test_errors_become_the_clients_own_exceptions() -> None:
    """Status, code and param arrive; the message is the one that we wrote."""
    async with official(key="k" * 20, api_key=["k" * 20]) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9000)
        assert bad.value.param == "temperature"
        assert bad.value.type == "invalid_request_error"
        assert bad.value.body["message"].startswith("`temperature` is 9000")  # type: ignore[index,call-overload]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.BadRequestError, match="structured output is not served yet"):
            await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}
            )


class DyingEngine(SayingEngine):
    """Dies when it should say the third token."""

    def _output(self, request: Request, branch: int, answer: list[int], step: int) -> EngineOutput:
        if step == 2:
            self.die()
        return super()._output(request, branch, answer, step)


async def test_a_failed_stream_is_an_exception_of_the_client() -> None:
    """An error event in a stream is raised as APIError, after the text that came before it."""
    got = []

    async def read(client: AsyncOpenAI) -> None:
        async for chunk in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
            got.append(chunk.choices[0].delta.content)

    async with official(DyingEngine(lambda request, branch: ids_of("Hello" * 20))) as client:
        with pytest.raises(openai.APIError, match="ended"):
            await read(client)
    assert got == ["", "Hello", "Hello"]
