"""Help for the server's tests: a fake engine that says fixed texts, a tiny tokenizer, an app with a client for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx2
import msgspec
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from fakes.client import FakeEngineClient
from sayfa.base.config import ServerOptions
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.step import TokenLogprobs
from sayfa.server.app import create_app
from sayfa.server.context import TextTools
from sayfa.text.chat_template import load_chat_template
from sayfa.text.tokenizer import Tokenizer, load_tokenizer

MODEL = "tiny"
CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("Hello", " world", " and", "END", " the", "ing")


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer: every byte is a token, and a few words are; control tokens as ChatML has them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        spelled = word.replace(" ", "Ġ")
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocabulary:
                vocabulary[spelled[:end]] = len(vocabulary)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    folder = Path(mkdtemp(prefix="sayfa-tiny-"))
    backend.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "add_bos_token": False, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **facts}))
    return load_tokenizer(folder)


def text_tools() -> TextTools:
    """Tokenizer and template of the tiny model."""
    tools = tokenizer()
    return TextTools(tools, load_chat_template(tools))


def ids_of(text: str, byte_by_byte: bool = False) -> list[int]:
    """Token ids of a text; byte by byte, each byte is a token of its own."""
    if not byte_by_byte:
        return tokenizer().encode(text, False)
    return [token for byte in text.encode() for token in _byte_id(byte)]


@lru_cache(maxsize=256)
def _byte_id(byte: int) -> tuple[int, ...]:
    tools = tokenizer()
    return tuple(index for index in range(256) if tools.token_bytes(index) == bytes([byte]))


class SayingEngine(FakeEngineClient):
    """Emits the ids that `says(request, branch)` gives, then the end token; obeys max_tokens and the context; scores
    each token.

    The log-probability of token t at position p is -(t + p) / 1000, so that tests can tell values apart; alternatives
    follow it. merge: how many tokens an output holds.
    """

    def __init__(self, says: "Callable[[Request, int], list[int]] | str" = "Hello world", **info: Any) -> None:
        answer = ids_of(says) if isinstance(says, str) else None
        self.says = (lambda request, branch: list(answer)) if answer is not None else says  # type: ignore[arg-type,return-value]
        self.merge = 1
        vocab = tokenizer().vocab_size
        super().__init__(self._play_back, **{"vocab_size": vocab, "max_model_len": CONTEXT, **info})

    def _play_back(self, request: Request, branch: int) -> list[int]:
        room = (self.info.max_model_len if self.info else CONTEXT) - len(request.prompt)
        limit = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        answer = self.says(request, branch)
        if request.params.ignore_eos:
            answer = (answer * (1 + limit // max(1, len(answer))))[:limit]
        else:
            answer = [*answer, request.params.eos_token_ids[-1]]
        return answer[:limit]

    async def _play(self, request: Request) -> None:
        refused = self.refuse_with(request)
        if refused is not None:
            self._streams.refuse(refused)
            return
        answers = [self._script(request, branch) for branch in range(request.params.n)]
        longest = max(1, *map(len, answers))
        for start in range(0, longest, self.merge):
            await self.hold.wait()
            await asyncio.sleep(0)
            outputs: list[EngineOutput] = []
            for branch, answer in enumerate(answers):
                steps = range(start, min(start + self.merge, max(1, len(answer))))
                if steps:
                    outputs.append(merged([self._output(request, branch, answer, step) for step in steps]))
            self._deliver(outputs)
        self._tasks.pop(request.id, None)

    def _output(self, request: Request, branch: int, answer: list[int], step: int) -> EngineOutput:
        output = super()._output(request, branch, answer, step)
        params = request.params
        changes: dict[str, Any] = {}
        if params.logprobs is not None and output.tokens:
            position = len(request.prompt) + step
            changes["logprobs"] = [score(token, position, params.logprobs) for token in output.tokens]
        if params.prompt_logprobs is not None and step == 0 and branch == 0:
            prompt = enumerate(request.prompt[1:], start=1)
            changes["prompt_logprobs"] = [score(token, at, params.prompt_logprobs) for at, token in prompt]
        if output.finish is not None:
            changes |= {"num_prompt": len(request.prompt), "num_cached": 3}
        return msgspec.structs.replace(output, **changes) if changes else output


def merged(outputs: list[EngineOutput]) -> EngineOutput:
    """Several outputs of one branch as one, as an engine that drafts would send them."""
    return msgspec.structs.replace(
        outputs[-1],
        tokens=[token for output in outputs for token in output.tokens],
        logprobs=[value for output in outputs for value in output.logprobs],
        prompt_logprobs=[value for output in outputs for value in output.prompt_logprobs],
    )


def score(token: int, position: int, num_top: int) -> TokenLogprobs:
    """Made-up values: the chosen token first, then its neighbours."""
    best = -(token + position) / 1000
    size = tokenizer().vocab_size
    ids = [(token + i) % size for i in range(num_top)]
    return TokenLogprobs(best, 1, ids, [best - i for i in range(num_top)])


@asynccontextmanager
async def serving(
    engine: FakeEngineClient | None = None, **options: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, FastAPI]]:
    """The app without sockets, and an HTTP client for it."""
    app = create_app(engine or SayingEngine(), text_tools(), ServerOptions(**options), [MODEL, "alias"], "0.0")
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
            yield client, app


def chat_body(**fields: Any) -> dict[str, Any]:
    """A small chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}


def text_body(**fields: Any) -> dict[str, Any]:
    """A small completion request."""
    return {"model": MODEL, "prompt": "Say", **fields}


def events(body: bytes | str) -> list[dict[str, Any]]:
    """The JSON of all events of a finished stream; checks the frame and the end mark."""
    text = body.decode() if isinstance(body, bytes) else body
    assert text.endswith("data: [DONE]\n\n"), text[-200:]
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def stream(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events(response.content)


def joined(chunks: list[dict[str, Any]], index: int = 0, chat: bool = True) -> str:
    """The text of one choice, from its events."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join((choice["delta"].get("content") or "") if chat else choice["text"] for choice in choices)


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Let the loop run until a condition holds; fail the test if it never does."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
