"""`sayfa chat --url`: whatever a server sends is an answer or an error that ends the answer, never the program."""

import asyncio
import functools
import io
import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler

import httpx2
import pytest

from sayfa.base.errors import ConfigError, EngineError
from sayfa.bench.client import CompletionClient
from sayfa.cli import chat, main
from sayfa.cli.output import take_any_text


@pytest.fixture
def answerer_of(monkeypatch):
    """Makes an answerer whose server streams the pieces that it is given."""

    def make(*pieces):
        def handle(request):
            if request.method == "GET":
                return httpx2.Response(200, json={"data": [{"id": "tiny"}]})
            return httpx2.Response(200, stream=Pieces(pieces))

        client = functools.partial(httpx2.Client, transport=httpx2.MockTransport(handle))
        monkeypatch.setattr(chat.httpx2, "Client", client)
        return chat._remote("http://127.0.0.1:1/v1", None, {})

    return make


class Pieces(httpx2.SyncByteStream):
    def __init__(self, pieces):
        self._pieces = pieces

    def __iter__(self):
        yield from self._pieces


def event(text, **options):
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}, **options).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
BREAKS = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e \r\n \r end"


@pytest.mark.parametrize("escaped", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_text_with_any_line_break_comes_as_it_was_written(answerer_of, size, escaped):
    stream = event("one", ensure_ascii=escaped) + event(BREAKS, ensure_ascii=escaped) + b": a comment\n\n" + DONE
    answerer = answerer_of(*(stream[start : start + size] for start in range(0, len(stream), size)))
    assert "".join(answerer([])) == "one" + BREAKS


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_lines_may_end_as_http_s_do_and_the_last_may_have_no_end(answerer_of, end):
    stream = event("a").strip() + end + end + event("b").strip()
    assert "".join(answerer_of(stream)([])) == "ab"


@pytest.mark.parametrize(
    "data",
    [
        b"{", b"", b"3", b"[]", b"null", b'"x"', b"\xff", b'{"choices": 3}', b'{"choices": [3]}', b"[" * 100_000,
        b'{"choices": [{"delta": 3}]}', b'{"choices": [{"delta": {"content": 3}}]}',
        b'{"choices": [{"delta": {"content": "\\ud800"}}]}', b'{"error": "boom"}', b'{"error": {"message": "boom"}}',
        b'{"error": {}}', b'{"error": [1]}', b'{"error": ""}',
        b'{"x": ' + b"[" * 100_000, b'{"error": ' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_an_event_that_is_none_ends_the_answer_and_not_the_conversation(answerer_of, capsys, data):
    answerer = answerer_of(event("so far"), b"data: " + data + b"\n\n", event("never"))
    pieces = []
    with pytest.raises(EngineError) as caught:
        pieces += iter(answerer([]))
    assert str(caught.value)
    assert ("boom" in str(caught.value)) == (b"boom" in data)
    sink = io.StringIO()
    assert chat.talk(answerer, io.StringIO("one\n"), sink, None) == 1
    assert sink.getvalue() == "so far\n"
    assert "sayfa: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "data",
    [b'{"choices": []}', b"{}", b'{"choices": null}', b'{"choices": [{}]}', b'{"choices": [{"delta": null}]}',
     b'{"choices": [{"delta": {"content": null}}]}', b'{"choices": [{"delta": {"role": "assistant"}}], "usage": null}',
     b'{"error": null, "choices": []}'],
)  # fmt: skip
def test_an_event_without_text_says_nothing(answerer_of, data):
    assert "".join(answerer_of(event("a"), b"data:" + data + b"\n\n", event("b"), DONE)([])) == "ab"


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a\x00b", "nowhere.invalid", "http://127.0.0.1:99999", "ftp://x"]
)
def test_an_address_that_is_none_is_told_in_a_sentence(url):
    with pytest.raises((ConfigError, EngineError), match="--url"):
        chat._remote(url, None, {})


def test_bytes_that_are_no_text_fail_one_answer_and_not_the_conversation(answerer_of, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi \xff\nagain\n"), "utf-8"))
    take_any_text()
    assert chat.talk(answerer_of(event("yes")), chat.sys.stdin, io.StringIO(), None) == 1
    assert "lone surrogates" in capsys.readouterr().err


@pytest.fixture
def bound(tmp_path):
    """A server on a Unix socket that answers each request alike; `say` sets what. Gives its address."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self):
            status, data = said[0]
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def address_string(self):
            return "-"

        def log_message(self, *args):
            pass

    class Listening(socketserver.UnixStreamServer):
        daemon_threads = True

    said = [(200, b"")]
    server = Listening(str(tmp_path / "s"), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http+unix://{tmp_path}/s", lambda status, data: said.insert(0, (status, data))
    server.shutdown()
    thread.join()
    server.server_close()


def both_clients_on(url):
    """What chat and bench say of a server."""
    for ask in (lambda: chat._remote(url, None, {}), lambda: asyncio.run(CompletionClient(url).first_model())):
        with pytest.raises(EngineError) as caught:
            ask()
        yield str(caught.value)


def test_the_address_of_a_unix_socket_is_taken_as_the_start_prints_it(bound):
    url, say = bound
    say(200, b'{"data": [{"id": "tiny"}]}')
    assert chat._remote(url, None, {}) is not None


def test_a_server_without_a_scheme_is_asked_over_http():
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1 cannot be reached: .*refused"):
        chat._remote("127.0.0.1:1", None, {})


def test_who_is_refused_reads_why_and_the_way_out_in_one_line(bound):
    url, say = bound
    say(401, b'{"error": {"message": "There is no valid API key."}}')
    for line in both_clients_on(url):
        assert "HTTP 401: There is no valid API key; give the server's key with --api-key or SAYFA_API_KEY" in line
        assert "\n" not in line
    say(503, b"busy\n")
    assert all("(HTTP 503: busy)" in line for line in both_clients_on(url))
    say(200, b"[" * 100_000)
    assert all("names no model" in line for line in both_clients_on(url))


@pytest.mark.parametrize("command", ["chat", "generate", "chat --url http://127.0.0.1:1"])
@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [("--max-tokens", "-1", "must lie in"), ("--temperature", "-1", "must lie in"), ("--temperature", "nan", "")],
)
def test_a_sampling_flag_that_cannot_be_is_named_before_any_work(capsys, command, flag, value, words):
    assert main([*command.split(), "--model", "/nowhere", flag, value]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sayfa: error: {flag}: ")
    assert words in line


def test_a_conversation_needs_room_for_an_answer(capsys):
    assert main(["chat", "--model", "/nowhere", "--max-tokens", "0"]) == 2
    assert capsys.readouterr().err == "sayfa: error: --max-tokens is 0, but must be at least 1\n"
