"""Damage to bytes, from a seed: what a fuzzer does to a good input when nothing guides it."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, 1e308, 2**31, 2**64, 10**400, "", "x", "1", "😀", [], [0], [""], [[]], {},
    {"a": 1}, {"type": "text"}, "\x00", "a" * 5000, [None] * 50,
]  # fmt: skip


def damaged(rng: random.Random, seeds: list[bytes], words: list[bytes]) -> bytes:
    """A copy of one seed with one to five wounds: bits, bytes, cuts, doublings, known words, pieces of other seeds."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))])
            case 2:
                del data[at : at + rng.randint(1, 1 << rng.randrange(10))]
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 1 << rng.randrange(8))] * rng.randint(1, 4)
            case 4 if words:
                word = rng.choice(words)
                data[at : at + rng.choice((0, len(word)))] = word
            case 5:
                other = rng.choice(seeds)
                start = rng.randrange(len(other) + 1)
                data[at : at + rng.randrange(20)] = other[start : start + rng.randrange(60)]
            case 6 if rng.random() < 0.2:
                del data[at:]
            case _:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
    return bytes(data)


def every_bit(data: bytes, start: int, end: int) -> Iterator[tuple[str, bytes]]:
    """Copies with one flipped bit, for each bit of the range; each with the name of what was done."""
    for at in range(start, end):
        for bit in range(8):
            copy = bytearray(data)
            copy[at] ^= 1 << bit
            yield f"byte {at}, bit {bit}", bytes(copy)


def every_cut(data: bytes, step: int) -> Iterator[tuple[str, bytes]]:
    """The beginnings of the data, in steps."""
    for size in range(0, len(data), step):
        yield f"cut at {size}", data[:size]


def damaged_json(rng: random.Random, seeds: list[bytes], words: list[bytes]) -> bytes:
    """Half of the time bytes are damaged; else one to three values are put in the places of others, or keys go."""
    if rng.random() < 0.5:
        return damaged(rng, seeds, words)
    value = json.loads(rng.choice(seeds))
    for _ in range(rng.randint(1, 3)):
        holder, key = value, None
        while isinstance(holder, dict | list) and holder:
            key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
            inner = holder[key]
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
                break
            holder = inner
        if key is None:
            continue
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(value).encode()
