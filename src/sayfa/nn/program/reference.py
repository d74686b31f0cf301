"""The reference executor: each op in a few lines of plain torch, float32. The oracle for native ops, and the fall-back.

Made by `runner.executors` only when chosen, because this is the one module that loads torch. It knows nothing of files:
`dequantize` is handed in by the maker.

Law: the bits of a row do not depend on its neighbours, nor on how a prompt was cut. Three means keep it, all measured:
  1. torch runs on one thread, so no reduction is split by load;
  2. every activation has its rows rounded up to a multiple of 8, and `Linear` multiplies exactly 8 rows at a time: the
     dense product takes other paths for 1, 2, 3 or 5 rows, and element-wise loops treat their last elements by other
     code;
  3. attention is computed for one query token at a time, in a shape that follows from its position alone.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sayfa.base.errors import ModelError
from sayfa.nn.program.program import (
    ActMul,
    Add,
    Attention,
    Buffer,
    Embed,
    Gather,
    HeadNorm,
    InputBatch,
    KvWrite,
    Linear,
    Op,
    Program,
    RmsNorm,
    Rope,
    View,
    Weight,
)

ROW_BLOCK = 8

Dequantize = Callable[[NDArray[np.uint8], str, tuple[int, ...]], NDArray[np.float32]]
KvType = Literal["float32", "bfloat16"]
_KV_TYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ReferenceExecutor:
    """Runs a program op by op. Weights are dequantized once, to float32 (so 4 bytes each, whatever the file holds).

    dequantize: (raw bytes, type name, shape) → float32 array. max_tokens, max_rows: bounds of one step.
    kv_type: how pages keep K and V; arithmetic on them is float32. Raises ModelError for a type it cannot keep.
    """

    name = "reference"

    def __init__(
        self,
        program: Program,
        *,
        dequantize: Dequantize,
        max_tokens: int,
        max_rows: int,
        page_size: int,
        kv_type: str = "float32",
    ) -> None:
        if kv_type not in _KV_TYPES:
            known = ", ".join(_KV_TYPES)
            raise ModelError(f"kv type {kv_type!r} is not known to the reference executor; choose one of {known}")
        torch.set_num_threads(1)
        self._program = program
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._page_size = page_size
        self._kv_dtype = _KV_TYPES[kv_type]
        self._dequantize = dequantize
        self._matrices: dict[int, torch.Tensor] = {}
        self._vectors: dict[int, torch.Tensor] = {}
        for op in program.ops:
            self._load(op)
        self._pages = torch.empty(0)
        self._activations: list[torch.Tensor] = []

    # ------------------------------------------------------------------------------------------- protocol

    def op_notes(self) -> dict[str, str]:
        """Say for each op kind of the program that the reference runs it."""
        return {type(op).__name__: "the reference executor was chosen" for op in self._program.ops}

    @property
    def weights_bytes(self) -> int:
        """Bytes of all dequantized weights, each matrix counted once though it may serve two ops."""
        tensors = [*self._matrices.values(), *self._vectors.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def buffers_bytes(self) -> int:
        """Upper bound of one step's activations."""
        rows = {"tokens": _round_up(self._max_tokens), "logits": _round_up(self._max_rows)}
        return sum(4 * buffer.width * rows[buffer.rows] for buffer in self._program.buffers)

    @property
    def bytes_per_page(self) -> int:
        """K and V of all layers for one page."""
        kv = self._program.kv
        itemsize: int = self._kv_dtype.itemsize
        return 2 * kv.num_layers * self._page_size * kv.num_kv_heads * kv.head_dim * itemsize

    def allocate_pages(self, num_pages: int) -> None:
        """Make the pages [layers, 2, pages, page_size, kv heads, dim]; memory is touched only when it is written."""
        kv = self._program.kv
        shape = (kv.num_layers, 2, num_pages, self._page_size, kv.num_kv_heads, kv.head_dim)
        self._pages = torch.empty(shape, dtype=self._kv_dtype)

    def populate_pages(self) -> Iterator[None]:
        """Nothing: the reference is slow for other reasons."""
        return iter(())

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in all layers, in order."""
        for source, destination in copies:
            self._pages[:, :, destination] = self._pages[:, :, source]

    def poison_pages(self) -> None:
        """Fill all pages with NaN, so that a test sees any read of a slot that was never written."""
        self._pages.fill_(float("nan"))

    def run(self, batch: InputBatch) -> NDArray[np.float32]:
        """Execute one step. Returns logits [L, V]. Raises ValueError if the batch is over the executor's bounds."""
        num_tokens, num_logits = len(batch.token_ids), len(batch.logit_rows)
        if num_tokens > self._max_tokens or num_logits > self._max_rows:
            raise ValueError(
                f"the step has {num_tokens} tokens and {num_logits} logit rows; the executor was made for "
                f"{self._max_tokens} and {self._max_rows}"
            )
        rows = {"tokens": _round_up(num_tokens), "logits": _round_up(num_logits)}
        self._activations = [torch.zeros(rows[buffer.rows], buffer.width) for buffer in self._program.buffers]
        with torch.inference_mode():
            for op in self._program.ops:
                self._execute(op, batch)
        logits: NDArray[np.float32] = self._activations[self._program.logits.index][:num_logits].numpy()
        return logits

    # ------------------------------------------------------------------------------------------- weights

    def _load(self, op: Op) -> None:
        if isinstance(op, Embed):
            self._load_matrix(op.table)
        elif isinstance(op, Linear):
            self._load_matrix(op.weight)
            if op.bias is not None:
                self._load_vector(op.bias)
        elif isinstance(op, RmsNorm | HeadNorm):
            self._load_vector(op.weight)

    def _load_matrix(self, weight: Weight) -> None:
        """Dequantize each piece once; a matrix that is one shared piece (a tied head) is kept once."""
        key = _matrix_key(weight)
        if key not in self._matrices:
            parts = [self._dequantize(p.data, p.type, (p.rows, p.columns)) for p in weight.pieces]
            stacked = parts[0] if len(parts) == 1 else np.concatenate(parts)
            self._matrices[key] = torch.from_numpy(np.array(stacked, np.float32, order="C"))

    def _load_vector(self, vector: NDArray[np.float32]) -> None:
        self._vectors[id(vector)] = torch.from_numpy(np.array(vector, np.float32))

    # ------------------------------------------------------------------------------------------- ops

    def _of(self, place: Buffer | View) -> torch.Tensor:
        if isinstance(place, View):
            return self._activations[place.buffer.index][:, place.start : place.start + place.width]
        return self._activations[place.index]

    def _execute(self, op: Op, batch: InputBatch) -> None:
        match op:
            case Embed():
                ids = torch.from_numpy(batch.token_ids).long()
                self._of(op.out)[: len(ids)] = self._matrices[_matrix_key(op.table)][ids] * op.scale
            case RmsNorm():
                self._of(op.out)[:] = _rms_norm(self._of(op.x), self._vectors[id(op.weight)], op.eps)
            case HeadNorm():
                x = self._of(op.x)
                heads = x.reshape(len(x), op.num_heads, -1)
                x[:] = _rms_norm(heads, self._vectors[id(op.weight)], op.eps).reshape(x.shape)
            case Linear():
                self._linear(op)
            case Rope():
                self._rope(op, batch)
            case KvWrite():
                self._kv_write(op, batch)
            case Attention():
                self._attention(op, batch)
            case ActMul():
                gate, up = self._of(op.x).chunk(2, dim=1)
                self._of(op.out)[:] = _activate(gate.contiguous(), op.act) * up
            case Add():
                self._of(op.x).add_(self._of(op.y))
            case Gather():
                rows = torch.from_numpy(batch.logit_rows).long()
                self._of(op.out)[: len(rows)] = self._of(op.x)[rows]

    def _linear(self, op: Linear) -> None:
        x, out, weight = self._of(op.x), self._of(op.out), self._matrices[_matrix_key(op.weight)]
        for start in range(0, len(x), ROW_BLOCK):
            block = x[start : start + ROW_BLOCK] @ weight.T
            if op.bias is not None:
                block += self._vectors[id(op.bias)]
            if op.add:
                block += out[start : start + ROW_BLOCK]
            out[start : start + ROW_BLOCK] = block

    def _rope(self, op: Rope, batch: InputBatch) -> None:
        num_tokens = len(batch.positions)
        x = self._of(op.x)[:num_tokens].reshape(num_tokens, op.num_heads, -1)
        cos = torch.from_numpy(op.table.cos[batch.positions])[:, None, :]
        sin = torch.from_numpy(op.table.sin[batch.positions])[:, None, :]
        half = cos.shape[-1]
        turned = x.clone()
        if op.table.style == "half":
            low, high = slice(0, half), slice(half, 2 * half)
        else:
            low, high = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        turned[..., low] = x[..., low] * cos - x[..., high] * sin
        turned[..., high] = x[..., high] * cos + x[..., low] * sin
        self._of(op.x)[:num_tokens] = turned.reshape(num_tokens, -1)

    def _kv_write(self, op: KvWrite, batch: InputBatch) -> None:
        kv, num_tokens = self._program.kv, len(batch.slots)
        slots = torch.from_numpy(batch.slots).long()
        for which, place in enumerate((op.key, op.value)):
            flat = self._pages[op.layer, which].view(-1, kv.num_kv_heads, kv.head_dim)
            flat[slots] = self._of(place)[:num_tokens].reshape(num_tokens, kv.num_kv_heads, kv.head_dim).to(flat.dtype)

    def _attention(self, op: Attention, batch: InputBatch) -> None:
        kv, pages = self._program.kv, self._pages[op.layer]
        query, out = self._of(op.query), self._of(op.out)
        for row in range(len(batch.context_len)):
            context = int(batch.context_len[row])
            ids = torch.from_numpy(batch.page_table[row, : -(-context // self._page_size)]).long()
            gathered = pages[:, ids].reshape(2, -1, kv.num_kv_heads, kv.head_dim)[:, :context].float()
            keys, values = gathered.transpose(1, 2)  # each [kv heads, context, dim]
            for token in range(int(batch.query_start[row]), int(batch.query_start[row + 1])):
                end = int(batch.positions[token]) + 1
                start = max(0, end - op.window) if op.window else 0
                q = query[token].clone().view(kv.num_kv_heads, -1, kv.head_dim)
                seen_keys = keys[:, start:end].contiguous()
                weights = torch.softmax(q @ seen_keys.transpose(1, 2) * op.scale, dim=-1)
                out[token] = (weights @ values[:, start:end].contiguous()).view(-1)


def _round_up(rows: int) -> int:
    return -(-rows // ROW_BLOCK) * ROW_BLOCK


def _matrix_key(weight: Weight) -> int:
    return id(weight.pieces[0]) if len(weight.pieces) == 1 else id(weight)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)) * weight


def _activate(gate: torch.Tensor, act: str) -> torch.Tensor:
    if act == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")
