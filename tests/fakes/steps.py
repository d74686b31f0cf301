"""Drives a ModelRunner by hand-made plans, without a scheduler: rows, chunks and page orders are the test's choice."""

import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sayfa.base.model_config import ModelConfig
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import NewRow, RowResult, ScheduledRow, SchedulerOutput
from sayfa.models import load_program
from sayfa.models.config import read_config
from sayfa.models.formats.source import open_weights
from sayfa.nn.program.program import InputBatch, Program
from sayfa.runner.executors import Chosen, StepLimits, make_executor
from sayfa.runner.model_runner import ModelRunner
from sayfa.runner.request_table import RequestTable

GREEDY = SamplingParams(temperature=0.0)


def open_model(path: Path, *, num_positions: int = 512) -> tuple[ModelConfig, Program]:
    """Read a checkpoint as the engine does."""
    config = read_config(path)
    return config, load_program(path, config, open_weights(path), num_positions=num_positions)


def reference(program: Program, *, num_pages: int = 128, page_size: int = 16, max_tokens: int = 512) -> Chosen:
    """A reference executor with poisoned pages: a read of a slot that was never written shows as NaN."""
    chosen = make_executor(program, StepLimits(max_tokens, max_tokens, page_size), kind="reference")
    chosen.executor.allocate_pages(num_pages)
    chosen.executor.poison_pages()  # type: ignore[attr-defined]
    return chosen


class Recorder:
    """Stands before an executor and keeps a copy of each step's logits, by (token position, batch row)."""

    def __init__(self, executor: object) -> None:
        self._executor = executor
        self.steps: list[tuple[InputBatch, NDArray[np.float32]]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def run(self, batch: InputBatch) -> NDArray[np.float32]:
        """Run and remember."""
        logits = self._executor.run(batch)  # type: ignore[attr-defined]
        self.steps.append((batch, logits.copy()))
        return np.asarray(logits)


class Driver:
    """Sequences by table row. `logits[row]` maps a position to the logits computed there."""

    def __init__(
        self, chosen: Chosen, config: ModelConfig, *, page_size: int = 16, num_pages: int = 128, seed: int = 0
    ) -> None:
        self.table = RequestTable(32, 512, page_size, config.vocab_size)
        self._recorder = Recorder(chosen.executor)
        self._runner = ModelRunner(self._recorder, self.table, chosen.draw, make_prepare=chosen.make_prepare)  # type: ignore[arg-type]
        self._page_size = page_size
        self._free = list(range(1, num_pages))
        random.Random(seed).shuffle(self._free)
        self._step = 0
        self.computed: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}
        self.logits: dict[int, dict[int, NDArray[np.float32]]] = {}
        self._pending_new: list[NewRow] = []
        self._pending_forget: list[int] = []
        self._pending_copies: list[tuple[int, int]] = []

    def add(
        self,
        row: int,
        tokens: list[int],
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        num_prompt: int | None = None,
    ) -> None:
        """A sequence enters at a row with the next step; `num_prompt` < len(tokens) is a resumed one."""
        pages = [self._free.pop() for _ in range(-(-len(tokens) // self._page_size))]
        prompt = len(tokens) if num_prompt is None else num_prompt
        self._pending_new.append(
            NewRow(row=row, tokens=tokens, num_prompt=prompt, params=params, seed=seed, pages=pages)
        )
        self.computed[row], self.length[row] = 0, len(tokens)
        self.outputs.setdefault(row, [])
        self.logits.setdefault(row, {})

    def preempt(self, row: int, prompt: list[int], params: SamplingParams, *, seed: int = 0) -> None:
        """Take a sequence out, give its pages away, and let it in again with its output so far as tokens to compute."""
        self.forget(row)
        self.add(row, prompt + self.outputs[row], params, seed=seed, num_prompt=len(prompt))

    def fork(self, row: int, branch: int, params: SamplingParams, *, seed: int) -> None:
        """Let a branch in that shares the full pages of a prompt and owns a copy of the last, partly filled one.

        Its last prompt token is computed again, because it draws its own first token from that token's logits.
        """
        prompt = int(self.table.num_prompt[row])
        shared = [int(page) for page in self.table.pages[row, : (prompt - 1) // self._page_size]]
        source, own = int(self.table.pages[row, len(shared)]), self._free.pop()
        tokens = self.table.tokens[row, :prompt].tolist()
        self._pending_new.append(
            NewRow(row=branch, tokens=tokens, num_prompt=prompt, params=params, seed=seed, pages=[*shared, own])
        )
        self._pending_copies.append((source, own))
        self.computed[branch], self.length[branch] = prompt - 1, prompt
        self.outputs[branch], self.logits[branch] = [], {}

    def forget(self, row: int) -> None:
        """Take a sequence out; its pages go to the end of the free list."""
        self._free[:0] = [int(page) for page in self.table.pages[row, : self.table.num_pages[row]]]
        self._pending_forget.append(row)

    def step(self, counts: dict[int, int], *, all_logits: bool = False) -> list[RowResult]:
        """Compute `counts[row]` next tokens of each row in one step; a row that reaches its end samples."""
        rows, added = [], []
        for row, count in counts.items():
            start = self.computed[row]
            count = min(count, self.length[row] - start)
            sample = start + count == self.length[row]
            rows.append(ScheduledRow(row, start, count, count if all_logits else int(sample), sample))
            have = int(self.table.num_pages[row]) or sum(len(n.pages) for n in self._pending_new if n.row == row)
            need = -(-(start + count) // self._page_size)
            if need > have:
                added.append((row, [self._free.pop() for _ in range(need - have)]))
        plan = SchedulerOutput(
            step=self._step,
            rows=rows,
            new=self._pending_new,
            added_pages=added,
            forget=self._pending_forget,
            copies=self._pending_copies,
        )
        self._pending_new, self._pending_forget, self._pending_copies = [], [], []
        self._step += 1
        output = self._runner.execute(plan)
        self.table.check()
        self._note(rows, output.rows)
        return output.rows

    def _note(self, rows: list[ScheduledRow], results: list[RowResult]) -> None:
        batch, logits = self._recorder.steps.pop()
        index = 0
        for row, result in zip(rows, results, strict=True):
            for offset in range(row.num_logits):
                position = row.start + row.count - row.num_logits + offset
                self.logits[row.row][position] = logits[index]
                index += 1
            self.computed[row.row] = row.start + row.count
            self.outputs[row.row] += result.tokens
            self.length[row.row] += len(result.tokens)
        assert index == len(batch.logit_rows)

    def generate(self, row: int, count: int, *, chunk: int = 512) -> list[int]:
        """Run one row alone until it has `count` output tokens."""
        while len(self.outputs[row]) < count:
            self.step({row: chunk})
        return self.outputs[row]
