"""The oracle without pages: walks a program's ops over one whole sequence, in numpy float64, recomputing everything.

It shares the op list with the executors and nothing else: no pages, no batch, no cache, no torch.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sayfa.models.formats.dequant import dequantize
from sayfa.nn.program.program import (
    ActMul,
    Add,
    Attention,
    Embed,
    Gather,
    HeadNorm,
    KvWrite,
    Linear,
    Program,
    RmsNorm,
    Rope,
    View,
    Weight,
)

Wide = NDArray[np.float64]


class Contiguous:
    """Computes logits [T, V] float64 of a token sequence, all positions at once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._matrices: dict[int, Wide] = {}

    def logits(self, tokens: list[int]) -> Wide:
        """Run the whole sequence from nothing."""
        num = len(tokens)
        values: dict[int, Wide] = {b.index: np.zeros((num, b.width)) for b in self._program.buffers}
        kept: dict[int, tuple[Wide, Wide]] = {}
        for op in self._program.ops:
            self._step(op, np.asarray(tokens), values, kept)
        return values[self._program.logits.index]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Continue a prompt by `count` most likely tokens, recomputing everything for each."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _matrix(self, weight: Weight) -> Wide:
        if id(weight) not in self._matrices:
            parts = [dequantize(p.data, p.type, (p.rows, p.columns)) for p in weight.pieces]
            self._matrices[id(weight)] = np.concatenate(parts).astype(np.float64)
        return self._matrices[id(weight)]

    def _step(self, op: Any, tokens: NDArray[np.int64], values: dict[int, Wide], kept: dict[int, Any]) -> None:
        def of(place: Any) -> Wide:
            if isinstance(place, View):
                return values[place.buffer.index][:, place.start : place.start + place.width]
            return values[place.index]

        match op:
            case Embed():
                of(op.out)[:] = self._matrix(op.table)[tokens] * op.scale
            case RmsNorm():
                of(op.out)[:] = _norm(of(op.x), op.weight, op.eps)
            case HeadNorm():
                heads = of(op.x).reshape(len(tokens), op.num_heads, -1)
                of(op.x)[:] = _norm(heads, op.weight, op.eps).reshape(len(tokens), -1)
            case Linear():
                product = of(op.x) @ self._matrix(op.weight).T + (0 if op.bias is None else op.bias)
                of(op.out)[:] = product + of(op.out) if op.add else product
            case Rope():
                heads = of(op.x).reshape(len(tokens), op.num_heads, -1)
                of(op.x)[:] = _turn(heads, op, len(tokens)).reshape(len(tokens), -1)
            case KvWrite():
                kept[op.layer] = (of(op.key).copy(), of(op.value).copy())
            case Attention():
                of(op.out)[:] = _attend(of(op.query), *kept[op.layer], op, self._program.kv.num_kv_heads)
            case ActMul():
                gate, up = np.split(of(op.x), 2, axis=1)
                of(op.out)[:] = _act(gate, op.act) * up
            case Add():
                of(op.x)[:] += of(op.y)
            case Gather():
                of(op.out)[:] = of(op.x)


def _norm(x: Wide, weight: NDArray[np.float32], eps: float) -> Wide:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight)


def _turn(heads: Wide, op: Rope, num: int) -> Wide:
    """As complex numbers: the other formulation of the same rotation."""
    angle = op.table.cos[:num, None, :] + 1j * op.table.sin[:num, None, :].astype(np.complex128)
    half = angle.shape[-1]
    turned = heads.copy()
    first, second = (slice(0, half), slice(half, 2 * half))
    if op.table.style == "adjacent":
        first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    numbers = (heads[..., first] + 1j * heads[..., second]) * angle
    turned[..., first], turned[..., second] = numbers.real, numbers.imag
    return turned


def _attend(query: Wide, keys: Wide, values: Wide, op: Attention, num_kv_heads: int) -> Wide:
    num = len(query)
    q = query.reshape(num, op.num_heads, -1)
    group = op.num_heads // num_kv_heads
    k = np.repeat(keys.reshape(num, num_kv_heads, -1), group, axis=1)
    v = np.repeat(values.reshape(num, num_kv_heads, -1), group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) * op.scale
    distance = np.arange(num)[:, None] - np.arange(num)[None, :]
    visible = (distance >= 0) & ((distance < op.window) if op.window else True)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(num, -1)


def _act(x: Wide, act: str) -> Wide:
    if act == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
