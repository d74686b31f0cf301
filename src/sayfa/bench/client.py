"""A light streaming client for completions: it measures, and must not weigh on what it measures.

Called by `bench.load`. Written on bare asyncio streams since client and server share the machine: a general HTTP client
costs several times more per chunk, and would be measured in place of the server. Speaks HTTP/1.1 with one connection
for each request, plain or TLS or over a Unix socket; knows no workload.
"""

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from sayfa.base.errors import ConfigError, EngineError

_MAX_LINE = 1 << 22


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request gave. Times in seconds, `begun_s` and `ended_s` on the client's monotonic clock.

    gaps_s: between two arrivals of tokens. counted: "usage" if the server told the counts, else "chunks".
    """

    begun_s: float
    ended_s: float
    ttft_s: float
    gaps_s: list[float]
    num_prompt: int | None
    num_cached: int | None
    num_output: int
    counted: str
    finish: str | None

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.ended_s - self.begun_s

    @property
    def per_token_s(self) -> float:
        """Mean time per token after the first."""
        return (self.e2e_s - self.ttft_s) / max(1, self.num_output - 1)


class Place(NamedTuple):
    """Where a server listens: host and port, or the path of a Unix socket; `base` is the path before /v1."""

    host: str
    port: int
    tls: bool
    base: str
    uds: str | None

    @property
    def authority(self) -> str:
        """As addresses and the field Host have it: an IPv6 address stands in brackets, or its end would be the port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """The address before /v1; behind a Unix socket any host will do."""
        return "http://localhost" if self.uds else f"http{'s' if self.tls else ''}://{self.authority}{self.base}"


def parse_url(url: str) -> Place:
    """Take an address apart. Raises ConfigError, which shows no password."""
    if url.startswith("http+unix://"):
        return Place("localhost", 0, False, "", unquote(url.removeprefix("http+unix://")))
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError("--url has a user, a query or a fragment, which are not sent; a key goes with --api-key")
        port = parts.port
        (parts.hostname or "").encode("idna")  # as the connection does later
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url} is no http or https address")
    tls = parts.scheme == "https"
    return Place(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"), None)


def told(status: int, body: bytes) -> str:
    """What a server said in the place of an answer, and the way out where there is one."""
    try:
        sentence = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        sentence = body[:300].decode("utf-8", "replace").strip()
    way_out = "; give the server's key with --api-key or SAYFA_API_KEY" if status == 401 else ""
    return f"HTTP {status}{sentence and ': '}{sentence.rstrip('.')}{way_out}"


def first_model_in(url: str, status: int, body: bytes) -> str:
    """The first model that a server's answer to GET /v1/models names. Raises EngineError if it names none."""
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise EngineError(f"--url {url} names no model ({told(status, body)})") from None


def why_unreachable(error: Exception) -> str:
    """Why there is no connection, and the way out where there is one."""
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        text += "; the variable SSL_CERT_FILE names a file of certificates to trust"
    return text


class CompletionClient:
    """Sends requests to one server. `model`: as the server knows it; see `first_model`."""

    def __init__(self, url: str, api_key: str | None = None, model: str = "") -> None:
        self.place = parse_url(url)
        self.url = url
        self.model = model
        self._key = api_key
        self._tls = ssl.create_default_context() if self.place.tls else None

    async def first_model(self) -> str:
        """The first model that the server names. Raises EngineError if it names none, OSError."""
        async with self._exchange("GET", "/v1/models", b"") as (status, lines):
            body = b"".join([line async for line in lines])
        return first_model_in(self.url, status, body)

    async def complete(self, prompt: str, num_output: int, extra: dict[str, Any] | None = None) -> Answer:
        """Stream one greedy completion of exactly `num_output` tokens. Raises EngineError, OSError."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": num_output, "min_tokens": num_output,
            "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            **(extra or {}),
        }  # fmt: skip
        begun_s = time.perf_counter()
        reader = _StreamReader(begun_s)
        async with self._exchange("POST", "/v1/completions", msgspec.json.encode(body)) as (status, lines):
            if status != 200:
                answer = b"".join([line async for line in lines])
                raise EngineError(f"POST /v1/completions of {self.url}: {told(status, answer)}", code="http_error")
            async for line in lines:
                reader.line(line)
        return reader.answer()

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Status and lines of an answer, while its connection is open. Raises EngineError for what is no HTTP/1.1."""
        try:
            reader, writer = await self._connect()
            try:
                writer.write(self._head(method, path, len(body)) + body)
                await writer.drain()
                status, chunked = await self._answer_begins(reader)
                yield status, _lines(_pieces(reader, chunked))
            finally:
                writer.close()
        except asyncio.IncompleteReadError:
            raise _cut() from None
        except ValueError as error:  # a chunk's size that is no number, a line without an end
            raise EngineError(f"{self.url} answers in no HTTP/1.1 that can be read: {error}", code="no_http") from None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place = self.place
        if place.uds:
            return await asyncio.open_unix_connection(place.uds, limit=_MAX_LINE)
        return await asyncio.open_connection(place.host, place.port, ssl=self._tls, limit=_MAX_LINE)

    def _head(self, method: str, path: str, num_bytes: int) -> bytes:
        place = self.place
        head = [
            f"{method} {place.base}{path} HTTP/1.1", f"Host: {place.authority}", "Connection: close",
            "Content-Type: application/json", f"Content-Length: {num_bytes}", "Accept: */*",
        ]  # fmt: skip
        if self._key:
            head.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join(head).encode() + b"\r\n\r\n"

    async def _answer_begins(self, reader: asyncio.StreamReader) -> tuple[int, bool]:
        """Read up to the body; return the status, and whether the body comes in chunks."""
        words = (await reader.readline()).split(None, 2)
        if len(words) < 2 or not words[1].isdigit():
            raise EngineError(f"{self.url} closed the connection without an answer", code="no_answer")
        chunked = False
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.partition(b":")
            chunked |= name.lower() == b"transfer-encoding" and value.strip().lower() == b"chunked"
        return int(words[1]), chunked


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    while not chunked:
        piece = await reader.read(1 << 16)
        if not piece:
            return
        yield piece
    while line := await reader.readline():
        if (size := int(line.split(b";")[0].strip() or b"0", 16)) == 0:
            return
        yield await reader.readexactly(size)
        await reader.readline()
    raise _cut()


def _cut() -> EngineError:
    return EngineError("the connection ended in the middle of an answer", code="answer_cut")


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODE = msgspec.json.Decoder(_Event).decode


class _StreamReader:
    """Makes an Answer out of the lines of one event stream."""

    def __init__(self, begun_s: float) -> None:
        self._begun_s = begun_s
        self._stamps: list[float] = []
        self._usage: _Usage | None = None
        self._finish: str | None = None

    def line(self, line: bytes) -> None:
        """Take one line. Raises EngineError if the server reports an error in the stream."""
        if not line.startswith(b"data:"):
            return
        now_s = time.perf_counter()
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = _DECODE(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise EngineError(f"the stream holds an event that is no completion chunk: {error}") from None
        if event.error is not None:
            raise EngineError(f"the server broke off the stream: {event.error}", code="stream_error")
        self._usage = event.usage or self._usage
        if event.choices:
            choice = event.choices[0]
            self._finish = choice.finish_reason or self._finish
            # A chunk without text is tokens too (half of a character), unless it only tells the end.
            if choice.text or not choice.finish_reason:
                self._stamps.append(now_s)

    def answer(self) -> Answer:
        """The answer, at the stream's end. Raises EngineError if it held no token."""
        if not self._stamps:
            raise EngineError("the stream ended without a token", code="empty_stream")
        usage = self._usage or _Usage()
        told = usage.completion_tokens
        stamps = self._stamps
        return Answer(
            begun_s=self._begun_s,
            ended_s=stamps[-1],
            ttft_s=stamps[0] - self._begun_s,
            gaps_s=[after - before for before, after in itertools.pairwise(stamps)],
            num_prompt=usage.prompt_tokens,
            num_cached=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
            num_output=told or len(stamps),
            counted="usage" if told else "chunks",
            finish=self._finish,
        )
