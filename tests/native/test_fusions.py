"""Fused programs beside the reference, op by op: results that overwrite what others still read, and random programs."""

import numpy as np
import pytest

from fakes.programs import RandomProgram, dense, with_logits
from sayfa.base.errors import ModelError
from sayfa.models.formats.dequant import dequantize
from sayfa.nn.program.native import NativeExecutor, why_not
from sayfa.nn.program.program import (
    ActMul,
    Embed,
    InputBatch,
    KvSpec,
    Linear,
    Program,
    ProgramBuilder,
    RmsNorm,
)
from sayfa.nn.program.reference import ReferenceExecutor

PAGE = 16
WIDTH = 1024


def overwriting(kind: str) -> Program:
    """Layers whose product, or the activation it ends in, writes the input of the norm that it reads."""
    rng = np.random.default_rng(0)
    builder = ProgramBuilder(KvSpec(1, 1, 16))
    x, normed = builder.buffer("x", WIDTH), builder.buffer("normed", WIDTH)
    gate_up = builder.buffer("gate_up", 2 * WIDTH)
    builder.add(Embed(dense(rng, 64, WIDTH), x))
    for _ in range(4):
        builder.add(RmsNorm(x, np.ones(WIDTH, np.float32), 1e-5, normed))
        if kind == "product":
            builder.add(Linear(normed, dense(rng, WIDTH, WIDTH), x, None, True))
        else:
            builder.add(Linear(normed, dense(rng, 2 * WIDTH, WIDTH, 2), gate_up))
            builder.add(ActMul(gate_up, x, "silu"))
    return with_logits(builder, x, dense(rng, 64, WIDTH))


def batch(num_tokens: int) -> InputBatch:
    """One sequence from the start in page 1, with logits for every token."""
    line = np.arange(num_tokens, dtype=np.int32)
    return InputBatch(
        line + 3, line, line + PAGE, np.array([0, num_tokens], np.int32), np.array([num_tokens], np.int32),
        np.array([[1]], np.int32), line,
    )  # fmt: skip


def native(program: Program, threads: int) -> NativeExecutor:
    executor = NativeExecutor(
        program, threads=threads, max_tokens=8, max_rows=8, page_size=PAGE, kv_type="float32", dtype="float32"
    )
    executor.allocate_pages(3)
    return executor


def reference(program: Program) -> ReferenceExecutor:
    executor = ReferenceExecutor(program, dequantize=dequantize, max_tokens=8, max_rows=8, page_size=PAGE)
    executor.allocate_pages(3)
    return executor


@pytest.mark.parametrize("kind", ["product", "activation"])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_what_overwrites_a_norm_s_input_races_with_nobody(kind, num_tokens):
    """Four workers, a hundred times: always the bits of one worker, and those are near the reference's numbers."""
    program = overwriting(kind)
    wanted = reference(program).run(batch(num_tokens))
    alone = native(program, 1).run(batch(num_tokens)).copy()
    assert np.abs(alone - wanted).max() < 1e-3
    crowd = native(program, 4)
    wrong = sum(not (crowd.run(batch(num_tokens)) == alone).all() for _ in range(100))
    assert wrong == 0, f"{wrong} of 100 steps have other bits"


def test_random_programs_give_the_reference_s_numbers():
    """Ops that overwrite each other's inputs, in steps of one row, of a few (joined ops) and of more."""
    for seed in range(40):
        program = RandomProgram(seed).build(20)
        assert why_not(program) is None
        theirs, ours = reference(program), native(program, 3)
        for num_tokens in (1, 3, 8):
            wanted, got = theirs.run(batch(num_tokens)), ours.run(batch(num_tokens))
            assert np.isfinite(wanted).all()
            far = np.abs(got - wanted)
            limit = 2e-3 * np.abs(wanted).max()
            assert far.max() < limit, f"seed {seed}, {num_tokens} tokens: {far.max()} and {far.mean()} (largest, mean)"


def test_a_product_in_place_is_left_to_the_reference():
    """Its workers would read rows that others have overwritten; the sentence names op and buffer."""
    rng = np.random.default_rng(0)
    builder = ProgramBuilder(KvSpec(1, 1, 16))
    x = builder.buffer("x", WIDTH)
    builder.add(Embed(dense(rng, 64, WIDTH), x))
    builder.add(Linear(x, dense(rng, WIDTH, WIDTH), x))
    program = with_logits(builder, x, dense(rng, 64, WIDTH))
    assert "Linear writes x" in str(why_not(program))
    with pytest.raises(ModelError, match="another buffer"):
        native(program, 1)


def test_a_norm_of_another_width_is_refused_fused_too():
    """The product's rows are then the norm's input, whose width counts: else it would be read beyond its end."""
    rng = np.random.default_rng(0)
    builder = ProgramBuilder(KvSpec(1, 1, 16))
    short, normed, x = builder.buffer("short", 32), builder.buffer("normed", WIDTH), builder.buffer("x", WIDTH)
    builder.add(Embed(dense(rng, 64, 32), short))
    builder.add(RmsNorm(short, np.ones(32, np.float32), 1e-5, normed))
    builder.add(Linear(normed, dense(rng, WIDTH, WIDTH), x))
    with pytest.raises(ModelError, match="1024 columns meet 32"):
        native(with_logits(builder, x, dense(rng, 64, WIDTH)), 1)
