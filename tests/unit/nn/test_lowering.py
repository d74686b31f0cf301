"""Lowering keeps what a program means: fused, joined and placed in one arena, every buffer holds what plain ops give.

Values are names of how they came about, so that two are equal exactly if the same ops made them of the same things.
"""

import numpy as np
import pytest

from fakes.programs import RandomProgram, dense, with_logits
from sayfa.nn.program.lowering import (
    Arena,
    Join,
    Lowered,
    Prepare,
    Product,
    RowGroup,
    lower,
    plan_arena,
    row_floats,
    why_not_parallel,
)
from sayfa.nn.program.program import (
    ActMul,
    Add,
    Attention,
    Buffer,
    Embed,
    Gather,
    HeadNorm,
    KvSpec,
    KvWrite,
    Linear,
    Op,
    Program,
    ProgramBuilder,
    RmsNorm,
    Rope,
    View,
)

ROWS = {"tokens": 7, "logits": 3}
PREPARED_BYTES = 192
CHEAP = (HeadNorm, Rope, KvWrite, Add, RmsNorm)


def lowered_of(program: Program) -> list[Lowered]:
    return lower(program, lambda op, paired: 1, lambda weight: len(weight.pieces) == 2)


class Names:
    """Gives one number to each way in which a value can come about."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}

    def __call__(self, *made_of: object) -> int:
        return self._known.setdefault(made_of, len(self._known))


class Memory:
    """What buffers and prepared rows hold. With an arena, a write destroys everything whose bytes it overlaps."""

    def __init__(self, names: Names, arena: Arena | None = None) -> None:
        self.names = names
        self._held: dict[Buffer | int, int] = {}
        self._spans: dict[Buffer | int, tuple[int, int]] = {}
        if arena:
            for buffer, start in arena.buffers.items():
                self._spans[buffer] = start, start + ROWS[buffer.rows] * row_floats(buffer.width) * 4
            for group, start in arena.prepared.items():
                self._spans[group] = start, start + ROWS["tokens"] * PREPARED_BYTES
        self.pages: list[tuple[int, int, int]] = []

    def get(self, what: Buffer | int) -> int:
        return self._held.setdefault(what, self.names("never written", what))

    def put(self, what: Buffer | int, value: int) -> None:
        if span := self._spans.get(what):
            for other, (start, end) in self._spans.items():
                if start < span[1] and span[0] < end:
                    self._held[other] = self.names("overwritten", len(self._held), value)
        self._held[what] = value

    def run(self, op: Op) -> None:
        """One plain op."""
        name, get = self.names, self.get
        match op:
            case Embed():
                self.put(op.out, name("embed", id(op.table)))
            case RmsNorm():
                self.put(op.out, name("norm", id(op.weight), get(op.x)))
            case Linear():
                self.multiply(op, get(op.x), op.out, None)
            case ActMul():
                self.put(op.out, name("act", get(op.x)))
            case HeadNorm() | Rope():
                self.put(op.x.buffer, name(id(op), get(op.x.buffer)))
            case KvWrite():
                self.pages.append((op.layer, get(op.key.buffer), get(op.value.buffer)))
            case Attention():
                self.put(op.out, name("attention", op.layer, get(op.query.buffer), *self.pages))
            case Add():
                self.put(op.x, name("add", get(op.x), get(op.y)))
            case Gather():
                self.put(op.out, name("gather", get(op.x)))

    def multiply(self, op: Linear, rows: int, out: Buffer, act: ActMul | None) -> None:
        """A product of rows that hold `rows`, with what it ends in."""
        value = self.names("linear", id(op.weight), id(op.bias) if op.bias is not None else 0, rows)
        if op.add:
            value = self.names("add", self.get(out), value)
        self.put(out, self.names("act", value) if act else value)

    def rows_of(self, group: RowGroup) -> int:
        """What preparing the group's rows now gives."""
        rows = self.get(group.x)
        return self.names("norm", id(group.norm.weight), rows) if group.norm else rows


def run_lowered(lowered: list[Lowered], memory: Memory, *, alone: bool) -> None:
    """Run as the library does. alone: a step of one row, which each worker of each product prepares for itself."""
    for index, op in enumerate(lowered):
        match op:
            case Join():
                run = lowered[index - op.count : index]
                assert len(run) == op.count
                assert all(isinstance(other, CHEAP) for other in run)
            case Prepare():
                if not alone:
                    memory.put(id(op.group), memory.rows_of(op.group))
            case Product():
                assert op.out is not op.group.x, "some workers prepare their rows from x while others write into it"
                rows = memory.rows_of(op.group) if alone else memory.get(id(op.group))
                memory.multiply(op.op, rows, op.out, op.act)
            case _:
                memory.run(op)


def holds(program: Program, lowered: list[Lowered], *, alone: bool) -> bool:
    """Whether the lowered list gives the logits and the K and V that the plain one gives."""
    names = Names()
    wanted = Memory(names)
    for op in program.ops:
        wanted.run(op)
    got = Memory(names, plan_arena(program, lowered, ROWS, lambda group: PREPARED_BYTES))
    run_lowered(lowered, got, alone=alone)
    return got.get(program.logits) == wanted.get(program.logits) and got.pages == wanted.pages


@pytest.mark.parametrize("alone", [True, False], ids=["one row", "many rows"])
def test_a_lowered_program_means_the_same(alone):
    """Random programs whose ops overwrite each other's inputs: fused, joined and in one arena they give the same."""
    seen = {"norms": 0, "acts": 0, "joins": 0, "shared": 0}
    for seed in range(400):
        program = RandomProgram(seed).build(24)
        assert why_not_parallel(program) is None
        lowered = lowered_of(program)
        assert holds(program, lowered, alone=alone), f"seed {seed}: {lowered}"
        products = [op for op in lowered if isinstance(op, Product)]
        seen["norms"] += sum(op.group.norm is not None for op in products)
        seen["acts"] += sum(op.act is not None for op in products)
        seen["joins"] += sum(isinstance(op, Join) for op in lowered)
        seen["shared"] += sum(len(op.group.consumers) > 1 for op in products)
    assert min(seen.values()) > 200, f"the law was hardly attacked: {seen}"


class Bench:
    """Buffers of one width and weights for programs of a few ops."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.builder = ProgramBuilder(KvSpec(1, 1, 16))
        self.one = dense(rng, 32, 32)
        self.two = dense(rng, 64, 32, 2)
        self.scale = np.ones(32, np.float32)
        self.x, self.n, self.y, self.z = (self.builder.buffer(name, 32) for name in "xnyz")
        self.gate_up = self.builder.buffer("gate_up", 64)

    def norm(self) -> RmsNorm:
        return RmsNorm(self.x, self.scale, 1e-5, self.n)

    def program(self, *ops: Op) -> Program:
        """The ops between one that writes x and one that reads it."""
        self.builder.ops = [Embed(self.one, self.x), *ops]
        return with_logits(self.builder, self.x, self.one)


def view(buffer: Buffer) -> View:
    return View(buffer, 0, buffer.width)


# What overwrites the norm's input while one of the products that read the normed row is still to be done, or is at it.
OVERWRITERS = {
    "the only product": lambda b: [Linear(b.n, b.one, b.x)],
    "the only product, adding": lambda b: [Linear(b.n, b.one, b.x, None, True)],
    "the last product": lambda b: [Linear(b.n, b.one, b.y), Linear(b.n, b.one, b.x, None, True)],
    "the first product": lambda b: [Linear(b.n, b.one, b.x, None, True), Linear(b.n, b.one, b.y)],
    "the only product's activation": lambda b: [Linear(b.n, b.two, b.gate_up), ActMul(b.gate_up, b.x, "silu")],
    "the last product's activation": lambda b: [
        Linear(b.n, b.one, b.y), Linear(b.n, b.two, b.gate_up), ActMul(b.gate_up, b.x, "silu"),
    ],
    "the first product's activation": lambda b: [
        Linear(b.n, b.two, b.gate_up), ActMul(b.gate_up, b.x, "silu"), Linear(b.n, b.one, b.y),
    ],
    "a turn of a view": lambda b: [Rope(view(b.x), 2, None), Linear(b.n, b.one, b.y)],  # type: ignore[arg-type]
    "a norm of a view": lambda b: [HeadNorm(view(b.x), 2, b.scale, 1e-5), Linear(b.n, b.one, b.y)],
    "attention": lambda b: [
        KvWrite(view(b.x), view(b.x), 0), Attention(view(b.x), b.x, 0, 2, 1.0), Linear(b.n, b.one, b.y),
    ],
    "a sum": lambda b: [Add(b.x, b.y), Linear(b.n, b.one, b.y)],
}  # fmt: skip


@pytest.mark.parametrize("by", OVERWRITERS)
def test_a_norm_whose_input_is_overwritten_is_made_before(by):
    """It stays an op of its own: a product's workers would each make it from a row that another one overwrites."""
    bench = Bench()
    lowered = lowered_of(bench.program(bench.norm(), *OVERWRITERS[by](bench)))
    assert any(isinstance(op, RmsNorm) for op in lowered)
    assert all(op.out is not op.group.x for op in lowered if isinstance(op, Product))


def test_a_norm_whose_input_is_overwritten_afterwards_is_fused():
    """As in every model: the residual is added to the norm's input when the products are done."""
    bench = Bench()
    ops = [
        bench.norm(), Linear(bench.n, bench.two, bench.gate_up), ActMul(bench.gate_up, bench.y, "silu"),
        Linear(bench.y, bench.one, bench.x, None, True),
    ]  # fmt: skip
    assert not any(isinstance(op, (RmsNorm, ActMul)) for op in lowered_of(bench.program(*ops)))
    unfused = [*ops[:2], KvWrite(view(bench.z), view(bench.z), 0), *ops[2:]]
    kept = lowered_of(bench.program(*unfused))
    assert sum(isinstance(op, ActMul) for op in kept) == 1


def test_an_activation_into_the_product_s_own_rows_is_an_op_of_its_own():
    """Linear (x -> gate_up), ActMul (gate_up -> x): as one, workers would write into rows that others read."""
    bench = Bench()
    program = bench.program(Linear(bench.x, bench.two, bench.gate_up), ActMul(bench.gate_up, bench.x, "silu"))
    assert any(isinstance(op, ActMul) for op in lowered_of(program))


def test_rows_are_prepared_together_only_if_they_are_the_same():
    """Neither two buffers that nobody has written, nor a buffer before and after a change, share a preparation."""
    bench = Bench()
    given = [Linear(bench.y, bench.one, bench.x), Linear(bench.z, bench.one, bench.n)]
    changed = [Linear(bench.x, bench.one, bench.y), Add(bench.x, bench.n), Linear(bench.x, bench.one, bench.z)]
    turned = [Linear(bench.x, bench.one, bench.y), Rope(view(bench.x), 2, None)]  # type: ignore[arg-type]
    program = bench.program(*given, *changed, *turned, Linear(bench.x, bench.one, bench.n))
    products = [op for op in lowered_of(program) if isinstance(op, Product)]
    assert all(op.group.x is op.op.x for op in products)
    assert len({id(op.group) for op in products}) == 6  # one for both products between the sum and the turn


IN_PLACE = {
    "Linear": lambda b: Linear(b.x, b.one, b.x),
    "Attention": lambda b: Attention(view(b.x), b.x, 0, 2, 1.0),
    "ActMul": lambda b: ActMul(b.x, b.x, "silu"),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_an_op_that_cannot_work_in_place_is_named(kind):
    """Its workers would read what others have overwritten; norms, turns and sums may work in place."""
    bench = Bench()
    reason = why_not_parallel(bench.program(IN_PLACE[kind](bench)))
    assert reason is not None
    assert kind in reason
    assert "x" in reason
    in_place = [RmsNorm(bench.x, bench.scale, 1e-5, bench.x), Add(bench.x, bench.x), Rope(view(bench.x), 2, None)]  # type: ignore[arg-type]
    assert why_not_parallel(bench.program(*in_place)) is None
