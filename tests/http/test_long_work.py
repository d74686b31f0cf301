"""T14: what goes through a long text or through many ids leaves the event loop, in every route that takes such."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from http_support import SayingEngine, chat_body, serving, text_body

from sayfa.server.context import INLINE_SIZE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = "a b " * 1250
IDS = [5] * 5000
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt": (TEXT, text_body(prompt=LONG, max_tokens=1)),
    "prompts": (TEXT, text_body(prompt=[LONG[:3000], LONG[:3000]], max_tokens=1)),
    "an echo": (TEXT, text_body(prompt=IDS, max_tokens=1, echo=True)),
    "scores of an echo": (TEXT, text_body(prompt=IDS[:900], max_tokens=1, echo=True, logprobs=0)),
    "scores of a prompt": (TEXT, text_body(prompt=IDS[:900], max_tokens=1, prompt_logprobs=1)),
    "scores in a chat": (CHAT, chat_body(max_tokens=40, logprobs=True, top_logprobs=20, ignore_eos=True)),
    "scores of a chat's prompt": (CHAT, chat_body(messages=[{"role": "user", "content": "b" * 900}], max_tokens=1,
                                                  prompt_logprobs=1)),
    "messages": (CHAT, chat_body(messages=[{"role": "user", "content": LONG}], max_tokens=1)),
    "a text to tokenize": ("/tokenize", {"prompt": LONG}),
    "spellings of tokens": ("/tokenize", {"prompt": "x" * 4090 + "y" * 20, "return_token_strs": True}),
    "messages to tokenize": ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    "ids to read": ("/detokenize", {"tokens": IDS}),
}  # fmt: skip


async def sizes_of(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Serve a request; of each piece of text work its size, and whether it was done in another thread."""
    done: list[tuple[int, bool]] = []
    async with serving(SayingEngine(max_model_len=8000)) as (client, app):
        text_work = app.state.context.text_work

        async def noted(size: int, work: Callable[[], Any]) -> Any:
            threads: list[int] = []

            def watched() -> Any:
                threads.append(threading.get_ident())
                return work()

            result = await text_work(size, watched)
            done.append((size, threads != [threading.get_ident()]))
            return result

        monkeypatch.setattr(app.state.context, "text_work", noted)
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
    return done


@pytest.mark.parametrize("name", CASES)
async def test_t14_long_work_leaves_the_event_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done at once held every stream up: 65,000 ids to read for 70 ms, scores of 8,000 for a second."""
    done = await sizes_of(*CASES[name], monkeypatch)
    assert max(done) > (4096, False), done
    assert all(elsewhere == (size > 4096) for size, elsewhere in done), done


@pytest.mark.parametrize(("path", "body"), [(TEXT, text_body()), (CHAT, chat_body(logprobs=True, top_logprobs=2))])
async def test_short_work_is_done_at_once(path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hop to a thread would cost more than it spares."""
    done = await sizes_of(path, body, monkeypatch)
    assert done
    assert not any(elsewhere for _, elsewhere in done)


async def test_t14_much_work_in_small_pieces_gives_the_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 answers each has less than a thread is worth; together they held everybody up for seconds."""
    since_turn, most, ended = 0, 0, False
    async with serving(SayingEngine(max_model_len=8000)) as (client, app):
        text_work = app.state.context.text_work

        async def noted(size: int, work: Callable[[], Any]) -> Any:
            def counted() -> Any:
                nonlocal since_turn, most
                since_turn += size
                most = max(most, since_turn)
                return work()

            return await text_work(size, counted)

        async def take_turns() -> None:
            nonlocal since_turn
            while not ended:
                since_turn = 0
                await asyncio.sleep(0)

        monkeypatch.setattr(app.state.context, "text_work", noted)
        others = asyncio.create_task(take_turns())
        body = text_body(prompt=[IDS[:400]] * 4, n=8, max_tokens=1, echo=True, logprobs=0)
        response = await client.post(TEXT, json=body)
        ended = True
        await others
    assert response.status_code == 200, response.text
    assert most <= 2 * INLINE_SIZE
