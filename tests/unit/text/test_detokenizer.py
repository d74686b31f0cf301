"""The detokenizer: streamed equals plain, characters stay whole, stop strings never leak."""

import random
import time

import pytest

from fakes.strings import random_string
from sayfa.base.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS
from sayfa.server.limits import MAX_ANSWERS
from sayfa.text.detokenizer import Detokenizer


class ByteTokens:
    """A vocabulary made up as it is used: each token is any bytes wanted; id 0 is a control token."""

    special_ids = frozenset({0})

    def __init__(self) -> None:
        self.table = [b"<end>"]

    def ids(self, *pieces: bytes) -> list[int]:
        start = len(self.table)
        self.table += pieces
        return list(range(start, len(self.table)))

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id]


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    """Cut bytes anywhere, inside characters too."""
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(len(data) + 1)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule in its plainest form: the stop string complete first ends the text; among equals the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[:end] if include else text[: end - len(stop)], stop
    return text, None


def stream(detokenizer: Detokenizer, ids: list[int], rng: random.Random) -> str:
    parts, at = [], 0
    while at < len(ids):
        step = rng.randrange(1, 4)
        parts.append(detokenizer.push(ids[at : at + step])[0])
        at += step
    parts.append(detokenizer.push([], finished=True)[0])
    for part in parts:
        part.encode()  # valid Unicode, no half of a pair
    return "".join(parts)


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_of_the_bytes_streams_the_same_text(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        text = random_string(rng)
        vocabulary = ByteTokens()
        detokenizer = Detokenizer(vocabulary)
        assert stream(detokenizer, vocabulary.ids(*cut(text.encode(), rng)), rng) == text == detokenizer.text


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("alphabet", ["ab", "aab.", "abc\n", "é😀a"])
def test_stop_strings_end_the_text_by_the_rule_however_it_is_cut(seed: int, alphabet: str) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(30)))
        stops = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        include = rng.random() < 0.5
        vocabulary = ByteTokens()
        pieces = cut(text.encode(), rng)
        ids = vocabulary.ids(*pieces)
        min_tokens = rng.choice((0, 0, rng.randrange(len(pieces) + 2)))
        # Of a character over the border all belongs to the token that completes it.
        free = len(b"".join(pieces[:min_tokens]).decode(errors="ignore"))
        detokenizer = Detokenizer(vocabulary, stops, include, min_tokens=min_tokens)
        wanted, stop = expected(text[free:], stops, include)
        wanted = text[:free] + wanted
        assert stream(detokenizer, ids, rng) == wanted, (text, stops)
        assert detokenizer.stop_string == stop
        assert detokenizer.stopped == (stop is not None)


def test_nothing_of_a_stop_string_leaks_over_a_token_border() -> None:
    """B017: `END.` in three tokens, the last with text behind it."""
    vocabulary = ByteTokens()
    detokenizer = Detokenizer(vocabulary, ["END."])
    assert [detokenizer.push([i]) for i in vocabulary.ids(b"so E", b"ND", b". x", b"y")] == [
        ("so ", False), ("", False), ("", True), ("", True),
    ]  # fmt: skip
    assert detokenizer.num_tokens == 3


def test_a_near_miss_is_released_in_full_and_at_once() -> None:
    vocabulary = ByteTokens()
    detokenizer = Detokenizer(vocabulary, ["END."])
    assert [detokenizer.push([i])[0] for i in vocabulary.ids(b"E", b"N", b"X", b"EN")] == ["", "", "ENX", ""]
    assert detokenizer.push([], finished=True) == ("EN", False)


@pytest.mark.parametrize("seed", range(10))
def test_no_more_than_a_stop_string_less_one_is_held(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(200))
    vocabulary = ByteTokens()
    detokenizer, given = Detokenizer(vocabulary, ["ababbbba"]), 0
    for count, token_id in enumerate(vocabulary.ids(*(char.encode() for char in text)), 1):
        given += len(detokenizer.push([token_id])[0])
        if detokenizer.stopped:
            break
        assert count - given <= 7


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    """B005: streamed and plain alike."""
    vocabulary = ByteTokens()
    ids = vocabulary.ids(b"ok \xf0\x9f", b"\x98")
    for pieces in ([ids], [[i] for i in ids]):
        detokenizer = Detokenizer(vocabulary)
        parts = [detokenizer.push(piece)[0] for piece in pieces] + [detokenizer.push([], finished=True)[0]]
        assert "".join(parts) == "ok "


def test_bytes_that_are_never_a_character_are_marked_once_each() -> None:
    vocabulary = ByteTokens()
    assert Detokenizer(vocabulary).push(vocabulary.ids(b"a\xff", b"\xe2\x82", b"b"), True)[0] == "a\ufffd\ufffdb"


def test_control_tokens_are_hidden_unless_asked_for() -> None:
    vocabulary = ByteTokens()
    ids = [*vocabulary.ids(b"hi"), 0]
    assert Detokenizer(vocabulary).push(ids, True)[0] == "hi"
    assert Detokenizer(vocabulary, skip_special=False).push(ids, True)[0] == "hi<end>"


@pytest.mark.parametrize("seed", range(20))
def test_offsets_point_at_where_each_token_begins_in_the_text_as_sent(seed: int) -> None:
    """B011. A token that begins inside a character points at the character; behind a stop string, at the text's end."""
    rng = random.Random(seed)
    text = random_string(rng) + "éé😀" + random_string(rng)
    stops = ["éé"] if rng.random() < 0.5 else []
    vocabulary = ByteTokens()
    pieces = cut(text.encode(), rng)
    detokenizer = Detokenizer(vocabulary, stops)
    sent = stream(detokenizer, vocabulary.ids(*pieces), rng)
    before = b""
    for piece, offset in zip(pieces, detokenizer.offsets, strict=False):
        assert offset == min(len(before.decode(errors="ignore")), len(sent))
        before += piece


def test_t10_many_answers_prepare_their_stop_strings_once() -> None:
    """As many as one request may ask for, with the most and longest stop strings: each did it anew, for 5 seconds."""
    stops = ["a" * (MAX_STOP_CHARS - 1) + chr(ord("b") + index) for index in range(MAX_STOP_STRINGS)]
    vocabulary = ByteTokens()
    start = time.process_time()
    answers = [Detokenizer(vocabulary, stops) for _ in range(MAX_ANSWERS)]
    spent = time.process_time() - start
    assert spent < 1, f"{spent:.1f} s of CPU"
    ends = [vocabulary.ids(stop.encode()) for stop in stops]
    for index, answer in enumerate(answers):  # what they share is not written to
        assert answer.push(vocabulary.ids(b"xa"))[0] == "x"
        assert answer.push(ends[index % len(ends)]) == ("a", True)


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    vocabulary = ByteTokens()
    ids = vocabulary.ids(*[b"word "] * 40)
    detokenizer = Detokenizer(vocabulary, ["zzz", "word wordy", "\n\n"])

    def best_time() -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            detokenizer.push(ids)
            times.append(time.perf_counter() - start)
        return min(times)

    early = best_time()
    for _ in range(500):
        detokenizer.push(ids)
    assert best_time() < 5 * early
