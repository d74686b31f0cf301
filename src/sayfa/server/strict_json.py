"""Read a request body as JSON, more strictly than the standard library and within bounds.

Called by `body` only. Refuses (400) what parsers disagree about or what costs more than it looks: nesting deeper than
64, more than 10,000 keys, 20,000 lists and objects, 100,000 strings or 1,000,000 values, duplicate keys, number text
beyond 64 characters, NaN and infinities, invalid UTF-8, lone surrogates. Knows no fields.

What looks at all bytes looks at windows of them: a call into C keeps the interpreter's lock, and other threads wait.
"""

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NoReturn

import msgspec

from sayfa.base.errors import InvalidRequest

MAX_DEPTH = 64
MAX_KEYS = 10_000
MAX_CONTAINERS = 20_000
MAX_STRINGS = 100_000
MAX_VALUES = 1_000_000
MAX_NUMBER_CHARS = 64

WINDOW_BYTES = 64 << 10
"""A millisecond or less of any of the calls below, two of the slowest."""

_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
# The first two are linear on anything, the third where all strings are closed: else it starts again at every quote.
_REST_OF_STRING = re.compile(_INSIDE, re.DOTALL)
_WHOLE_STRINGS = re.compile(rb'(?:[^"]*+"' + _INSIDE + rb'")*+[^"]*+', re.DOTALL)
_STRINGS = re.compile(rb'"' + _INSIDE + rb'"', re.DOTALL)
_LONG_NUMBER = b"9" * (MAX_NUMBER_CHARS + 1)
_NUMBER_CHARS = bytes(ord("9") if chr(byte) in "-+.0123456789eE" else 32 for byte in range(256))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = [0] * 256
for _byte, _step in ((ord("["), 1), (ord("{"), 1), (ord("]"), -1), (ord("}"), -1)):
    _STEP[_byte] = _step


class _KeyCounter:
    """Builds objects; refuses a key that is there twice, and too many keys in all."""

    def __init__(self) -> None:
        self.num_keys = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self.num_keys += len(pairs)
        if self.num_keys > MAX_KEYS:
            raise _too_much(f"more than {MAX_KEYS} keys")
        built = dict(pairs)
        if len(built) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidRequest(f"The body has the key `{twice[:64]}` twice in one object.", code="invalid_json")
        return built


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"The body holds {name}, which is not a JSON number.", code="invalid_json")


def _float(text: str) -> float:
    """What the parser does itself, in C; from here other threads get their turn between two numbers."""
    return float(text)


def parse(body: bytes) -> dict[str, Any]:
    """Parse a JSON object; raise InvalidRequest (code `invalid_json`) saying what is wrong and where."""
    if not body:
        raise InvalidRequest("The body is empty; send a JSON object.", code="invalid_json")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8 (byte {error.start}).", code="invalid_json") from None
    _check_shape(body)
    try:
        value = json.loads(text, object_pairs_hook=_KeyCounter(), parse_constant=_refuse_constant, parse_float=_float)
        if _count(body, b"\\u"):
            # The standard parser lets halves of surrogate pairs through; they could not be encoded again.
            msgspec.json.decode(body)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"The body is not valid JSON (line {error.lineno}, column {error.colno}).", code="invalid_json"
        ) from None
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise InvalidRequest(
            "The body is not valid JSON: a string or number in it is malformed.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object, that is `{…}`.", code="invalid_json")
    return value


def _check_shape(body: bytes) -> None:
    """Bound depth, containers, strings, keys, values and number text before anything is built."""
    quotes = _count(body, b'"')
    if quotes > 2 * MAX_STRINGS and quotes - _count(body, b'\\"') > 2 * MAX_STRINGS:
        raise _too_much(f"more than {MAX_STRINGS} strings")
    if body.find(b"\\", body.rfind(b'"') + 1) >= 0:
        raise _never_closed()
    # What may stand in strings is counted first, since it is cheap and mostly enough.
    if (
        _count(body, b"[") + _count(body, b"{") > MAX_DEPTH
        or _count(body, b",") >= MAX_VALUES
        or _count(body, b":") > MAX_KEYS
        or any(map(_has_long_number, _windows(body, MAX_NUMBER_CHARS)))
    ):
        _check_outside_strings(body)


def _check_outside_strings(body: bytes) -> None:
    depth = containers = values = keys = 0
    before = b""
    for piece in _outside_strings(body):
        values += piece.count(b",")
        if values >= MAX_VALUES:
            raise _too_much(f"more than {MAX_VALUES} values")
        keys += piece.count(b":")
        if keys > MAX_KEYS:
            raise _too_much(f"more than {MAX_KEYS} keys")
        brackets = piece.translate(None, _NOT_BRACKETS)
        containers += len(brackets)
        if containers > 2 * MAX_CONTAINERS:
            raise _too_much(f"more than {MAX_CONTAINERS} lists and objects")
        levels = list(accumulate(map(_STEP.__getitem__, brackets), initial=depth))
        if max(levels) > MAX_DEPTH:
            raise InvalidRequest(f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
        depth = levels[-1]
        before = before[-MAX_NUMBER_CHARS:] + piece
        if _has_long_number(before):
            raise _too_much(f"a number of more than {MAX_NUMBER_CHARS} characters")


def _too_much(what: str) -> InvalidRequest:
    return InvalidRequest(f"The body holds {what}.", code="invalid_json")


def _never_closed() -> InvalidRequest:
    sentence = "The body is not valid JSON: a string is never closed, or a backslash stands outside of strings."
    return InvalidRequest(sentence, code="invalid_json")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The pieces of the body that are not in strings. Raises InvalidRequest if the last string is never closed."""
    pos, inside = 0, False
    while pos < len(body):
        end = pos + WINDOW_BYTES
        if inside:
            stop = _end_of(_REST_OF_STRING, body, pos, end)
            inside = body[stop : stop + 1] != b'"'
            if inside and stop == pos:  # a backslash with nothing behind it
                break
            pos = stop if inside else stop + 1
        else:
            stop = _end_of(_WHOLE_STRINGS, body, pos, end)
            yield _STRINGS.sub(b"", body[pos:stop])
            inside = stop < min(end, len(body))  # there a string begins that goes on behind the window
            pos = stop + inside
    if inside:
        raise _never_closed()


def _end_of(pattern: re.Pattern[bytes], body: bytes, pos: int, end: int) -> int:
    found = pattern.match(body, pos, end)
    return pos if found is None else found.end()


def _windows(body: bytes, overlap: int) -> Iterator[bytes]:
    """All of the body in windows; each holds the first `overlap` bytes of the next, too."""
    return (body[pos : pos + WINDOW_BYTES + overlap] for pos in range(0, len(body), WINDOW_BYTES))


def _count(body: bytes, what: bytes) -> int:
    """How often `what` stands there; its places may not overlap."""
    return sum(window.count(what) for window in _windows(body, len(what) - 1))


def _has_long_number(text: bytes) -> bool:
    """Tell whether there is a long run of characters that numbers are made of. Linear, unlike a pattern's search."""
    return _LONG_NUMBER in text.translate(_NUMBER_CHARS)
