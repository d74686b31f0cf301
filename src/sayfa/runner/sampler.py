"""Logits → tokens and log-probabilities, for the rows of one step. Called by `model_runner`.

What a request may do to its logits happens here, in this order: repetition penalty (prompt and output), frequency and
presence penalty (output only), bias, then masks (allowed ids, end tokens before `min_tokens`). The draw itself is
handed in: the numpy one of `draw`, or its native twin. A row that fails ends alone; the others never notice.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sayfa.base.faults import fault
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import RowResult, TokenLogprobs
from sayfa.runner.draw import GREEDY_BELOW, DrawColumns, Drawn, score_token
from sayfa.runner.noise import uniform
from sayfa.runner.prepare import Prepared
from sayfa.runner.request_table import RequestTable, TokenCounts, stop_ids

Draw = Callable[[NDArray[np.float32], DrawColumns], Drawn]

# Penalties may push a logit out of float32 (a division by 1e-38); the distribution is decided long before this border.
_LIMIT = np.float32(1e30)
_NUMERICAL = ("numerical_error", "the model gave numbers that are not finite for this request")
_NOTHING_ALLOWED = (
    "no_token_allowed", "allowed_token_ids and min_tokens together leave no token that may be sampled"
)  # fmt: skip


class Wishes(NamedTuple):
    """What the drawing rows [R] ask for, read from the table once while nobody comes or goes.

    noisy: some row is not greedy. edits: which rows change their logits at each token; masked_until: see the table.
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    num_top: NDArray[np.int32]
    seed: NDArray[np.uint64]
    edits: NDArray[np.bool_]
    masked_until: NDArray[np.int32]
    noisy: bool


class Sampler:
    """Samples the rows of a step and notes the drawn tokens in the table."""

    def __init__(self, table: RequestTable, draw: Draw) -> None:
        self._table = table
        self._draw = draw
        self._kept: tuple[int, bytes] = (-1, b"")
        self._wishes: Wishes | None = None

    def sample(self, logits: NDArray[np.float32], step: Prepared) -> list[RowResult]:
        """Answer each scheduled row in order. `logits` [L, V] may be changed in place."""
        scored, failed = self._score_prompts(logits, step)
        drawing = np.flatnonzero(step.samples)
        if len(drawing) == 0:
            return [_result(int(row), scored.get(s, []), failed.get(s)) for s, row in enumerate(step.rows)]
        rows = step.rows[drawing]
        last = step.logit_start[drawing + 1] - 1
        chosen = logits if len(last) == len(logits) else logits[last]
        wishes, end = self._wishes_of(rows), step.end[drawing]
        edited = wishes.edits | (end < wishes.masked_until)
        for index in np.flatnonzero(edited):
            if wishes.edits[index] and not np.isfinite(chosen[index]).all():
                failed[int(drawing[index])] = _NUMERICAL  # a penalty would hide it
            self._edit(chosen[index], int(rows[index]))
        fault("runner.draw")
        drawn = self._draw(chosen, _columns(wishes, end))
        for index in np.flatnonzero(drawn.token < 0):
            masked = edited[index] and np.isneginf(chosen[index]).all()
            failed.setdefault(int(drawing[index]), _NOTHING_ALLOWED if masked else _NUMERICAL)
        return self._collect(step, drawing, drawn, scored, failed)

    def _wishes_of(self, rows: NDArray[np.int32]) -> Wishes:
        table, key = self._table, (self._table.version, rows.tobytes())
        if self._wishes is None or key != self._kept:
            self._kept = key
            self._wishes = Wishes(
                table.temperature[rows],
                table.top_p[rows],
                table.min_p[rows],
                table.top_k[rows],
                table.num_top[rows],
                table.seed[rows],
                table.edits_logits[rows],
                table.masked_until[rows],
                bool((table.temperature[rows] >= GREEDY_BELOW).any()),
            )
        return self._wishes

    def _collect(
        self,
        step: Prepared,
        drawing: NDArray[np.intp],
        drawn: Drawn,
        scored: dict[int, list[TokenLogprobs]],
        failed: dict[int, tuple[str, str]],
    ) -> list[RowResult]:
        tokens: list[list[int]] = [[] for _ in step.rows]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for index, (s, token) in enumerate(zip(drawing.tolist(), drawn.token.tolist(), strict=True)):
            tokens[s] = [token]
            num_top = int(self._table.num_top[step.rows[s]])
            if num_top >= 0 and token >= 0:
                fault("runner.logprobs")
                logprobs[s] = [_logprobs_of(drawn, index, num_top)]
        results = [
            _result(row, scored.get(s, []), failed.get(s), tokens[s], logprobs.get(s, []))
            for s, row in enumerate(step.rows.tolist())
        ]
        # Last of all: a step that raises is made again, and a token that was noted then would be counted twice.
        good = np.array([int(s) not in failed for s in drawing]) if failed else np.ones(len(drawing), np.bool_)
        noted = drawing[good]
        fault("runner.note")
        self._table.set_sampled(step.rows[noted], step.end[noted], drawn.token[good])
        return results

    # ------------------------------------------------------------------------------------------- prompt scores

    def _score_prompts(
        self, logits: NDArray[np.float32], step: Prepared
    ) -> tuple[dict[int, list[TokenLogprobs]], dict[int, tuple[str, str]]]:
        """Score the prompt tokens that this step's logits predict, for rows that asked; before anything is edited."""
        fault("runner.score_prompt")
        scored: dict[int, list[TokenLogprobs]] = {}
        failed: dict[int, tuple[str, str]] = {}
        table = self._table
        for s in np.flatnonzero(table.num_prompt_top[step.rows] >= 0).tolist():
            row = int(step.rows[s])
            first, after = int(step.logit_start[s]), int(step.logit_start[s + 1])
            target = int(step.end[s]) - (after - first) + 1  # the position that the first of these logits predicts
            found = scored.setdefault(s, [])
            for index in range(first, after):
                if target >= table.num_prompt[row]:
                    break
                if not np.isfinite(logits[index]).all():
                    failed[s] = _NUMERICAL
                    break
                num_top = int(table.num_prompt_top[row])
                logprob, rank, ids, values = score_token(logits[index], int(table.tokens[row, target]), num_top)
                found.append(TokenLogprobs(logprob, rank, ids.tolist(), values.tolist()))
                target += 1
        return scored, failed

    # ------------------------------------------------------------------------------------------- edits

    def _edit(self, logits: NDArray[np.float32], row: int) -> None:
        """Apply one request's penalties, bias and masks to its logits [V], in place."""
        fault("runner.edit")
        params = self._table.params[row]
        if params is None:
            raise ValueError(f"table row {row} is empty")
        if row in self._table.counts:
            _penalise(logits, params, self._table.counts[row])
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64)
            logits[ids] += np.fromiter(params.logit_bias.values(), np.float32)
        if params.allowed_token_ids is not None:
            allowed = np.zeros(len(logits), np.bool_)
            allowed[params.allowed_token_ids] = True
            logits[~allowed] = -np.inf
        if self._table.num_tokens[row] < self._table.masked_until[row]:
            logits[stop_ids(params)] = -np.inf


def _columns(wishes: Wishes, positions: NDArray[np.int32]) -> DrawColumns:
    """The draw's input; greedy rows need no noise, and where all are greedy none is made."""
    return DrawColumns(
        temperature=wishes.temperature,
        top_p=wishes.top_p,
        min_p=wishes.min_p,
        top_k=wishes.top_k,
        uniform=uniform(wishes.seed, positions) if wishes.noisy else np.zeros(len(positions)),
        num_top=wishes.num_top,
    )


def _penalise(logits: NDArray[np.float32], params: SamplingParams, counts: TokenCounts) -> None:
    if params.repetition_penalty != 1.0:
        seen, factor = logits[counts.seen], np.float32(params.repetition_penalty)
        with np.errstate(over="ignore"):
            logits[counts.seen] = np.where(seen > 0, seen / factor, seen * factor)
        np.clip(logits, -_LIMIT, _LIMIT, out=logits)
    if params.frequency_penalty:
        logits -= np.float32(params.frequency_penalty) * counts.output
    if params.presence_penalty:
        logits -= np.float32(params.presence_penalty) * (counts.output > 0)


def _logprobs_of(drawn: Drawn, index: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        float(drawn.logprob[index]),
        int(drawn.rank[index]),
        drawn.top_ids[index, :num_top].tolist(),
        drawn.top_logprobs[index, :num_top].tolist(),
    )


def _result(
    row: int,
    prompt_logprobs: list[TokenLogprobs],
    failure: tuple[str, str] | None,
    tokens: list[int] | None = None,
    logprobs: list[TokenLogprobs] | None = None,
) -> RowResult:
    if failure is not None:
        return RowResult(row=row, error=failure[1], error_code=failure[0])
    return RowResult(row=row, tokens=tokens or [], logprobs=logprobs or [], prompt_logprobs=prompt_logprobs)
