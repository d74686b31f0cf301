"""Logits → tokens and log-probabilities, for the rows of one step. Called by `model_runner`.

What a request may do to its logits happens here, in this order: repetition penalty (prompt and output), frequency and
presence penalty (output only), bias, then masks (allowed ids, end tokens before `min_tokens`). The draw itself is
handed in: the numpy one of `draw`, or its native twin. A row that fails ends alone; the others never notice.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sayfa.base.faults import fault
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import RowResult, TokenLogprobs
from sayfa.runner.draw import GREEDY_BELOW, DrawColumns, Drawn, score_token
from sayfa.runner.noise import uniform
from sayfa.runner.prepare import Prepared
from sayfa.runner.request_table import RequestTable, TokenCounts

Draw = Callable[[NDArray[np.float32], DrawColumns], Drawn]

# Penalties may push a logit out of float32 (a division by 1e-38); the distribution is decided long before this border.
_LIMIT = np.float32(1e30)
_NUMERICAL = ("numerical_error", "the model gave numbers that are not finite for this request")
_NOTHING_ALLOWED = (
    "no_token_allowed", "allowed_token_ids and min_tokens together leave no token that may be sampled"
)  # fmt: skip


class Wishes(NamedTuple):
    """What the drawing rows [R] ask for, read from the table once while nobody comes or goes.

    columns: the draw's input, complete unless `seed` is there: then some row is not greedy and needs noise at each
    token. edits: rows that change their logits at each token, masked_until: see the table; None where no row does.
    """

    columns: DrawColumns
    seed: NDArray[np.uint64] | None
    edits: NDArray[np.bool_] | None
    masked_until: NDArray[np.int32] | None
    logprobs: bool


class Sampler:
    """Samples the rows of a step and notes the drawn tokens in the table."""

    def __init__(self, table: RequestTable, draw: Draw) -> None:
        self._table = table
        self._draw = draw
        self._kept: tuple[int, bytes] = (-1, b"")
        self._wishes: Wishes | None = None

    def sample(self, logits: NDArray[np.float32], step: Prepared) -> list[RowResult]:
        """Answer each scheduled row in order. `logits` [L, V] may be changed in place."""
        scored, failed = self._score_prompts(logits, step) if self._table.num_scoring else ({}, {})
        drawing = np.flatnonzero(step.samples)
        if len(drawing) == 0:
            return [_result(int(row), scored.get(s, []), failed.get(s)) for s, row in enumerate(step.rows)]
        rows, end = step.rows[drawing], step.end[drawing]
        chosen = logits if len(drawing) == len(logits) else logits[step.logit_start[drawing + 1] - 1]
        wishes = self._wishes_of(rows)
        edited = self._edit_rows(chosen, rows, end, wishes)
        if wishes.edits is not None:
            failed |= dict.fromkeys(drawing[edited < 0].tolist(), _NUMERICAL)
        fault("runner.draw")
        drawn = self._draw(chosen, _with_noise(wishes, end))
        tokens = drawn.token.tolist()
        if min(tokens) < 0:
            for index in [index for index, token in enumerate(tokens) if token < 0]:
                masked = edited[index] and np.isneginf(chosen[index]).all()
                failed.setdefault(int(drawing[index]), _NOTHING_ALLOWED if masked else _NUMERICAL)
        logprobs = self._logprobs_of(rows, drawn, tokens) if wishes.logprobs else {}
        found = {
            s: ([token], logprobs.get(index, []))
            for index, (s, token) in enumerate(zip(drawing.tolist(), tokens, strict=True))
        }
        results = [
            _result(row, scored.get(s, []), failed.get(s), *found.get(s, ([], [])))
            for s, row in enumerate(step.rows.tolist())
        ]
        # Last of all: a step that raises is made again, and a token that was noted then would be counted twice.
        good = np.array([s not in failed for s in drawing.tolist()]) if failed else slice(None)
        fault("runner.note")
        self._table.set_sampled(rows[good], end[good], drawn.token[good])
        return results

    def _wishes_of(self, rows: NDArray[np.int32]) -> Wishes:
        table, key = self._table, (self._table.version, rows.tobytes())
        if self._wishes is None or key != self._kept:
            self._kept = key
            edits, masked_until, num_top = table.edits_logits[rows], table.masked_until[rows], table.num_top[rows]
            columns = DrawColumns(
                temperature=table.temperature[rows],
                top_p=table.top_p[rows],
                min_p=table.min_p[rows],
                top_k=table.top_k[rows],
                uniform=np.zeros(len(rows)),
                num_top=num_top,
            )
            self._wishes = Wishes(
                columns,
                seed=table.seed[rows] if (columns.temperature >= GREEDY_BELOW).any() else None,
                edits=edits if edits.any() else None,
                masked_until=masked_until if masked_until.any() else None,
                logprobs=bool((num_top >= 0).any()),
            )
        return self._wishes

    def _logprobs_of(self, rows: NDArray[np.int32], drawn: Drawn, tokens: list[int]) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the drawn tokens, by index among the drawing rows, for those that asked."""
        fault("runner.logprobs")
        asked = enumerate(zip(self._table.num_top[rows].tolist(), tokens, strict=True))
        return {index: [_logprobs(drawn, index, num_top)] for index, (num_top, token) in asked if num_top >= 0 <= token}

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

    def _edit_rows(
        self, chosen: NDArray[np.float32], rows: NDArray[np.int32], end: NDArray[np.int32], wishes: Wishes
    ) -> NDArray[np.int8]:
        """Edit the logits [R, V] of the rows that want it.

        Returns [R]: 1 edited, 0 left alone, -1 edited, but the logits were not finite (which a penalty hides).
        """
        edited = np.zeros(len(rows), np.int8)
        if wishes.edits is None and wishes.masked_until is None:
            return edited
        if wishes.edits is not None:
            edited[wishes.edits] = 1
            edited[[index for index in np.flatnonzero(wishes.edits) if not np.isfinite(chosen[index]).all()]] = -1
        if wishes.masked_until is not None:
            edited[(edited == 0) & (end < wishes.masked_until)] = 1
        for index in np.flatnonzero(edited):
            self._edit(chosen[index], int(rows[index]))
        return edited

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
            # A tokenizer may know end tokens for which the model has no row: those are never drawn.
            logits[[token for token in params.end_token_ids if token < len(logits)]] = -np.inf


def _with_noise(wishes: Wishes, positions: NDArray[np.int32]) -> DrawColumns:
    """The draw's input; greedy rows need no noise, and where all are greedy the same columns serve again."""
    if wishes.seed is None:
        return wishes.columns
    return replace(wishes.columns, uniform=uniform(wishes.seed, positions))


def _penalise(logits: NDArray[np.float32], params: SamplingParams, counts: TokenCounts) -> None:
    if params.repetition_penalty != 1.0:
        seen, factor = logits[counts.seen], np.float32(params.repetition_penalty)
        # A penalty may be 0 in float32; what was divided by it is cut like any other number that is too large.
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            logits[counts.seen] = np.where(seen > 0, seen / factor, seen * factor)
        np.clip(logits, -_LIMIT, _LIMIT, out=logits)
    if params.frequency_penalty:
        logits -= np.float32(params.frequency_penalty) * counts.output
    if params.presence_penalty:
        logits -= np.float32(params.presence_penalty) * (counts.output > 0)


def _logprobs(drawn: Drawn, index: int, num_top: int) -> TokenLogprobs:
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
    tokens: Sequence[int] = (),
    logprobs: Sequence[TokenLogprobs] = (),
) -> RowResult:
    if failure is not None:
        return RowResult(row=row, error=failure[1], error_code=failure[0])
    return RowResult(row=row, tokens=list(tokens), logprobs=list(logprobs), prompt_logprobs=prompt_logprobs)
