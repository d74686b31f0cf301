"""Sequences that read the same pages meet them in one tile, and each gets the bits that it would get alone."""

import numpy as np
import pytest

from fakes.native_ops import AttentionStep, Ints, Layer, Sequences, same_bits
from sayfa import _native

BLOCK = 256
ISAS = _native.isas()
KV_TYPES = ["float32", "bfloat16", "int8"]

Groups = set[tuple[int, frozenset[int]]]


def groups_found(query_start: Ints, context_len: Ints, tables: Ints, page_size: int) -> Groups:
    """What the library finds, block by block."""
    found: Groups = set()
    for members, begin, end in _native.shared_runs(query_start, context_len, tables, page_size):
        for block in range(begin, end):
            assert (block, frozenset(members)) not in found
            found.add((block, frozenset(members)))
    return found


def groups_there(query_start: Ints, context_len: Ints, tables: Ints, page_size: int) -> Groups:
    """The same by its meaning: who has one token, and the same pages in all whole blocks up to this one."""
    by_pages: dict[tuple[int, bytes], set[int]] = {}
    for s, length in enumerate(context_len.tolist()):
        if query_start[s + 1] - query_start[s] == 1:
            for block in range((length - 1) // BLOCK):
                pages = tables[s, : (block + 1) * BLOCK // page_size].tobytes()
                by_pages.setdefault((block, pages), set()).add(s)
    return {(block, frozenset(members)) for (block, _), members in by_pages.items() if len(members) > 1}


def random_tree(rng: np.random.Generator, count: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Lengths of `count` sequences, and who reads the first tokens of whom: (child, parent, number of tokens)."""
    lengths = rng.integers(1, 2000, size=count).tolist()
    shares = []
    for child in range(1, count):
        if rng.random() < 0.8:
            parent = int(rng.integers(0, child))
            num_tokens = min(int(rng.integers(0, lengths[parent] + 1)), lengths[child] - 1, lengths[parent] - 1)
            shares.append((child, parent, num_tokens))
    return lengths, shares


@pytest.mark.parametrize("seed", range(60))
def test_every_shared_block_is_found_once_and_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([16, 32, 64]))
    lengths, shares = random_tree(rng, int(rng.integers(1, 30)))
    layer = Layer(1, 16, page_size, "int8", lengths, seed=seed)
    for child, parent, num_tokens in shares:
        layer.share(child, parent, num_tokens)
    queries = rng.choice([1, 1, 1, 1, 0, 2], size=len(lengths))
    query_start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    context_len = np.array(lengths, np.int32)
    want = groups_there(query_start, context_len, layer.tables, page_size)
    assert groups_found(query_start, context_len, layer.tables, page_size) == want


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_shared_pages_give_each_sequence_the_bits_that_it_gets_alone(isa: str, kv_type: str, seed: int) -> None:
    """Two sets of queries take turns, so that a fold that comes too early meets results of the step before."""
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 3, 4, 8]))
    lengths, shares = random_tree(rng, 15)
    lengths[0], shares = 1999, [(1, 0, lengths[1] - 1), *shares[1:]]
    layer = Layer(kv_heads, 16, int(rng.choice([16, 32, 64])), kv_type, lengths, seed=seed)
    data = Sequences.random(layer, kv_heads * group, seed)
    for child, parent, num_tokens in shares:
        layer.share(child, parent, num_tokens)
        whole = num_tokens // layer.page_size * layer.page_size
        for rows in (data.key, data.value):
            rows[child][:whole] = rows[parent][:whole]
    others = Sequences([-query for query in data.query], data.key, data.value)
    last = [(s, length - 1, length) for s, length in enumerate(lengths)]
    alone = AttentionStep(layer, kv_heads * group, isa=isa, split=False)
    alone.write(data, [(s, 0, length) for s, length in enumerate(lengths)])
    want = [[alone(queries, [chunk])[0] for chunk in last] for queries in (data, others)]
    for threads in (1, 2, 3, 8):
        call = AttentionStep(layer, kv_heads * group, isa=isa, threads=threads)
        for turn in range(4):
            got = call((data, others)[turn % 2], last)
            for s, rows in enumerate(got):
                same_bits(rows, want[turn % 2][s], f"{isa} {kv_type} threads {threads} turn {turn} sequence {s}")
            assert call.open_counters() == 0
        assert call.notes_blocks(), "nothing was shared"


@pytest.mark.parametrize("window", [0, 300])
def test_beside_a_prompt_and_behind_a_window_the_bits_stay(window: int) -> None:
    layer = Layer(2, 32, 32, "bfloat16", [900, 800, 700])
    data = Sequences.random(layer, 6, 1)
    for child in (1, 2):
        layer.share(child, 0, 512)
        for rows in (data.key, data.value):
            rows[child][:512] = rows[0][:512]
    chunks = [(0, 850, 900), (1, 799, 800), (2, 699, 700)]
    alone = AttentionStep(layer, 6, window=window, split=False)
    alone.write(data, [(s, 0, length) for s, length in enumerate(layer.lengths)])
    call = AttentionStep(layer, 6, window=window)  # one thread: nothing is cut
    for chunk, rows in zip(chunks, call(data, chunks), strict=True):
        same_bits(rows, alone(data, [chunk])[0], f"chunk {chunk}")
    assert call.notes_blocks() == (window == 0)
