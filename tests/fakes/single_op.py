"""Programs of a few ops, to hold the native library against formulas: random weights of every type, a batch, a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sayfa.models.formats.dequant import dequantize
from sayfa.nn.program.native import NativeExecutor
from sayfa.nn.program.native_weights import TENSOR_TYPES
from sayfa.nn.program.program import ActMul, InputBatch, KvSpec, Linear, ProgramBuilder, RmsNorm, Weight, WeightPiece

# Type -> (elements, bytes) of a block, and where its float16 scales stand.
BLOCKS = {
    "Q4_0": (32, 18, [0]), "Q4_1": (32, 20, [0, 2]), "Q5_0": (32, 22, [0]), "Q5_1": (32, 24, [0, 2]),
    "Q8_0": (32, 34, [0]), "Q2_K": (256, 84, [80, 82]), "Q3_K": (256, 110, [108]), "Q4_K": (256, 144, [0, 2]),
    "Q5_K": (256, 176, [0, 2]), "Q6_K": (256, 210, [208]),
}  # fmt: skip
K_QUANTS = [name for name in BLOCKS if name.endswith("_K")]
FLOATS = ["F32", "F16", "BF16"]
assert {*BLOCKS, *FLOATS} == set(TENSOR_TYPES)


def random_piece(rng: np.random.Generator, type_name: str, rows: int, columns: int, name: str = "w") -> WeightPiece:
    """A piece with random numbers of ordinary size; integer blocks are random bits with sane scales."""
    if type_name == "F32":
        data = rng.standard_normal((rows, columns), dtype=np.float32).view(np.uint8)
    elif type_name == "F16":
        data = rng.standard_normal((rows, columns)).astype(np.float16).view(np.uint8)
    elif type_name == "BF16":
        data = (rng.standard_normal((rows, columns), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        values, num_bytes, scales = BLOCKS[type_name]
        data = rng.integers(0, 256, (rows * columns // values, num_bytes), dtype=np.uint8)
        for at in scales:
            scale = rng.uniform(-0.02, 0.02, len(data)).astype(np.float16)
            data[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return WeightPiece(name, rows, columns, type_name, np.ascontiguousarray(data).view(np.uint8).reshape(-1))


def plain(weight: Weight) -> NDArray[np.float32]:
    """The weight as float32 [N, K]."""
    return np.concatenate([dequantize(p.data, p.type, (p.rows, p.columns)) for p in weight.pieces])


def batch_of(num_tokens: int, logit_rows: NDArray[np.int32] | None = None) -> InputBatch:
    """One row of `num_tokens` tokens, for programs that look at none of it."""
    line = np.arange(num_tokens, dtype=np.int32)
    pages = -(-num_tokens // 32)
    return InputBatch(
        line, line, line, np.array([0, num_tokens], np.int32), np.array([num_tokens], np.int32),
        np.arange(pages, dtype=np.int32).reshape(1, -1), line if logit_rows is None else logit_rows,
    )  # fmt: skip


@dataclass
class Product:
    """Optional norm, a product, optional bias, residual or gated activation, as one program."""

    weight: Weight
    norm: NDArray[np.float32] | None = None
    bias: NDArray[np.float32] | None = None
    add: bool = False
    act: str | None = None

    def executor(self, max_tokens: int, **options: object) -> NativeExecutor:
        """Build the program and its executor."""
        builder = ProgramBuilder(KvSpec(0, 1, 32))
        self.x = builder.buffer("x", self.weight.columns)
        out_width = self.weight.rows // (2 if self.act else 1)
        self.out = builder.buffer("out", out_width)
        last = builder.buffer("last", out_width, "logits")
        source = self.x
        if self.norm is not None:
            source = builder.buffer("normed", self.weight.columns)
            builder.add(RmsNorm(self.x, self.norm, 1e-5, source))
        target = builder.buffer("gate_up", self.weight.rows) if self.act else self.out
        builder.add(Linear(source, self.weight, target, self.bias, self.add))
        if self.act:
            builder.add(ActMul(target, self.out, self.act))  # type: ignore[arg-type]
        from_options = {"threads": 2, "page_size": 32, "kv_type": "float32", **options}
        return NativeExecutor(builder.finish(last), max_tokens=max_tokens, max_rows=1, **from_options)  # type: ignore[arg-type]

    def run(
        self, executor: NativeExecutor, x: NDArray[np.float32], residual: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Multiply the rows of x; returns a copy of the result."""
        executor.view(self.x)[: len(x)] = x
        out = executor.view(self.out)[: len(x)]
        out[:] = np.nan if residual is None else residual
        executor.run(batch_of(len(x), np.zeros(0, np.int32)))
        return out.copy()


def quantized(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """What the integer formats see of the activations: int8 by groups of 32, scale = largest magnitude / 127."""
    groups = x.reshape(-1, 32)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    whole = np.rint(groups * inverse)
    return (whole.astype(np.float64) * (largest / np.float32(127)).astype(np.float64)).reshape(x.shape)


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rounded to bfloat16, nearest even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
