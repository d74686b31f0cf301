"""Programs made by hand: weights and an ending for those of a few ops, and random ones.

In random programs ops read and overwrite the same few buffers in every order that their meaning allows.
"""

from __future__ import annotations

import numpy as np

from fakes.single_op import random_piece
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
    RopeTable,
    View,
    Weight,
)

NARROW, WIDE, VOCAB, POSITIONS = 64, 128, 48, 16
_KV = KvSpec(2, 2, 16)
_LIKELY = ("norm", "linear", "linear", "act", "rope", "head_norm", "kv_write", "attention", "add")


def dense(rng: np.random.Generator, rows: int, columns: int, num_pieces: int = 1) -> Weight:
    """A float32 weight [rows, columns] in equal pieces; rows stay about as large when they are multiplied by it."""
    pieces = [random_piece(rng, "F32", rows // num_pieces, columns) for _ in range(num_pieces)]
    for piece in pieces:
        piece.data.view(np.float32)[:] *= np.float32(0.7 / columns**0.5)
    return Weight(tuple(pieces))


def with_logits(builder: ProgramBuilder, x: Buffer, head: Weight) -> Program:
    """Close a program whose logits are the wanted rows of x times `head`."""
    chosen, logits = builder.buffer("chosen", x.width, "logits"), builder.buffer("logits", head.rows, "logits")
    builder.add(Gather(x, chosen))
    builder.add(Linear(chosen, head, logits))
    return builder.finish(logits)


class RandomProgram:
    """Lays down ops one after another: what follows an op often reads what it wrote, as in models, but not always.

    Buffers: three narrow and three wide ones (a wide one holds gate and up, or query, key and value). Each, and the
    pages, is written before it is read, and no product writes what it reads.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._builder = ProgramBuilder(_KV)
        self._narrow = [self._builder.buffer(f"n{i}", NARROW) for i in range(3)]
        self._wide = [self._builder.buffer(f"w{i}", WIDE) for i in range(3)]

    def build(self, num_ops: int) -> Program:
        """Make a program of `num_ops` random ops between a beginning and an end; the end looks at two buffers."""
        for buffer in self._narrow:
            self._builder.add(Embed(Weight((random_piece(self._rng, "F32", VOCAB, NARROW),)), buffer))
        for buffer in self._wide:
            self._builder.add(Linear(self._narrow[0], self._halves(WIDE, NARROW), buffer))
        for layer in range(2):
            self._builder.add(KvWrite(View(self._wide[0], 64, 32), View(self._wide[0], 96, 32), layer))
        last: Op = self._builder.ops[-1]
        for _ in range(num_ops):
            last = self._next(last)
            self._builder.add(last)
        first, second = self._rng.choice(3, 2, replace=False)
        chosen, normed = (self._builder.buffer(name, NARROW, "logits") for name in ("chosen", "normed"))
        logits = self._builder.buffer("logits", VOCAB, "logits")
        self._builder.add(Add(self._narrow[first], self._narrow[second]))
        self._builder.add(Gather(self._narrow[first], chosen))
        self._builder.add(RmsNorm(chosen, self._vector(NARROW), 1e-5, normed))
        self._builder.add(Linear(normed, dense(self._rng, VOCAB, NARROW), logits))
        return self._builder.finish(logits)

    def _next(self, last: Op) -> Op:
        likely = self._rng.random() < 0.6
        if likely and isinstance(last, RmsNorm):
            return self._linear(last.out)
        if likely and isinstance(last, Linear):
            return ActMul(last.out, self._one(self._narrow), "silu") if last.out in self._wide else self._linear(last.x)
        kind = str(self._rng.choice(_LIKELY))
        wide = self._one(self._wide)
        query, key, value = View(wide, 0, 64), View(wide, 64, 32), View(wide, 96, 32)
        match kind:
            case "norm":
                same = self._one((self._narrow, self._wide))
                x, out = self._one(same), self._one(same)
                return RmsNorm(x, self._vector(x.width), 1e-5, out)
            case "linear":
                return self._linear(self._one(self._narrow + self._wide))
            case "act":
                return ActMul(wide, self._one(self._narrow), "silu")
            case "rope":
                cos, sin = (self._rng.standard_normal((POSITIONS, 8), dtype=np.float32) for _ in range(2))
                return Rope(self._one((query, key)), 2, RopeTable(cos, sin, "half"))
            case "head_norm":
                return HeadNorm(query, 4, self._vector(16), 1e-5)
            case "kv_write":
                return KvWrite(key, value, int(self._rng.integers(2)))
            case "attention":
                return Attention(query, self._one(self._narrow), int(self._rng.integers(2)), 4, 0.25)
            case _:
                x, y = self._rng.choice(3, 2, replace=False)
                return Add(self._narrow[x], self._narrow[y])

    def _linear(self, x: Buffer) -> Linear:
        out = self._one([buffer for buffer in self._narrow + self._wide if buffer is not x])
        plain = out in self._wide and self._rng.random() < 0.8
        bias = self._vector(out.width) if not plain and self._rng.random() < 0.2 else None
        return Linear(x, self._halves(out.width, x.width), out, bias, bool(not plain and self._rng.random() < 0.4))

    def _one(self, choices):  # type: ignore[no-untyped-def]
        return choices[int(self._rng.integers(len(choices)))]

    def _vector(self, length: int) -> np.ndarray:
        return self._rng.uniform(0.5, 1.5, length).astype(np.float32)

    def _halves(self, rows: int, columns: int) -> Weight:
        return dense(self._rng, rows, columns, 2)
