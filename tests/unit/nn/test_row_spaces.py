"""An op's operands have rows of the spaces that it runs over: else it would read and write beyond a buffer's end."""

import numpy as np
import pytest

from fakes.programs import dense
from sayfa.base.errors import ModelError
from sayfa.nn.program.program import (
    ActMul,
    Add,
    Attention,
    Embed,
    Gather,
    HeadNorm,
    KvSpec,
    KvWrite,
    Linear,
    Op,
    ProgramBuilder,
    RmsNorm,
    Rope,
    RopeTable,
    View,
)

WIDTH = 32
SQUARE = dense(np.random.default_rng(0), WIDTH, WIDTH)
ONES = np.ones(WIDTH, np.float32)
TURN = RopeTable(np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32), "half")


class Buffers:
    """Two buffers of each space: `t` and `t2` of tokens, `l` and `l2` of logits; `double` ones are twice as wide."""

    def __init__(self) -> None:
        self.builder = ProgramBuilder(KvSpec(1, 1, 16))
        self.t, self.t2 = (self.builder.buffer(name, WIDTH) for name in ("t", "t2"))
        self.l, self.l2 = (self.builder.buffer(name, WIDTH, "logits") for name in ("l", "l2"))
        self.t_double = self.builder.buffer("t_double", 2 * WIDTH)
        self.l_double = self.builder.buffer("l_double", 2 * WIDTH, "logits")
        self.t_view, self.l_view = View(self.t, 0, WIDTH), View(self.l, 0, WIDTH)

    def finish(self, *ops: Op) -> None:
        for op in ops:
            self.builder.add(op)
        self.builder.finish(self.l)


# Op, with the operands that its error names.
MIXED = {
    "Embed into logits": (lambda b: Embed(SQUARE, b.l), {"out": "l"}),
    "RmsNorm to logits": (lambda b: RmsNorm(b.t, ONES, 1e-5, b.l), {"x": "t", "out": "l"}),
    "RmsNorm of logits": (lambda b: RmsNorm(b.l, ONES, 1e-5, b.t), {"x": "l", "out": "t"}),
    "HeadNorm of logits": (lambda b: HeadNorm(b.l_view, 2, ONES[:16], 1e-5), {"x": "l"}),
    "Linear to logits": (lambda b: Linear(b.t, SQUARE, b.l), {"x": "t", "out": "l"}),
    "Linear of logits": (lambda b: Linear(b.l, SQUARE, b.t, None, True), {"x": "l", "out": "t"}),
    "Rope of logits": (lambda b: Rope(b.l_view, 2, TURN), {"x": "l"}),
    "KvWrite of a key of logits": (lambda b: KvWrite(b.l_view, b.t_view, 0), {"key": "l", "value": "t"}),
    "KvWrite of a value of logits": (lambda b: KvWrite(b.t_view, b.l_view, 0), {"key": "t", "value": "l"}),
    "Attention of logits": (lambda b: Attention(b.l_view, b.t2, 0, 2, 1.0), {"query": "l", "out": "t2"}),
    "Attention to logits": (lambda b: Attention(b.t_view, b.l2, 0, 2, 1.0), {"query": "t", "out": "l2"}),
    "ActMul of logits": (lambda b: ActMul(b.l_double, b.t, "silu"), {"x": "l_double", "out": "t"}),
    "ActMul to logits": (lambda b: ActMul(b.t_double, b.l, "silu"), {"x": "t_double", "out": "l"}),
    "ActMul in logits": (lambda b: ActMul(b.l_double, b.l, "silu"), {"x": "l_double", "out": "l"}),
    "Add of logits": (lambda b: Add(b.t, b.l), {"x": "t", "y": "l"}),
    "Add to logits": (lambda b: Add(b.l, b.t), {"x": "l", "y": "t"}),
    "Gather of logits": (lambda b: Gather(b.l, b.l2), {"x": "l", "out": "l2"}),
    "Gather to tokens": (lambda b: Gather(b.t, b.t2), {"x": "t", "out": "t2"}),
    "Gather in place": (lambda b: Gather(b.t, b.t), {"x": "t", "out": "t"}),
}


@pytest.mark.parametrize("kind", MIXED)
def test_an_op_whose_operands_have_rows_of_other_spaces_is_refused(kind):
    """The error names the op, each operand with its buffer and space, and the spaces that the op runs over."""
    make, operands = MIXED[kind]
    buffers = Buffers()
    with pytest.raises(ModelError) as caught:
        buffers.finish(make(buffers))
    said = str(caught.value)
    assert said.startswith(kind.split()[0])
    for operand, name in operands.items():
        assert f"{operand} is {name} [{'tokens' if name[0] == 't' else 'logits'}]" in said
    assert "it needs " in said


def test_ops_of_one_space_pass():
    """Norms, products and sums run over either space; Gather leads from tokens to logits."""
    b = Buffers()
    b.finish(
        Embed(SQUARE, b.t), HeadNorm(b.t_view, 2, ONES[:16], 1e-5), Rope(b.t_view, 2, TURN),
        KvWrite(b.t_view, b.t_view, 0), Attention(b.t_view, b.t2, 0, 2, 1.0), ActMul(b.t_double, b.t, "silu"),
        RmsNorm(b.t, ONES, 1e-5, b.t2), Linear(b.t2, SQUARE, b.t, None, True), Add(b.t, b.t2),
        Gather(b.t, b.l), RmsNorm(b.l, ONES, 1e-5, b.l2), Linear(b.l2, SQUARE, b.l), Add(b.l, b.l2),
    )  # fmt: skip


def test_a_result_with_a_row_for_each_token_is_refused():
    """The sampler would take the first tokens' rows for those that were asked for."""
    buffers = Buffers()
    with pytest.raises(ModelError, match=r"logits are t \[tokens\].*Gather"):
        buffers.builder.finish(buffers.t)
