"""A random mix of everything that the server can be asked, from a seed: what the soak sends.

One connection for each sender, used again as long as it lasts. Of the requests a tenth is abandoned at a random moment
and a twentieth is wrong on purpose.
"""

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

ABANDONED = 0.10
WRONG = 0.05
PATIENCE_S = 60.0
"""An answer that takes longer is counted as a failure: no request of the mix has much to say."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PREFIX = "A long beginning that many requests share, so that pages are found again. " * 2


class Counts:
    """What came out: outcomes, statuses, and the times of first and last part in seconds with the moment of each."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.times: list[tuple[float, float, float]] = []
        self.surprises: list[str] = []

    @property
    def total(self) -> int:
        return sum(self.outcomes.values())


class Sender:
    """Sends requests one after another until told to stop."""

    def __init__(self, port: int, model: str, seed: int, counts: Counts) -> None:
        self._port = port
        self._model = model
        self._rng = random.Random(seed)
        self._counts = counts
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, until_s: float) -> None:
        """Send until the monotonic clock says `until_s`."""
        while time.monotonic() < until_s:
            method, path, body, wanted = self._request()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._one(method, path, body, wanted)
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
                self._counts.outcomes["failed"] += 1
                self._surprise(f"{type(error).__name__} at {method} {path} {body!r:.300}")
                await self._hang_up()
        await self._hang_up()

    # ---------------------------------------------------------------------------------------- one request

    async def _one(self, method: str, path: str, body: bytes | None, wanted: int) -> None:
        rng = self._rng
        if self._streams is None or rng.random() < 0.02:
            await self._hang_up()
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        data = head.encode() + b"\r\n" + (body or b"")
        begun_s = time.monotonic()
        if wanted == 200 and path in (CHAT, TEXT) and rng.random() < ABANDONED:
            await self._abandon(data, reader, writer)
            return
        writer.write(data)
        status, first_s = await self._read_answer(reader)
        ended_s = time.monotonic()
        self._counts.statuses[status] += 1
        if status == wanted:
            self._counts.outcomes["served" if status == 200 else "refused"] += 1
        elif status == 503:
            self._counts.outcomes["overloaded"] += 1
        else:
            self._counts.outcomes["failed"] += 1
            self._surprise(f"{status} in place of {wanted}: {path} {body!r:.300}")
        if status == 200 and path in (CHAT, TEXT):
            self._counts.times.append((begun_s, first_s - begun_s, ended_s - begun_s))

    async def _abandon(self, data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rng = self._rng
        writer.write(data[: rng.randrange(1, len(data))] if rng.random() < 0.3 else data)
        if rng.random() < 0.5:
            await asyncio.wait({asyncio.ensure_future(reader.read(rng.randint(1, 2000)))}, timeout=rng.random() * 0.05)
        if rng.random() < 0.5:
            writer.transport.abort()
        self._counts.outcomes["abandoned"] += 1
        await self._hang_up()

    async def _hang_up(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
            await asyncio.sleep(0)

    async def _read_answer(self, reader: asyncio.StreamReader) -> tuple[int, float]:
        """Read one answer; give its status and when its first part came."""
        head = await reader.readuntil(b"\r\n\r\n")
        first_s = time.monotonic()
        lines = head.decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int(await reader.readuntil(b"\r\n"), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        else:
            await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection") == "close":
            await self._hang_up()
        return int(lines[0].split()[1]), first_s

    def _surprise(self, text: str) -> None:
        if len(self._counts.surprises) < 20:
            self._counts.surprises.append(text)

    # ---------------------------------------------------------------------------------------- what is asked

    def _request(self) -> tuple[str, str, bytes | None, int]:
        """The next request: method, path, body, and the status that it should get."""
        rng = self._rng
        roll = rng.random()
        if roll < WRONG:
            return self._wrong()
        if roll < 0.10:
            return ("GET", rng.choice(("/health", "/metrics", "/v1/models", "/version", "/openapi.json")), None, 200)
        if roll < 0.14:
            return ("POST", "/tokenize", json.dumps({"prompt": self._text(), "return_token_strs": True}).encode(), 200)
        if roll < 0.17:
            ids = [rng.randrange(32, 127) for _ in range(rng.randint(1, 50))]
            return ("POST", "/detokenize", json.dumps({"tokens": ids}).encode(), 200)
        body = self._chat() if rng.random() < 0.5 else self._completion()
        return ("POST", CHAT if "messages" in body else TEXT, json.dumps(body).encode(), 200)

    def _text(self) -> str:
        rng = self._rng
        text = "".join(rng.choices("abc de fgh ijk\n.,ığüşöç 😀", k=rng.randint(1, 60)))
        return PREFIX + text if rng.random() < 0.3 else text

    def _chat(self) -> dict[str, Any]:
        rng = self._rng
        turns = rng.choice((1, 1, 2, 3))
        messages = [{"role": ("user", "assistant")[turn % 2], "content": self._text()[:60]} for turn in range(turns)]
        if rng.random() < 0.2:
            messages[0]["content"] = [{"type": "text", "text": self._text()[:50]}]  # type: ignore[assignment]
        body = {"messages": messages, **self._sampling()}
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
        return body

    def _completion(self) -> dict[str, Any]:
        rng = self._rng
        ids = [rng.randrange(32, 127) for _ in range(rng.randint(1, 80))]
        body: dict[str, Any] = {"prompt": rng.choice([self._text(), ids, [self._text(), "b"], [ids, ids[:3]]])}
        body |= self._sampling()
        if rng.random() < 0.3:
            body |= {"logprobs": rng.randint(0, 5)}
        if rng.random() < 0.1:
            body |= {"echo": True, "max_tokens": rng.choice((0, 5)), "n": 1}
            body = {name: value for name, value in body.items() if name not in ("stop", "min_tokens")}
        elif rng.random() < 0.1 and not body["stream"]:
            body |= {"best_of": body["n"] + 1}
        return body

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        stream = rng.random() < 0.6
        fields: dict[str, Any] = {
            "model": self._model, "max_tokens": rng.randint(1, 40), "n": rng.choice((1, 1, 1, 1, 2, 4)),
            "stream": stream, "temperature": rng.choice((0, 0, 0.7, 1.0, 1.5)),
        }  # fmt: skip
        wishes = {
            "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": rng.randrange(1 << 30), "presence_penalty": 0.5,
            "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {"70": 5, "71": -100},
            "ignore_eos": True, "stop": ["e", "\n\n"], "cache_salt": f"salt {rng.randrange(50)}",
            "priority": rng.randint(-5, 5), "deadline_s": 1000.0, "return_token_ids": True,
            "min_tokens": 1, "stop_token_ids": [80],
            "user": "soak", "unknown_field": 1,
        }  # fmt: skip
        fields |= {name: wishes[name] for name in wishes if rng.random() < 0.12}
        if stream and rng.random() < 0.5:
            fields |= {"stream_options": {"include_usage": True}}
        return fields

    def _wrong(self) -> tuple[str, str, bytes | None, int]:
        good = {"model": self._model, "prompt": "x", "max_tokens": 2}
        bodies = [
            b'{"model": ', b"[" * 200, b"\xff", json.dumps(good | {"temperature": -1}).encode(),
            json.dumps(good | {"n": 10**9}).encode(), json.dumps(good | {"prompt": [10**9]}).encode(),
            json.dumps(good | {"prompt": "long " * 5000}).encode(), json.dumps(good | {"max_tokens": 10**6}).encode(),
            json.dumps(good | {"guided_regex": "a+"}).encode(), json.dumps(good | {"stop": [""]}).encode(),
        ]  # fmt: skip
        if self._rng.random() < 0.2:
            return ("POST", TEXT, json.dumps(good | {"model": "nobody"}).encode(), 404)
        return ("POST", TEXT, self._rng.choice(bodies), 400)
