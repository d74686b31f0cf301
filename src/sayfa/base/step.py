"""The seam of the two wings: what the scheduler tells the runner, and what the runner answers.

`core` makes a `SchedulerOutput` each step, `runner` executes it and returns a `RunnerOutput`; only `engine.step`
carries them across. Both are plain records of integers, so that a day of steps can be recorded and replayed.

A *table row* is a small integer below `max_num_seqs` that stands for one running sequence. The runner keeps, for
each row, what does not change (sampling params), what grows (page list, output token counts) and the last sampled
token, so a decode step of a sequence needs nothing but its `ScheduledRow`.
"""

import msgspec

from sayfa.base.sampling_params import SamplingParams


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that enters the runner: for the first time, after preemption, or as a fork of another.

    tokens: prompt and, after preemption, the output so far. num_prompt of them are the prompt.
    seed: resolved noise key of this branch. pages: the page ids it owns now, in logical order.
    """

    row: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    pages: list[int]


class ScheduledRow(msgspec.Struct, frozen=True):
    """One row's work in this step: compute the tokens at positions [start, start + count).

    num_logits: how many of the last of these tokens need logits (0 while a prompt is not finished; 1 normally;
        more for prompt log-probabilities: the logits at position p score the token at p + 1).
    sample: whether a new token is drawn from the last of these logits.
    """

    row: int
    start: int
    count: int
    num_logits: int
    sample: bool


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the runner must do in one step, in this order: forget, new, added_pages, copies, rows.

    copies: (source page, destination page), done before the forward pass.
    added_pages: (row, page ids appended to that row's page list).
    """

    step: int
    rows: list[ScheduledRow] = []
    new: list[NewRow] = []
    added_pages: list[tuple[int, list[int]]] = []
    copies: list[tuple[int, int]] = []
    forget: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all rows."""
        return sum(row.count for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the chosen token, and of the most likely ones (ids and values, best first).

    They are those of the model's distribution before temperature and truncation (after bias and penalties), floored
    at -9999.0 so that each is a finite JSON number. `rank` is 1 for the most likely token.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one scheduled row produced.

    tokens: sampled tokens (empty if the row did not sample; more than one only with speculation).
    logprobs: one per sampled token, if asked. prompt_logprobs: one per scored prompt position of this step, if asked.
    error: a sentence if this row alone failed (for example non-finite logits), with a stable `error_code`.
    """

    row: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    error: str | None = None
    error_code: str | None = None


class RunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one SchedulerOutput, rows in the same order.

    timings: seconds by part ("prepare", "forward", "sample"), the runner's own.
    """

    step: int
    rows: list[RowResult] = []
    timings: dict[str, float] = {}
