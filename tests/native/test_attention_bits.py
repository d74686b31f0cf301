"""The law: the bits of a row's attention depend on that row alone.

Not on who else is in the step, how the prompt was cut into chunks, how many threads there are, whether a long context
was split over them, which pages it lies in, nor on what unwritten slots hold.
"""

import numpy as np
import pytest

from fakes.native_ops import AttentionStep, Floats, Layer, Sequences, same_bits
from sayfa import _native

ISAS = _native.isas()
KV_TYPES = ["float32", "bfloat16", "int8"]


def random_cuts(rng: np.random.Generator, lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """Cut all sequences into chunks and deal them out to steps, each sequence in order."""
    pending = {s: 0 for s, length in enumerate(lengths) if length}
    steps = []
    while pending:
        chunks = []
        for s in rng.permutation(list(pending)).tolist():
            if rng.random() < 0.3:
                continue
            first = pending[s]
            size = int(rng.choice([1, 1, 2, 3, 13, 37, 64, 200]))
            end = min(lengths[s], first + size)
            chunks.append((s, first, end))
            pending[s] = end
            if end == lengths[s]:
                del pending[s]
        if chunks:
            steps.append(chunks)
    return steps


def outputs(
    layer: Layer, call: AttentionStep, data: Sequences, steps: list[list[tuple[int, int, int]]]
) -> list[Floats]:
    """Run the steps on fresh, poisoned pages; returns all rows of each sequence in order of position."""
    layer.poison()
    parts: list[list[Floats]] = [[] for _ in layer.lengths]
    for chunks in steps:
        for (s, _, _), rows in zip(chunks, call(data, chunks), strict=True):
            parts[s].append(rows)
    return [np.concatenate(rows) for rows in parts]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("seed", range(4))
def test_any_cut_any_crowd_any_threads_give_the_same_bits(isa: str, kv_type: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([16, 32, 64]))
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5, 8]))
    head_dim = int(rng.choice([16, 40, 64, 80, 128]))
    window = int(rng.choice([0, 0, 5, 100, 300]))
    lengths = rng.integers(1, 700, size=4).tolist()
    layer = Layer(kv_heads, head_dim, page_size, kv_type, lengths, seed=seed)
    data = Sequences.random(layer, kv_heads * group, seed)
    whole = AttentionStep(layer, kv_heads * group, isa=isa, threads=1, window=window)
    want = outputs(layer, whole, data, [[(s, 0, length)] for s, length in enumerate(lengths)])
    for threads, split in ((1, True), (2, True), (3, True), (2, False)):
        call = AttentionStep(layer, kv_heads * group, isa=isa, threads=threads, window=window, split=split)
        got = outputs(layer, call, data, random_cuts(rng, lengths))
        for s, rows in enumerate(got):
            same_bits(rows, want[s], f"{isa} {kv_type} seed {seed} threads {threads} sequence {s} of {lengths[s]}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_one_token_at_a_time_equals_the_whole_prompt(isa: str, kv_type: str) -> None:
    layer = Layer(2, 32, 16, kv_type, [530], seed=11)
    data = Sequences.random(layer, 6, seed=12)
    call = AttentionStep(layer, 6, isa=isa, threads=2)
    want = outputs(layer, call, data, [[(0, 0, 530)]])
    got = outputs(layer, call, data, [[(0, p, p + 1)] for p in range(530)])
    same_bits(got[0], want[0], f"{isa} {kv_type}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_long_context_split_over_threads_keeps_its_bits(isa: str, kv_type: str) -> None:
    """5,000 keys and few rows: with more threads the blocks are computed apart and folded by whoever ends last.

    Two sets of queries take turns, so that a fold that comes too early meets the other set's partial results.
    """
    layer = Layer(2, 64, 32, kv_type, [5000, 700], seed=21)
    data = Sequences.random(layer, 6, seed=22)
    other = Sequences([-query for query in data.query], data.key, data.value)
    last = [(0, 4990, 5000), (1, 699, 700)]
    want: list[Floats] = []
    for threads in (1, 2, 3, 8):
        call = AttentionStep(layer, 6, isa=isa, threads=threads)
        layer.poison()
        call.write(data, [(0, 0, 4990), (1, 0, 699)])
        for turn in range(6):
            got = np.concatenate(call((data, other)[turn % 2], last))
            if len(want) < 2:
                want.append(got)
            same_bits(got, want[turn % 2], f"{isa} {kv_type} threads {threads} turn {turn}")
            assert call.open_counters() == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("window", [0, 50])
def test_a_broken_number_reaches_later_rows_only_however_a_prompt_is_cut(isa: str, kv_type: str, window: int) -> None:
    """NaN and infinity in a key or value: rows before it, and behind its window, keep the bits of a sound prompt.

    A value is dropped with its pair of tokens, so that it may be met by the first row behind its window.
    """
    rng = np.random.default_rng(window)
    for which, bad in (("value", np.nan), ("value", -np.inf), ("key", np.nan)):
        for place in (100, 257):
            layer = Layer(2, 40, 16, kv_type, [600], seed=51)
            data = Sequences.random(layer, 6, seed=52)
            call = AttentionStep(layer, 6, isa=isa, window=window)
            sound = outputs(layer, call, data, [[(0, 0, 600)]])[0]
            getattr(data, which)[0][place, 3] = bad
            want = outputs(layer, call, data, [[(0, 0, 600)]])[0]
            same_bits(want[:place], sound[:place], f"{isa} {kv_type} {which} {bad} rows before {place}")
            assert not np.isfinite(want[place : place + (window or 600)]).all(axis=1).any()
            if window:
                behind = place + window + 1
                same_bits(want[behind:], sound[behind:], f"{isa} {kv_type} {which} {bad} rows from {behind} on")
            got = outputs(layer, call, data, random_cuts(rng, [600]))[0]
            assert np.array_equal(got, want, equal_nan=True), f"{isa} {kv_type} {which} {bad}: the cut is seen"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_where_the_pages_lie_does_not_matter(isa: str, kv_type: str) -> None:
    results = []
    for order in range(3):
        layer = Layer(2, 32, 16, kv_type, [300, 45], seed=order)
        data = Sequences.random(layer, 4, seed=31)
        results.append(AttentionStep(layer, 4, isa=isa, threads=2)(data, [(0, 0, 300), (1, 0, 45)]))
    for other in results[1:]:
        for s in range(2):
            same_bits(other[s], results[0][s], f"{isa} {kv_type} sequence {s}")


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_shared_prefix_pages_serve_two_sequences(kv_type: str) -> None:
    """Two page tables that begin with the same pages give what each sequence gives with pages of its own."""
    layer = Layer(2, 32, 16, kv_type, [96, 96], seed=41)
    data = Sequences.random(layer, 4, seed=42)
    for source in (data.query, data.key, data.value):
        source[1][:64] = source[0][:64]
    call = AttentionStep(layer, 4, threads=2)
    want = call(data, [(0, 0, 96), (1, 0, 96)])
    layer.poison()
    layer.tables[1, :4] = layer.tables[0, :4]
    call(data, [(0, 0, 96)])
    same_bits(call(data, [(1, 64, 96)])[0], want[1][64:], kv_type)
