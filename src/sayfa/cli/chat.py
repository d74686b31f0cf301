"""`sayfa chat`: a conversation in the terminal, with a model in this process or behind a server's address.

Called by `app`. Answers appear as they come; Ctrl-C ends the answer, Ctrl-D or /exit the conversation, /clear forgets
it.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import msgspec

from sayfa.base import log
from sayfa.base.config import Settings
from sayfa.base.errors import ConfigError, EngineError, SayfaError
from sayfa.base.sampling_params import SamplingParams
from sayfa.bench.client import first_model_in, parse_url, told, why_unreachable
from sayfa.cli.options import check_wishes
from sayfa.cli.output import tell

Message = dict[str, str]
Answerer = Callable[[list[Message]], Iterator[str]]

HELP = "/clear forgets the conversation, /exit (or Ctrl-D) ends, Ctrl-C stops an answer"


def run_chat(
    settings: Settings, url: str | None, api_key: str | None, system: str | None, wishes: dict[str, Any]
) -> int:
    """Talk until the input ends; return 0, or 1 if an answer failed and nobody is at the terminal."""
    log.setup("warning", "text")
    check_wishes(wishes)
    if wishes["max_tokens"] < 1:
        raise ConfigError(f"--max-tokens is {wishes['max_tokens']}, but must be at least 1")
    answerer = _remote(url, api_key, wishes) if url else _local(settings, wishes)
    return talk(answerer, sys.stdin, sys.stdout, system)


def talk(answerer: Answerer, source: Any, sink: Any, system: str | None) -> int:
    """The conversation itself; source and sink are text streams."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    at_terminal = source.isatty() and sink.isatty()
    if at_terminal:
        print(HELP, file=sink)
    while True:
        if at_terminal:
            print("\n> ", end="", file=sink, flush=True)
        try:
            line = source.readline()
        except KeyboardInterrupt:
            line = ""
        if not line or line.strip() == "/exit":
            return 0
        if line.strip() == "/clear":
            messages = list(start)
        elif line.strip():
            messages.append({"role": "user", "content": line.rstrip("\n")})
            text, failed = _answer(answerer, messages, sink)
            if failed and not at_terminal:
                return 1
            if text:
                messages.append({"role": "assistant", "content": text})
            else:
                messages.pop()


def _answer(answerer: Answerer, messages: list[Message], sink: Any) -> tuple[str, bool]:
    """Print one answer as it comes; return its text so far, also when it was stopped or failed."""
    text, failed = "", False
    try:
        for piece in answerer(messages):
            print(piece, end="", file=sink, flush=True)
            text += piece
    except KeyboardInterrupt:
        pass
    except SayfaError as error:
        failed = True
        tell(f"sayfa: {error}\n")
    print(file=sink, flush=True)
    return text, failed


def _local(settings: Settings, wishes: dict[str, Any]) -> Answerer:
    from sayfa.cli.offline import make_llm

    model = make_llm(settings)
    params = SamplingParams(**wishes)
    return lambda messages: model.stream_chat(messages, params)


def _remote(url: str, api_key: str | None, wishes: dict[str, Any]) -> Answerer:
    place = parse_url(url)
    client = httpx2.Client(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx2.Timeout(10.0, read=600.0),
        mounts={"all://": httpx2.HTTPTransport(uds=place.uds)} if place.uds else None,
    )
    try:
        models = client.get(f"{place.base_url}/v1/models")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise EngineError(f"--url {url} cannot be reached: {why_unreachable(error)}") from None
    model = first_model_in(url, models.status_code, models.content)

    def answer(messages: list[Message]) -> Iterator[str]:
        body = {"model": model, "messages": messages, "stream": True, **wishes}
        try:
            with client.stream("POST", f"{place.base_url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise EngineError(told(response.status_code, response.read()))
                for line in _lines(response.iter_bytes()):
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        yield _delta(line[5:])
        except UnicodeEncodeError:
            raise EngineError("the text holds bytes that are no characters (lone surrogates); send UTF-8") from None
        except httpx2.HTTPError as error:
            raise EngineError(f"{url}: {why_unreachable(error)}") from None

    return answer


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Lines end with \\n: httpx would break them at U+2028 and its like, which may stand inside an event's text."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: Any = None


_DECODE = msgspec.json.Decoder(_Event).decode


def _delta(data: bytes) -> str:
    """The text that an event brings, often none. Raises EngineError if it is an error, or no chunk of a chat."""
    try:
        event = _DECODE(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineError(f"the stream holds an event that is no chat completion chunk: {error}") from None
    if event.error is not None:
        message = event.error.get("message") if isinstance(event.error, dict) else None
        raise EngineError(str(message or event.error or "the server reports an error without a message"))
    delta = event.choices[0].delta if event.choices else None
    return (delta and delta.content) or ""
