"""Callers of the real application: a call is an ASGI scope, its sender reads, stalls and hangs up as it was told.

Also the oracle: what a call that is served must say, computed without engine, pages, wire or server.
"""

import asyncio
import json
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable
from typing import Any

from fakes.deciding import expected
from fakes.runner import Rule, mix_rule
from sayfa.base.messages import Request
from sayfa.base.sampling_params import SamplingParams
from world.history import END_TOKEN, NUM_TOKENS, Call

MODEL = "world"
KEYS = ["sk-world-one", "sk-world-two", "sk-world-three"]
_FIRST_LETTER = ord("A")
_MANY = 32
"""Messages more than which the server leaves a conversation to a thread."""
_WORDS = [
    b"a",
    b"b",
    b"c",
    b"d",
    b" ",
    b"\xc3",
    b"\xa9",
    "é".encode(),
    "😀".encode()[:2],
    "😀".encode()[2:],
    b"ab",
    b"da",
]


class Letters:
    """A vocabulary of few letters and parts of letters, so that stop strings and cut characters are frequent."""

    vocab_size = NUM_TOKENS
    eos_ids = frozenset({END_TOKEN})
    special_ids = frozenset({END_TOKEN})
    bos_id = None

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == END_TOKEN else _WORDS[token_id % len(_WORDS)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        data = b"".join(self.token_bytes(index) for index in ids if index not in self.special_ids)
        return _whole(data)


def _whole(data: bytes) -> str:
    """All characters that are complete; an unfinished one at the end is dropped, wrong bytes show as U+FFFD."""
    return getincrementaldecoder("utf-8")("replace").decode(data)


def make_rule() -> Rule:
    """Draws each token with about the same weight."""
    return mix_rule(NUM_TOKENS)


def prompts_of(call: Call) -> list[list[int]]:
    """All prompts of a call; each has n answers."""
    return [call.prompt, *call.more]


def body_of(call: Call) -> dict[str, Any]:
    """The JSON that the call sends."""
    body: dict[str, Any] = {
        "model": MODEL, "prompt": prompts_of(call) if call.more else call.prompt, "stream": call.stream,
        "n": call.n, "max_tokens": call.max_tokens,
        "seed": call.seed, "min_tokens": call.min_tokens, "ignore_eos": call.ignore_eos, "stop": call.stop,
        "stop_token_ids": call.stop_ids, "priority": call.priority, "cache_salt": call.salt,
        "deadline_s": call.deadline_s,
    }  # fmt: skip
    wrong: dict[str, Any] = {"temperature": -1.0, "model": "other", "prompt": [], "n": 100_000}
    if call.bad:
        body[call.bad] = wrong[call.bad]
    if call.chat:
        letters = "".join(chr(_FIRST_LETTER + token) for token in body.pop("prompt"))
        body["messages"] = [{"role": "user", "content": text} for text in (letters, *[""] * _MANY)] if letters else []
    return body


class Conversation:
    """Takes the place of a model's chat template and of its tokenizer: a letter is a token."""

    def __init__(self, messages: Iterable[dict[str, Any]] = ()) -> None:
        self.text = "".join(message["content"] for message in messages)

    def render(self, messages: Iterable[dict[str, Any]], opens: bool, goes_on: bool, *, options: Any) -> "Conversation":
        return Conversation(messages)

    def encode(self, tokenizer: Any) -> list[int]:
        return [ord(letter) - _FIRST_LETTER for letter in self.text]


class Answer:
    """What one call was told.

    status: None if nothing came. texts, reasons: by choice. code: of the error, in a body or an event. left: the
    sender hung up before the end. started_s, first_s (something came), ended_s: on
    the world's clock.
    """

    def __init__(self, call: Call, started_s: float) -> None:
        self.call = call
        self.started_s = started_s
        self.ended_s = started_s
        self.first_s: float | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""
        self.closed = False
        self.left = False
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.code: str | None = None
        self.message = ""

    @property
    def served(self) -> bool:
        return self.status == 200 and self.code is None and not self.left

    def understand(self) -> None:
        """Read the body. AssertionError if it breaks the contract."""
        if self.status == 200 and self.call.stream:
            self._read_events()
        elif self.status == 200:
            for choice in json.loads(self.body)["choices"] if self.closed else []:
                self._note(choice["index"], _text_of(choice), choice["finish_reason"])
        elif self.closed and self.status != 499:
            self._note_error(json.loads(self.body)["error"])

    def _read_events(self) -> None:
        events = [event for event in self.body.decode().split("\n\n") if event and not event.startswith(":")]
        if self.closed:
            assert events[-1:] == ["data: [DONE]"], f"a stream ended without its mark: {events[-1:]}"
        for event in events:
            if event == "data: [DONE]":
                continue
            chunk = json.loads(event.removeprefix("data: "))
            assert self.code is None, "something came after an error"
            if "error" in chunk:
                self._note_error(chunk["error"])
            for choice in chunk.get("choices", ()):
                self._note(choice["index"], _text_of(choice), choice["finish_reason"])

    def _note(self, index: int, text: str, reason: str | None) -> None:
        assert index not in self.reasons, f"choice {index} was told something after its end"
        self.texts[index] = self.texts.get(index, "") + text
        if reason is not None:
            self.reasons[index] = reason

    def _note_error(self, error: dict[str, Any]) -> None:
        self.code, self.message = error["code"] or error["type"], error["message"]


def _text_of(choice: dict[str, Any]) -> str:
    """The text in a choice of any of the four kinds of answer."""
    if "text" in choice:
        return str(choice["text"])
    return choice.get("delta", choice.get("message", {})).get("content") or ""


class Caller:
    """Sends one call and reads its answer. place: what of it happens now, as far as the caller knows."""

    def __init__(self, app: Any, answer: Answer, on_leave: Callable[["Caller"], None], thread_s: float) -> None:
        """on_leave: called when the sender hangs up. thread_s: how long text work takes."""
        self.place = "connecting"
        self._thread_s = thread_s
        self.answer = answer
        self._on_leave = on_leave
        self._app = app
        self._call = answer.call
        self._gone = asyncio.Event()
        self._body_read = False
        self._num_events = 0

    async def run(self) -> None:
        """The whole call; the answer is complete afterwards."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._call.leaves_s, self.leave) if self._call.leaves_s is not None else None
        if self._call.leaves_s == 0:
            self.leave()
        try:
            await self._app(self._scope(), self._receive, self._send)
        finally:
            if timer is not None:
                timer.cancel()
            self.answer.ended_s = loop.time()
            self.answer.left = self._gone.is_set() and not self.answer.closed

    def _scope(self) -> dict[str, Any]:
        tenant = self._call.tenant
        key = KEYS[tenant] if tenant >= 0 else "sk-nobody-of-ours"
        path = "/v1/chat/completions" if self._call.chat else "/v1/completions"
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [*headers, (b"authorization", f"Bearer {key}".encode())], "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip

    def leave(self) -> None:
        """Hang up."""
        if not self._gone.is_set():
            self._gone.set()
            self._on_leave(self)

    async def _receive(self) -> dict[str, Any]:
        if not self._body_read:
            self._enter("arriving", self._call.body_s)
            if self._call.body_s:
                try:
                    async with asyncio.timeout(self._call.body_s):
                        await self._gone.wait()
                except TimeoutError:
                    pass
            if not self._gone.is_set():
                self._body_read = True
                self._enter("tokenizing", self._thread_s)
                self.place = ""
                data = json.dumps(body_of(self._call)).encode()
                return {"type": "http.request", "body": data, "more_body": False}
        if not self.answer.closed:
            await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            return
        answer = self.answer
        if message["type"] == "http.response.start":
            assert answer.status is None, "two answers to one call"
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        assert answer.status is not None
        assert not answer.closed, "something came after the end"
        answer.first_s = answer.first_s or asyncio.get_running_loop().time()
        answer.body += message.get("body", b"")
        answer.closed = not message.get("more_body", False)
        if answer.closed:
            self._gone.set()
            return
        await self._take_time()

    async def _take_time(self) -> None:
        """Read an event, or not, or hang up."""
        call = self._call
        self._num_events += 1
        self.place = ""
        if self._reads_slowly():
            self._enter("paused", call.read_s or 1.0)
        if call.leaves_after is not None and self._num_events >= call.leaves_after:
            self.leave()
        elif call.stops_after is not None and self._num_events > call.stops_after:
            await self._gone.wait()
        elif call.read_s:
            try:
                async with asyncio.timeout(call.read_s):
                    await self._gone.wait()
            except TimeoutError:
                pass

    def _enter(self, place: str, lasts_s: float) -> None:
        """Be somewhere for so long; leave in the midst of it, if that is what the sender does."""
        self.place = place
        if self._call.leaves_in == place:
            asyncio.get_running_loop().call_later(lasts_s / 2, self.leave)

    def _reads_slowly(self) -> bool:
        call = self._call
        return bool(call.read_s) or (call.stops_after is not None and self._num_events > call.stops_after)


def oracle(call: Call, choice: int, rule: Rule, max_model_len: int) -> tuple[list[int], str, str]:
    """Return (tokens, text, finish reason) of one answer to a call."""
    params = SamplingParams(
        n=call.n, max_tokens=call.max_tokens, min_tokens=call.min_tokens, ignore_eos=call.ignore_eos, seed=call.seed,
        stop_token_ids=call.stop_ids, eos_token_ids=[END_TOKEN],
    )  # fmt: skip
    number, branch = divmod(choice, call.n)
    request = Request(id="oracle", prompt=prompts_of(call)[number], params=params)
    tokens, reason, _ = expected(request, branch, rule, max_model_len)
    letters = Letters()
    free = len(letters.decode(tokens[: call.min_tokens]))  # no stop string is looked for in it
    for count in range(1, len(tokens) + 1):
        text = letters.decode(tokens[:count])
        starts = {stop: start for stop in call.stop if (start := text.find(stop, free)) >= 0}
        if starts:
            first = min(starts, key=lambda stop: starts[stop] + len(stop))
            return tokens[:count], text[: starts[first]], "stop"
    return tokens, letters.decode(tokens), reason
