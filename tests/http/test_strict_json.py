"""T15: the body parser equals the standard one on JSON that all parsers agree about, and refuses the rest with 400."""

import json
import random
import time
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sayfa.base.errors import InvalidRequest
from sayfa.server import strict_json
from sayfa.server.strict_json import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, MAX_VALUES, parse

leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    leaves | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)


@given(st.dictionaries(st.text(), values), st.booleans())
@settings(max_examples=60, deadline=None)
def test_good_json_is_read_as_the_standard_parser_reads_it(value: dict[str, object], escaped: bool) -> None:
    """Any value, with and without escapes."""
    body = json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    try:
        assert parse(body) == value
    except InvalidRequest:
        with pytest.raises(UnicodeEncodeError):  # lone surrogates are the one thing that is refused
            json.dumps(value, ensure_ascii=False).encode()


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_value_or_a_400(body: bytes) -> None:
    """Nothing else is ever raised."""
    with suppress(InvalidRequest):
        assert isinstance(parse(body), dict)


@pytest.mark.parametrize("seed", range(5))
def test_depth_is_counted_exactly(seed: int) -> None:
    """Random mixes of lists and objects are refused from one level above the limit on."""
    rng = random.Random(seed)
    for depth, fits in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False)):
        text = "1"
        for _ in range(depth - 1):
            text = f"[{text}, 1]" if rng.random() < 0.5 else f'{{"[[[{{{{": {text}}}'
        body = f'{{"a": {text}}}'.encode()
        if fits:
            parse(body)
        else:
            with pytest.raises(InvalidRequest, match="deeper than 64"):
                parse(body)


def test_a_body_of_10_mib_is_read_or_refused_in_bounded_time() -> None:
    """Large texts, many numbers, many brackets, many escapes: each well under a second of one slow core."""
    size = 10 << 20
    bodies = [
        b'{"a": "' + b"x" * size + b'"}',
        b'{"a": "' + rb"\u00e9" * (size // 6) + b'"}',
        b'{"a": "' + b'\\"' * (size // 2) + b'"}',
        b'{"a": [' + b"1," * (size // 2) + b"1]}",
        b'{"a": [' + b"[]," * (size // 3) + b"[]]}",
        b"[" * size,
        b'"' * size,
    ]
    for body in bodies:
        started = time.process_time()
        with suppress(InvalidRequest):
            parse(body)
        assert time.process_time() - started < 1.5, body[:20]


FILLINGS = {
    "escaped quotes": rb"\"",
    "quotes": b'"',
    "backslashes": b"\\",
    "both": rb'"\"',
    "odd": rb'"\\\"',
    "text": rb"x\"",
}


@pytest.mark.parametrize("end", ["closed", "open"])
@pytest.mark.parametrize("filling", FILLINGS)
def test_t15_what_a_string_holds_costs_its_length_and_no_more(filling: str, end: str) -> None:
    """More brackets than may be deep, so that strings are looked for; 60 KB where the square would be seconds."""
    inside = FILLINGS[filling] * (60_000 // len(FILLINGS[filling]))
    body = b'{"a": [' + b"[]," * 70 + b'"' + inside + (b'"]}' if end == "closed" else b"")
    started = time.process_time()
    with suppress(InvalidRequest):
        parse(body)
    took_s = time.process_time() - started
    assert took_s < 0.5, f"{took_s:.1f} s of CPU"


def outside_strings(body: bytes) -> bytes | None:
    """What stands outside of strings, byte by byte; None if the last string is never closed."""
    kept, inside, escaped = bytearray(), False, False
    for byte in body:
        if not inside:
            inside = byte == ord('"')
            kept += b"" if inside else bytes([byte])
        elif escaped:
            escaped = False
        else:
            escaped, inside = byte == ord("\\"), byte != ord('"')
    return None if inside else bytes(kept)


@pytest.mark.parametrize("seed", range(20))
def test_t15_strings_are_found_whatever_the_windows(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        body = bytes(rng.choices(b'"\\a[1', [3, 3, 2, 1, 1], k=rng.randrange(40)))
        monkeypatch.setattr(strict_json, "WINDOW_BYTES", rng.randrange(2, 12))
        try:
            found = b"".join(strict_json._outside_strings(body))
        except InvalidRequest:
            found = None
        assert found == outside_strings(body), body


def test_t15_a_wall_of_strings_is_refused_before_it_is_taken_apart() -> None:
    """Taking strings out of a text costs memory for each; 3 MB must not cost 60."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="strings"):
            parse(b'{"a": [' + b'"",' * 1_000_000 + b"[" * 70)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    quotes = json.dumps({"text": json.dumps(["x"] * 200_000)}).encode()
    assert len(parse(quotes)["text"]) > 600_000


def test_t15_values_are_counted_exactly_and_before_they_are_built() -> None:
    """A million values pass, one more does not; commas in texts are none."""
    ones = b'{"a": [' + b"1," * (MAX_VALUES - 1)
    assert len(parse(ones + b'",,,,,"]}')["a"]) == MAX_VALUES
    with pytest.raises(InvalidRequest, match="1000000 values"):
        parse(ones + b"1,1]}")
    assert parse(b'{"a": "' + b"," * (2 * MAX_VALUES) + b'"}')


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is empty"),
        (b'{"a": "\xff"}', r"not UTF-8 \(byte 7\)"),
        (b'{"a":\n 1 x}', r"line 2, column 4"),
        (b"[1]", "must be a JSON object"),
        (b"7", "must be a JSON object"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b'{"a": {"key": 1, "other": 2, "key": 1}}', "the key `key` twice"),
        (rb'{"a": "\ud800"}', "string or number in it is malformed"),
        (b'{"a": ' + b"1" * 65 + b"}", "number of more than 64 characters"),
        (b'{"a": ' + b"1" * 5000 + b"}", "number of more than 64 characters"),
        (b"{" + b",".join(b'"k%d":1' % i for i in range(MAX_KEYS + 1)) + b"}", "more than 10000 keys"),
        (b'{"a": [' + b"[]," * MAX_CONTAINERS + b"[]]}", "lists and objects"),
    ],
)
def test_each_refusal_says_what_is_wrong(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as told:
        parse(body)
    assert told.value.code == "invalid_json"


def test_bounds_are_kept_exactly_and_hold_for_what_is_no_text_only() -> None:
    """What is allowed is read: the longest number, the most keys, long digits and many brackets in a text."""
    assert parse(b'{"a": ' + b"1" * 64 + b"}") == {"a": int("1" * 64)}
    assert len(parse(b"{" + b",".join(b'"k%d":1' % i for i in range(MAX_KEYS)) + b"}")) == MAX_KEYS
    text = "1" * 100 + "[" * 3 * MAX_CONTAINERS + "{" * 100
    assert parse(json.dumps({"a": text}).encode()) == {"a": text}
    assert parse(rb'{"a": "\ud83d\ude00"}') == {"a": "😀"}
