"""From a program's plain ops to the native ones: which neighbours are fused, and where each buffer lies in the arena.

Called by `native` only. Pure bookkeeping over the op list: no addresses, no native library, so it is tested alone.

Fusions, each only where nothing else looks at what disappears, and nothing overwrites what is read later than before:
  1. RmsNorm → Linear: the norm is made while rows are prepared (quantized) for the product, once for all its consumers;
  2. Linear → ActMul: gate and up stand side by side in a panel, and the product writes act(gate) * up;
  3. Linear with add: the residual is added as the product is written (the op says so itself);
  4. runs of cheap token ops are joined into one for steps of few tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sayfa.nn.program.program import (
    ActMul,
    Add,
    Attention,
    Buffer,
    Embed,
    Gather,
    HeadNorm,
    KvWrite,
    Linear,
    Op,
    Program,
    RmsNorm,
    Rope,
    Weight,
)

JOIN_MAX_ROWS = 4
"""Steps of at most so many tokens run joined ops on one worker: handing an op to all costs more than doing it."""

ROW_ALIGN = 16
"""Floats; rows of activations start at 64-byte borders."""

_CHEAP = (HeadNorm, Rope, KvWrite, Add, RmsNorm)


@dataclass(eq=False)
class RowGroup:
    """Rows prepared once for all the products that read them. norm: made on the way, or none."""

    x: Buffer
    norm: RmsNorm | None
    consumers: list[int] = field(default_factory=list)
    formats: int = 0


@dataclass(frozen=True, eq=False)
class Prepare:
    """Make the prepared rows of a group."""

    group: RowGroup


@dataclass(frozen=True, eq=False)
class Product:
    """A Linear with what it swallowed. `act`: the gated activation that it ends in, or none; `out` is then ActMul's."""

    op: Linear
    group: RowGroup
    out: Buffer
    act: ActMul | None


@dataclass(frozen=True)
class Join:
    """The `count` ops before this one may be run as one for few tokens."""

    count: int


Lowered = Prepare | Product | Join | Embed | RmsNorm | HeadNorm | Rope | KvWrite | Attention | ActMul | Add | Gather


def reads(op: Op) -> tuple[Buffer, ...]:
    """Buffers whose earlier content the op looks at."""
    match op:
        case Embed():
            return ()
        case RmsNorm() | ActMul() | Gather():
            return (op.x,)
        case Linear():
            return (op.x, op.out) if op.add else (op.x,)
        case HeadNorm() | Rope():
            return (op.x.buffer,)
        case KvWrite():
            return (op.key.buffer, op.value.buffer)
        case Attention():
            return (op.query.buffer,)
        case Add():
            return (op.x, op.y)


def writes(op: Op) -> tuple[Buffer, ...]:
    """Buffers that the op changes."""
    match op:
        case KvWrite():
            return ()
        case HeadNorm() | Rope():
            return (op.x.buffer,)
        case Add():
            return (op.x,)
        case _:
            return (op.out,)


def why_not_parallel(program: Program) -> str | None:
    """A sentence that names the first op whose workers would read what others have overwritten, or None."""
    for op in program.ops:
        if isinstance(op, (Linear, ActMul)):
            read = op.x
        elif isinstance(op, Attention):
            read = op.query.buffer
        else:
            continue
        if op.out is read:
            return f"{type(op).__name__} writes {op.out.name}, which it reads; natively it needs another buffer"
    return None


def lower(
    program: Program, formats_of: Callable[[Linear, bool], int], can_pair: Callable[[Weight], bool]
) -> list[Lowered]:
    """Fuse and order. formats_of(op, paired): bits of the panel formats; can_pair: whether two pieces may alternate."""
    ops = program.ops
    gone, acts = _swallowed(program, can_pair)
    groups: dict[tuple[int, Buffer], RowGroup] = {}
    for index, op in enumerate(ops):
        if not isinstance(op, Linear):
            continue
        source = _last_write(ops, op.x, index)
        if (source, op.x) not in groups:
            made = ops[source] if source >= 0 else None
            norm = made if source in gone and isinstance(made, RmsNorm) else None
            groups[source, op.x] = RowGroup(norm.x if norm else op.x, norm)
        groups[source, op.x].consumers.append(index)
        groups[source, op.x].formats |= formats_of(op, index in acts)
    by_consumer = {index: group for group in groups.values() for index in group.consumers}
    lowered: list[Lowered] = []
    for index, op in enumerate(ops):
        if index in gone:
            continue
        if not isinstance(op, Linear):
            lowered.append(op)
            continue
        group = by_consumer[index]
        if group.consumers[0] == index:
            lowered.append(Prepare(group))
        act = acts.get(index)
        lowered.append(Product(op, group, act.out if act else op.out, act))
    return _joined(lowered)


def _swallowed(program: Program, can_pair: Callable[[Weight], bool]) -> tuple[set[int], dict[int, ActMul]]:
    """Indices of ops that disappear, and for each Linear index the ActMul it ends in."""
    ops = program.ops
    acts = {index: act for index in range(len(ops) - 1) if (act := _ending(program, index, can_pair))}
    norms = {index for index in range(len(ops)) if _can_wait(program, index, acts)}
    return norms | {index + 1 for index in acts}, acts


def _ending(program: Program, index: int, can_pair: Callable[[Weight], bool]) -> ActMul | None:
    """The ActMul that the product at `index` can end in, or None."""
    op, act = program.ops[index], program.ops[index + 1]
    if not isinstance(op, Linear) or not isinstance(act, ActMul) or act.out is op.x or op.out is program.logits:
        return None
    alone = _users(program.ops, op.out, index) == [index + 1]
    return act if alone and op.bias is None and not op.add and can_pair(op.weight) else None


def _can_wait(program: Program, index: int, acts: dict[int, ActMul]) -> bool:
    """Whether the op is a norm that only products look at, whose input stays until the last of them is done.

    In steps of few rows each worker of each product makes the norm for itself, while others already write results: so
    none of the products may write the norm's input either, nor an activation that one of them ends in.
    """
    ops, norm = program.ops, program.ops[index]
    if not isinstance(norm, RmsNorm) or norm.out is program.logits or norm.x is norm.out:
        return False
    users = _users(ops, norm.out, index)
    if not users or not all(_multiplies(ops[user], norm.out) for user in users):
        return False
    done = users[-1] + (2 if users[-1] in acts else 1)
    return not any(norm.x in writes(other) for other in ops[index + 1 : done])


def _multiplies(op: Op, x: Buffer) -> bool:
    return isinstance(op, Linear) and op.x is x and op.out is not x


def _users(ops: tuple[Op, ...], buffer: Buffer, made: int) -> list[int]:
    """Indices of the ops that read what op `made` wrote, until the buffer is written anew."""
    users = []
    for index in range(made + 1, len(ops)):
        if buffer in reads(ops[index]):
            users.append(index)
        elif buffer in writes(ops[index]):
            break
    return users


def _last_write(ops: tuple[Op, ...], buffer: Buffer, before: int) -> int:
    return next((index for index in range(before - 1, -1, -1) if buffer in writes(ops[index])), -1)


def _joined(lowered: list[Lowered]) -> list[Lowered]:
    result: list[Lowered] = []
    run = 0
    for op in [*lowered, None]:
        if isinstance(op, _CHEAP) and _is_token_op(op):
            run += 1
        else:
            if run > 1:
                result.append(Join(run))
            run = 0
        if op is not None:
            result.append(op)
    return result


def _is_token_op(op: HeadNorm | Rope | KvWrite | Add | RmsNorm) -> bool:
    return not isinstance(op, (Add, RmsNorm)) or op.x.rows == "tokens"


# --------------------------------------------------------------------------------------------------- the arena


def row_floats(width: int) -> int:
    """Floats from one row of a buffer to the next."""
    return -(-width // ROW_ALIGN) * ROW_ALIGN


@dataclass(frozen=True)
class Arena:
    """Byte offsets of what lives within a step. `prepared` is by group id, for groups that are prepared at all."""

    size: int
    buffers: dict[Buffer, int]
    prepared: dict[int, int]


def plan_arena(
    program: Program,
    lowered: list[Lowered],
    rows: dict[str, int],
    prepared_bytes: Callable[[RowGroup], int],
) -> Arena:
    """Place buffers and prepared rows so that no two that live at the same time overlap.

    rows: the most rows of each row space. prepared_bytes(group): bytes of one prepared row, 0 if not needed.
    """
    lives = _lifetimes(program, lowered)
    wanted: list[tuple[int, Buffer | RowGroup, tuple[int, int]]] = []
    for thing, life in lives.items():
        if isinstance(thing, Buffer):
            wanted.append((rows[thing.rows] * row_floats(thing.width) * 4, thing, life))
        elif prepared_bytes(thing):
            wanted.append((rows[thing.x.rows] * prepared_bytes(thing), thing, life))
    placed: list[tuple[int, int, tuple[int, int]]] = []
    arena = Arena(0, {}, {})
    size = 0
    for num_bytes, thing, life in sorted(wanted, key=lambda item: -item[0]):
        offset = 0
        for start, end, other in sorted(placed):
            if life[0] <= other[1] and other[0] <= life[1] and offset < end and start < offset + num_bytes:
                offset = end
        placed.append((offset, offset + -(-num_bytes // 64) * 64, life))
        size = max(size, placed[-1][1])
        if isinstance(thing, Buffer):
            arena.buffers[thing] = offset
        else:
            arena.prepared[id(thing)] = offset
    return Arena(size, arena.buffers, arena.prepared)


def _lifetimes(program: Program, lowered: list[Lowered]) -> dict[Buffer | RowGroup, tuple[int, int]]:
    """First and last index in the lowered list at which each buffer and each group is needed, both included."""
    lives: dict[Buffer | RowGroup, tuple[int, int]] = {}

    def needed(thing: Buffer | RowGroup, index: int) -> None:
        first, last = lives.get(thing, (index, index))
        lives[thing] = (min(first, index), max(last, index))

    for index, op in enumerate(lowered):
        match op:
            case Join():
                pass
            case Prepare():
                needed(op.group, index)
                needed(op.group.x, index)
            case Product():
                needed(op.group, index)
                needed(op.group.x, index)
                needed(op.out, index)
            case _:
                for buffer in (*reads(op), *writes(op)):
                    needed(buffer, index)
    needed(program.logits, len(lowered))
    return lives
