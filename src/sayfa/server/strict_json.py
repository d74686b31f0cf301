"""Read a request body as JSON, more strictly than the standard library and within bounds.

Called by `body` only. Refuses (400) what parsers disagree about or what costs more than it looks: nesting deeper than
64, more than 10,000 keys, 100,000 strings or 1,000,000 values, duplicate keys, number text beyond 64 characters, NaN
and infinities, invalid UTF-8, lone surrogates. Knows no fields.
"""

import json
import re
from itertools import accumulate
from typing import Any, NoReturn

import msgspec

from sayfa.base.errors import InvalidRequest

MAX_DEPTH = 64
MAX_KEYS = 10_000
MAX_CONTAINERS = 100_000
MAX_STRINGS = 100_000
MAX_VALUES = 1_000_000
MAX_NUMBER_CHARS = 64

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
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
            raise InvalidRequest(f"The body has more than {MAX_KEYS} keys.", code="invalid_json")
        built = dict(pairs)
        if len(built) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidRequest(f"The body has the key `{twice[:64]}` twice in one object.", code="invalid_json")
        return built


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"The body holds {name}, which is not a JSON number.", code="invalid_json")


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
        value = json.loads(text, object_pairs_hook=_KeyCounter(), parse_constant=_refuse_constant)
        if "\\u" in text:
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
    """Bound depth, containers, strings and number text before anything is built."""
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:
        raise InvalidRequest(f"The body has more than {MAX_STRINGS} strings.", code="invalid_json")
    opened = body.count(b"[") + body.count(b"{")
    may_be_long = _has_long_number(body)
    may_be_many = body.count(b",") >= MAX_VALUES
    if opened <= MAX_DEPTH and not may_be_long and not may_be_many:
        return
    bare = _STRINGS.sub(b"", body)  # costs some 50 bytes for each string
    if may_be_many and bare.count(b",") >= MAX_VALUES:
        raise InvalidRequest(f"The body has more than {MAX_VALUES} values.", code="invalid_json")
    if opened > MAX_DEPTH:
        brackets = bare.translate(None, _NOT_BRACKETS)
        if len(brackets) > 2 * MAX_CONTAINERS:
            raise InvalidRequest(f"The body has more than {MAX_CONTAINERS} lists and objects.", code="invalid_json")
        if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH:
            raise InvalidRequest(f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
    if may_be_long and _has_long_number(bare):
        raise InvalidRequest(
            f"The body holds a number of more than {MAX_NUMBER_CHARS} characters.", code="invalid_json"
        )


def _has_long_number(text: bytes) -> bool:
    """Tell whether there is a long run of characters that numbers are made of. Linear, unlike a pattern's search."""
    return _LONG_NUMBER in text.translate(_NUMBER_CHARS)
