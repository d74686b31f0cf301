"""The request table: a fixed row per running sequence, as numpy columns, so that no step loops over rows.

Called by `model_runner` (changes), `prepare` and `sampler` (reading). It knows no scheduling: which row is free, which
page belongs to whom, and how long a sequence may become is decided elsewhere and only obeyed here.

Invariants, checked by `check()`:
  1. a row is live from `put` to `forget`; a dead row has no pages, no tokens and no counts;
  2. page ids are above 0 (page 0 is reserved) in the first `num_pages` columns, 0 in the rest;
  3. `counts` has an entry exactly for the live rows that asked for penalties, and it equals the row's tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import NewRow

_UINT64 = 2**64 - 1


@dataclass(frozen=True)
class TokenCounts:
    """For penalties: how often each id stands in the output [V] int32, and whether it stands anywhere [V] bool."""

    output: NDArray[np.int32]
    seen: NDArray[np.bool_]


class RequestTable:
    """Rows of running sequences.

    max_rows: sequences at once. max_context: longest sequence in tokens. page_size: tokens in a page.

    edits_logits: rows with penalties, bias or allowed ids. masked_until: a row with fewer tokens must not draw what
    would end it (`min_tokens`). version: another number after each `put` and `forget`, so that what was read from the
    columns of the same rows can be kept while nobody comes or goes. num_scoring: rows that want their prompt scored.
    """

    def __init__(self, max_rows: int, max_context: int, page_size: int, vocab_size: int) -> None:
        self.max_rows = max_rows
        self.max_context = max_context
        self.page_size = page_size
        self.vocab_size = vocab_size
        # Zeroed memory is only reserved until it is written, so a long context costs nothing before it is used.
        self.pages = np.zeros((max_rows, -(-max_context // page_size)), np.int32)
        self.tokens = np.zeros((max_rows, max_context + 1), np.int32)
        self.num_pages = np.zeros(max_rows, np.int32)
        self.num_tokens = np.zeros(max_rows, np.int32)
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.num_top = np.full(max_rows, -1, np.int32)
        self.num_prompt_top = np.full(max_rows, -1, np.int32)
        self.edits_logits = np.zeros(max_rows, np.bool_)
        self.masked_until = np.zeros(max_rows, np.int32)
        self.version = 0
        self.num_scoring = 0
        self.params: list[SamplingParams | None] = [None] * max_rows
        self.counts: dict[int, TokenCounts] = {}

    def put(self, new: NewRow) -> None:
        """Fill a row. Raises ValueError if the row is taken or the sequence does not fit."""
        row, params = new.row, new.params
        if not 0 <= row < self.max_rows or self.params[row] is not None:
            raise ValueError(f"table row {row} of {self.max_rows} is outside the table or still in use")
        if not 0 < len(new.tokens) <= self.max_context:
            raise ValueError(f"sequence of {len(new.tokens)} tokens for a table of {self.max_context}")
        self.params[row] = params
        self.tokens[row, : len(new.tokens)] = new.tokens
        self.num_tokens[row], self.num_prompt[row] = len(new.tokens), new.num_prompt
        self.temperature[row], self.top_p[row], self.min_p[row] = params.temperature, params.top_p, params.min_p
        self.top_k[row] = params.top_k
        self.seed[row] = new.seed & _UINT64
        self.num_top[row] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_top[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.num_scoring += params.prompt_logprobs is not None
        penalised = _wants_penalties(params)
        self.edits_logits[row] = penalised or bool(params.logit_bias) or params.allowed_token_ids is not None
        self.masked_until[row] = new.num_prompt + params.min_tokens if params.end_token_ids else 0
        self.version += 1
        if penalised:
            self.counts[row] = self._count(row)
        self.add_pages(row, new.pages)

    def add_pages(self, row: int, pages: list[int]) -> None:
        """Append page ids to a row's list. Raises ValueError if they are more than the longest sequence can use."""
        start = int(self.num_pages[row])
        end = start + len(pages)
        if end > self.pages.shape[1]:
            raise ValueError(f"table row {row} got {end} pages, but holds {self.pages.shape[1]}")
        self.pages[row, start:end] = pages
        self.num_pages[row] = end

    def forget(self, row: int) -> None:
        """Empty a row; a row that is already empty stays so."""
        self.pages[row, : self.num_pages[row]] = 0
        self.num_pages[row] = self.num_tokens[row] = self.num_prompt[row] = 0
        self.num_scoring -= int(self.num_prompt_top[row] >= 0)
        self.num_top[row] = self.num_prompt_top[row] = -1
        self.edits_logits[row] = False
        self.masked_until[row] = 0
        self.version += 1
        self.params[row] = None
        self.counts.pop(row, None)

    def set_sampled(self, rows: NDArray[np.int32], positions: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Note the token drawn for each row at its position; it is the input of the row's next step."""
        self.tokens[rows, positions] = tokens
        self.num_tokens[rows] = positions + 1
        if self.counts:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                if row in self.counts:
                    self.counts[row].output[token] += 1
                    self.counts[row].seen[token] = True

    def check(self) -> None:
        """Raise RuntimeError if an invariant is broken. Called by tests after each step."""
        if self.num_scoring != (self.num_prompt_top >= 0).sum():
            raise RuntimeError(f"{self.num_scoring} rows are counted as wanting their prompt scored")
        for row, params in enumerate(self.params):
            used, num_pages = int(self.num_tokens[row]), int(self.num_pages[row])
            if params is None and (used or num_pages or row in self.counts):
                raise RuntimeError(f"dead row {row} still has {used} tokens and {num_pages} pages")
            if (self.pages[row, :num_pages] <= 0).any() or self.pages[row, num_pages:].any():
                raise RuntimeError(f"row {row}: its {num_pages} pages do not lie in the first columns")
            if params is not None and _wants_penalties(params) != (row in self.counts):
                raise RuntimeError(f"row {row}: token counts are kept exactly where penalties are asked for")
            if row in self.counts and (self.counts[row].output != self._count(row).output).any():
                raise RuntimeError(f"row {row}: token counts differ from its tokens")

    def _count(self, row: int) -> TokenCounts:
        tokens = self.tokens[row, : self.num_tokens[row]]
        output = np.bincount(tokens[self.num_prompt[row] :], minlength=self.vocab_size).astype(np.int32)
        seen = np.zeros(self.vocab_size, np.bool_)
        seen[tokens] = True
        return TokenCounts(output, seen)


def _wants_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
