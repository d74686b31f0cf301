"""`sayfa chat --url`: whatever a server sends is an answer or an error that ends the answer, never the program."""

import functools
import io
import json

import httpx2
import pytest

from sayfa.base.errors import EngineError
from sayfa.cli import chat


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


@pytest.mark.parametrize("url", ["http://[::1", "http://a\x00b", "nowhere", "http://127.0.0.1:99999"])
def test_an_address_that_is_none_is_told_in_a_sentence(url):
    with pytest.raises(EngineError, match="names no model"):
        chat._remote(url, None, {})
