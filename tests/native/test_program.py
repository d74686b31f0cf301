"""Whole programs: fusing, the arena, and the law that a token's logits do not depend on who else is in the step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fakes import needs
from fakes.models import make_tiny
from fakes.programs import dense
from fakes.single_op import batch_of, random_piece
from fakes.steps import open_model
from sayfa.base.errors import ModelError
from sayfa.nn.program.lowering import Join, Prepare, Product, RowGroup, lower, plan_arena, row_floats
from sayfa.nn.program.native import NativeExecutor, isas, why_not
from sayfa.nn.program.program import (
    Attention,
    Buffer,
    Gather,
    InputBatch,
    KvSpec,
    Linear,
    Program,
    ProgramBuilder,
    RmsNorm,
    Weight,
    WeightPiece,
)

PAGE = 16
LENGTHS = (1, 15, 16, 17, 33, 5)


def quantized(program: Program, type_name: str) -> Program:
    """The same program with random weights of another type in every product whose K allows it."""
    rng = np.random.default_rng(1)
    ops = []
    for op in program.ops:
        if isinstance(op, Linear) and op.weight.columns % 32 == 0:
            pieces = [random_piece(rng, type_name, p.rows, p.columns, p.name) for p in op.weight.pieces]
            op = replace(op, weight=Weight(tuple(pieces)))
        ops.append(op)
    return replace(program, ops=tuple(ops))


def executor_of(program: Program, **options: object) -> NativeExecutor:
    """An executor with poisoned pages."""
    wish = {"threads": 2, "max_tokens": 128, "max_rows": 128, "page_size": PAGE, "kv_type": "float32", **options}
    made = NativeExecutor(program, **wish)  # type: ignore[arg-type]
    made.allocate_pages(64)
    made.poison_pages()
    return made


def step(parts: list[tuple[int, int, int]], ids: list[np.ndarray]) -> InputBatch:
    """A batch of (sequence, start, end) parts; sequence s owns pages 4s + 1 to 4s + 4. Logits for every token."""
    tokens, positions, slots, starts, ends, table = [], [], [], [0], [], []
    for sequence, start, end in parts:
        line = np.arange(start, end)
        tokens.append(ids[sequence][start:end])
        positions.append(line)
        slots.append((4 * sequence + 1 + line // PAGE) * PAGE + line % PAGE)
        starts.append(starts[-1] + end - start)
        ends.append(end)
        table.append(np.arange(4 * sequence + 1, 4 * sequence + 5))
    as_ints = [np.concatenate(part).astype(np.int32) for part in (tokens, positions, slots)]
    rows = [np.array(part, np.int32) for part in (starts, ends, table)]
    return InputBatch(*as_ints, *rows, np.arange(starts[-1], dtype=np.int32))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return {
        family: open_model(make_tiny(family, tmp_path_factory.mktemp("tiny") / family, seed=3))[1]
        for family in ("llama", "qwen3", "gemma3")
    }


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("type_name", ["F32", "BF16", "Q4_1", "Q8_0"])
def test_alone_chunked_and_in_a_crowd_are_the_same_bits(tiny, family, type_name, isa):
    """Logits of every token: whole and alone = in chunks of any size = in a crowd = with 1, 2 or 3 workers."""
    program = quantized(tiny[family], type_name)
    rng = np.random.default_rng(5)
    ids = [rng.integers(0, 200, length).astype(np.int32) for length in LENGTHS]
    executor = executor_of(program, threads=1, isa=isa)
    alone = [executor.run(step([(s, 0, length)], ids)).copy() for s, length in enumerate(LENGTHS)]
    assert all(np.isfinite(logits).all() for logits in alone)
    for threads in (1, 2, 3):
        executor = executor_of(program, threads=threads, isa=isa)
        done = [0] * len(LENGTHS)
        while any(have < length for have, length in zip(done, LENGTHS, strict=True)):
            parts = []
            for s in rng.permutation(len(LENGTHS)):
                end = min(LENGTHS[s], done[s] + int(rng.integers(0, 12)))
                if end > done[s]:
                    parts.append((int(s), done[s], end))
                    done[s] = end
            if not parts:
                continue
            logits = executor.run(step(parts, ids))
            at = 0
            for s, start, end in parts:
                got = logits[at : at + end - start]
                at += end - start
                assert (got == alone[s][start:end]).all(), f"sequence {s} [{start}, {end}), {threads} workers, {parts}"


def test_norms_activations_and_gate_up_are_fused(tiny):
    """In a llama no norm and no activation is left, each product has its prepared rows, cheap ops are joined."""
    lowered = lower(tiny["llama"], lambda op, paired: 1, lambda weight: len(weight.pieces) == 2)
    kinds = [type(op).__name__ for op in lowered]
    layers = sum(isinstance(op, Attention) for op in lowered)
    assert "ActMul" not in kinds
    assert "RmsNorm" not in kinds
    assert kinds.count("Product") == 4 * layers + 1
    assert kinds.count("Prepare") == kinds.count("Product")
    assert kinds.count("Join") == layers
    assert sum(isinstance(op, Product) and op.act is not None for op in lowered) == layers


def _chain(*, other_user: bool = False, changed_between: bool = False) -> Program:
    builder = ProgramBuilder(KvSpec(0, 1, 16))
    x, normed, out = (builder.buffer(name, 32) for name in ("x", "normed", "out"))
    weight = dense(np.random.default_rng(0), 32, 32)
    builder.add(RmsNorm(x, np.ones(32, np.float32), 1e-5, normed))
    if changed_between:
        builder.add(Linear(out, weight, x))
    builder.add(Linear(normed, weight, out))
    if other_user:
        builder.add(RmsNorm(normed, np.ones(32, np.float32), 1e-5, x))
    return builder.finish(builder.buffer("last", 32, "logits"))


@pytest.mark.parametrize("reason", ["other_user", "changed_between"])
def test_a_norm_that_somebody_else_needs_is_not_fused(reason):
    """Another reader of the normed rows, or a change of the norm's input before the product, forbids it."""
    assert not any(isinstance(op, RmsNorm) for op in lower(_chain(), lambda op, paired: 1, lambda weight: False))
    kept = lower(_chain(**{reason: True}), lambda op, paired: 1, lambda weight: False)
    assert sum(isinstance(op, RmsNorm) for op in kept) >= 1


def test_two_products_of_the_same_rows_share_one_preparation():
    """Formats of both consumers are united; a buffer written anew makes a new group."""
    builder = ProgramBuilder(KvSpec(0, 1, 16))
    x, a, b = (builder.buffer(name, 32) for name in ("x", "a", "b"))
    weight = dense(np.random.default_rng(0), 32, 32)
    first, second, third = Linear(x, weight, a), Linear(x, weight, b), Linear(a, weight, b)
    for op in (first, second, third):
        builder.add(op)
    bits = {id(first): 1, id(second): 2, id(third): 4}
    lowered = lower(
        builder.finish(builder.buffer("last", 32, "logits")), lambda op, paired: bits[id(op)], lambda w: False
    )
    assert [op.group.formats for op in lowered if isinstance(op, Prepare)] == [3, 4]


def test_what_lives_at_the_same_time_never_overlaps():
    """Random programs: any two buffers or prepared rows whose lives meet have disjoint bytes."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        builder = ProgramBuilder(KvSpec(0, 1, 16))
        buffers = [builder.buffer(f"b{i}", int(rng.integers(1, 90))) for i in range(8)]
        for _ in range(20):
            x, out = rng.choice(7, 2, replace=False)
            piece = WeightPiece("w", buffers[out].width, buffers[x].width, "F32", np.zeros(0, np.uint8))
            builder.add(Linear(buffers[x], Weight((piece,)), buffers[out]))
        builder.add(Linear(buffers[0], Weight((piece,)), buffers[7]))
        last = builder.buffer("last", buffers[7].width, "logits")
        builder.add(Gather(buffers[7], last))
        program = builder.finish(last)
        lowered = lower(program, lambda op, paired: 1, lambda weight: False)
        rows = {"tokens": 7, "logits": 3}
        arena = plan_arena(program, lowered, rows, lambda group: 64)
        spans: list[tuple[int, int, int, int]] = []
        things: dict[object, tuple[int, int]] = {}
        for index, op in enumerate(lowered):
            users: list[Buffer | RowGroup] = []
            if isinstance(op, Prepare):
                users = [op.group, op.group.x]
            elif isinstance(op, Product):
                users = [op.group, op.group.x, op.out]
            elif isinstance(op, Gather):
                users = [op.x, op.out]
            for thing in users:
                first, _ = things.get(thing, (index, index))
                things[thing] = (first, index)
        things[program.logits] = (things[program.logits][0], len(lowered))
        for thing, (first, last) in things.items():
            if isinstance(thing, Buffer):
                start, size = arena.buffers[thing], rows[thing.rows] * row_floats(thing.width) * 4
            else:
                assert isinstance(thing, RowGroup)
                start, size = arena.prepared[id(thing)], 7 * 64
            assert start % 64 == 0
            assert start + size <= arena.size
            for other_start, other_end, other_first, other_last in spans:
                if first <= other_last and other_first <= last:
                    assert start + size <= other_start or other_end <= start
            spans.append((start, start + size, first, last))


BAD_BATCHES = {
    "token_ids": lambda b: replace(b, token_ids=b.token_ids - 1000),
    "positions": lambda b: replace(b, positions=b.positions + 1),
    "slots": lambda b: replace(b, slots=b.slots + 10_000),
    "logit_rows": lambda b: replace(b, logit_rows=b.logit_rows + 1),
    "page_table": lambda b: replace(b, page_table=b.page_table + 64),
    "query_start": lambda b: replace(b, query_start=b.query_start + 1),
    "context_len": lambda b: replace(b, context_len=b.context_len * 0),
    "fewer pages": lambda b: replace(b, page_table=np.ascontiguousarray(b.page_table[:, :1])),
    "one entry per token": lambda b: replace(b, slots=b.slots[:-1]),
    "tokens, the executor was made for": lambda b: batch_of(129),
}


@pytest.mark.parametrize("field", BAD_BATCHES)
def test_a_number_out_of_range_is_refused_before_it_is_used(tiny, field):
    """Each index of a batch is compared with its limit; the error names the field (T11)."""
    executor = executor_of(tiny["llama"])
    good = step([(0, 0, 20)], [np.arange(20, dtype=np.int32)])
    before = executor.run(good).copy()
    with pytest.raises(ValueError, match=field):
        executor.run(BAD_BATCHES[field](good))
    assert (executor.run(good) == before).all()


def test_a_row_that_ends_behind_the_last_token_is_refused_unread(tiny):
    """The check itself stays inside the arrays: what lies behind their ends would pass here, and is not looked at."""
    executor = executor_of(tiny["llama"])
    line = np.arange(16, dtype=np.int32)
    starts, ends, table = np.array([0, 5, 1], np.int32), np.array([5, 1], np.int32), np.ones((2, 4), np.int32)
    with pytest.raises(ValueError, match=r"query_start .* row 0"):
        executor.run(InputBatch(line[:1], line[:1], line[:1] + PAGE, starts, ends, table, line[:1]))


def test_arrays_of_another_type_or_order_are_refused(tiny):
    """Only C-contiguous int32 arrays pass."""
    executor = executor_of(tiny["llama"])
    good = step([(0, 0, 20)], [np.arange(20, dtype=np.int32)])
    for bad in (good.positions.astype(np.int64), np.repeat(good.positions, 2)[::2], good.positions[None]):
        with pytest.raises(TypeError):
            executor.run(replace(good, positions=bad))


def test_copied_pages_hold_the_same_keys_and_values(tiny):
    """A sequence goes on in copies of its pages, the old ones poisoned: the same logits."""
    executor = executor_of(tiny["llama"])
    ids = [np.arange(30, dtype=np.int32), np.arange(30, dtype=np.int32)]
    executor.run(step([(0, 0, 20)], ids))
    wanted = executor.run(step([(0, 20, 21)], ids)).copy()
    executor.run(step([(0, 0, 20)], ids))
    executor.copy_pages([(1, 5), (2, 6)])
    assert (executor.run(step([(1, 20, 21)], ids)) == wanted).all()


def test_a_page_that_is_not_there_is_not_copied(tiny):
    """Both page numbers are compared with the pages that there are, before a byte moves."""
    executor = executor_of(tiny["llama"])
    for copy in [(1, 64), (64, 1), (1, -1), (-1, 1)]:
        with pytest.raises(ValueError, match=r"page (64|-1) cannot be copied, allowed are 0 to 63"):
            executor.copy_pages([copy])


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_memory_got_ahead_of_its_use_is_there_and_changes_nothing(tiny):
    """Between two steps every page gets its memory: what is written stays, and the rest is resident."""
    needs.memory_ahead_of_its_use()
    ids = [np.arange(30, dtype=np.int32)]
    executor = executor_of(tiny["llama"])
    executor.run(step([(0, 0, 20)], ids))
    wanted = executor.run(step([(0, 20, 21)], ids)).copy()
    executor.allocate_pages((40 << 20) // executor.bytes_per_page)
    executor.run(step([(0, 0, 20)], ids))
    before = resident_kib()
    assert sum(1 for _ in executor.populate_pages()) >= 20
    assert resident_kib() - before > 30 << 10
    assert (executor.run(step([(0, 20, 21)], ids)) == wanted).all()


def test_wishes_that_cannot_be_met_are_refused_in_words(tiny):
    """Unknown names and sizes raise ModelError with the choices."""
    refused = [
        ({"isa": "mmx"}, "processor cannot run .* plain"),
        ({"kv_type": "fp8"}, "bfloat16"),
        ({"dtype": "half"}, "float32"),
        ({"page_size": 48}, "16, 32, 64"),
    ]
    for wish, word in refused:
        with pytest.raises(ModelError, match=word):
            executor_of(tiny["llama"], **wish)


def test_why_not_names_the_weight_and_its_type():
    """A type that has no native product is named, with the known ones."""
    builder = ProgramBuilder(KvSpec(0, 1, 16))
    x, out = (builder.buffer(name, 32, "logits") for name in ("x", "out"))
    builder.add(Linear(x, Weight((WeightPiece("blk.0.w", 32, 32, "IQ2_XXS", np.zeros(0, np.uint8)),)), out))
    reason = why_not(builder.finish(out))
    assert reason is not None
    assert "blk.0.w" in reason
    assert "IQ2_XXS" in reason
    assert "Q4_K" in reason


def test_a_weight_with_too_few_bytes_is_refused():
    """Bytes are compared with shape and type before any is read."""
    builder = ProgramBuilder(KvSpec(0, 1, 16))
    x, out = (builder.buffer(name, 32, "logits") for name in ("x", "out"))
    builder.add(Linear(x, Weight((WeightPiece("w", 32, 32, "Q8_0", np.zeros(1087, np.uint8)),)), out))
    with pytest.raises(ModelError, match="1087 bytes"):
        NativeExecutor(builder.finish(out), threads=1, max_tokens=1, max_rows=1, page_size=16, kv_type="float32")


def test_timings_name_every_op_that_ran(tiny):
    """Op times are positive and cover the kinds of the program; off by default."""
    executor = executor_of(tiny["llama"])
    batch = step([(0, 0, 20)], [np.arange(20, dtype=np.int32)])
    executor.run(batch)
    executor.time_ops(True)
    executor.run(batch)
    times = executor.op_times()
    assert {"embed", "linear", "prepare", "rope", "kv_write", "attention"} <= set(times)
    assert all(seconds > 0 for seconds in times.values())


def test_few_tokens_run_the_joined_ops(tiny):
    """Ops joined for few tokens replace their single forms, and only then."""
    lowered = lower(tiny["llama"], lambda op, paired: 1, lambda weight: len(weight.pieces) == 2)
    assert any(isinstance(op, Join) for op in lowered)
    executor = executor_of(tiny["llama"])
    executor.time_ops(True)
    kinds = []
    for length in (3, 20):
        executor.run(step([(0, 0, length)], [np.arange(20, dtype=np.int32)]))
        kinds.append(set(executor.op_times()))
    assert "rope+rope+kv_write" in kinds[0]
    assert "rope" not in kinds[0]
    assert "rope" in kinds[1]
    assert "rope+rope+kv_write" not in kinds[1]
