"""A runner without a model: the next token is a rule of the tokens before it. It checks the plan as a real runner must.

The fake keeps page contents like a real one: what it writes at a position depends on the token and on what lies in the
pages before it, and is read back through the page list at each step. So a page that was found under a wrong prefix,
copied too late, shared while open or handed out twice is noticed. Used by tests of `core` and `engine`; needs no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sayfa.base.step import NewRow, RowResult, RunnerOutput, ScheduledRow, SchedulerOutput, TokenLogprobs

Rule = Callable[[list[int], int], int]
"""(context tokens, seed) → next token."""


def mix_rule(vocab: int) -> Rule:
    """A rule that depends on each token of the context, its position and the seed."""

    def rule(context: list[int], seed: int) -> int:
        value = seed & 0xFFFFFFFF
        for token in context:
            value = (value * 1_000_003 + token + 1) & 0xFFFFFFFF
        return (value >> 7) % vocab

    return rule


_START = 1


def _write(before: int, token: int) -> int:
    """What a token leaves in its slot after the tokens before it."""
    return (before * 6_364_136_223_846_793_005 + token + 1_442_695_040_888_963_407) & 0xFFFFFFFFFFFFFFFF


@dataclass
class _Row:
    new: NewRow
    tokens: list[int]
    pages: list[int] = field(default_factory=list)


class FakeRunner:
    """Executes plans by `rule`. `fail`: (row, step) → error sentence or None, to play a row that breaks."""

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        *,
        rule: Rule | None = None,
        fail: Callable[[int, int], str | None] | None = None,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.rule = rule or mix_rule(1000)
        self.fail = fail
        self.rows: dict[int, _Row] = {}
        self.slots: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.num_computed = 0

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """Carry out one plan; AssertionError if the plan asks for something that a real runner could not do."""
        for row in plan.forget:
            del self.rows[row]
        for new in plan.new:
            assert new.row not in self.rows, f"row {new.row} is given out twice"
            self.rows[new.row] = _Row(new, list(new.tokens), list(new.pages))
        for row, pages in plan.added_pages:
            self.rows[row].pages.extend(pages)
        for source, target in plan.copies:
            self.slots[target] = list(self.slots[source])
        assert len({row.row for row in plan.rows}) == len(plan.rows), "a row is scheduled twice"
        self._write(plan)
        return RunnerOutput(step=plan.step, rows=[self._result(plan.step, row) for row in plan.rows])

    def _write(self, plan: SchedulerOutput) -> None:
        written: set[tuple[int, int]] = set()
        for scheduled in plan.rows:
            row = self.rows[scheduled.row]
            assert scheduled.count > 0
            assert scheduled.start + scheduled.count <= len(row.tokens), "a token is computed before it is known"
            for position in range(scheduled.start, scheduled.start + scheduled.count):
                page, offset = row.pages[position // self.page_size], position % self.page_size
                assert 0 < page < self.num_pages, f"page {page} is not ours to write"
                assert (page, offset) not in written, f"slot {offset} of page {page} is written by two rows"
                written.add((page, offset))
                before = self._read(row, position - 1) if position else _START
                assert before is not None, f"row {scheduled.row}: nothing was written before position {position}"
                self.slots[page][offset] = _write(before, row.tokens[position])
        self.num_computed += len(written)

    def _result(self, step: int, scheduled: ScheduledRow) -> RowResult:
        row = self.rows[scheduled.row]
        error = self.fail(scheduled.row, step) if self.fail else None
        if error:
            return RowResult(row=scheduled.row, error=error, error_code="numerical_error")
        end = scheduled.start + scheduled.count
        value = _START
        for position in range(end):
            value = _write(value, row.tokens[position])
            assert self._read(row, position) == value, f"row {scheduled.row}: wrong K/V at position {position} of {end}"
        scores: list[TokenLogprobs] = []
        if row.new.params.prompt_logprobs is not None:
            scores = [self._score(row, p) for p in range(end - scheduled.num_logits, end - scheduled.sample)]
        if not scheduled.sample:
            return RowResult(row=scheduled.row, prompt_logprobs=scores)
        assert end == len(row.tokens), "a token is sampled before all others are computed"
        assert scheduled.num_logits >= 1
        token = self.rule(row.tokens, row.new.seed)
        row.tokens.append(token)
        logprobs = [TokenLogprobs(-1.0, 1, [], [])] if row.new.params.logprobs is not None else []
        return RowResult(row=scheduled.row, tokens=[token], logprobs=logprobs, prompt_logprobs=scores)

    def _read(self, row: _Row, position: int) -> int | None:
        return self.slots[row.pages[position // self.page_size]][position % self.page_size]

    def _score(self, row: _Row, position: int) -> TokenLogprobs:
        """The score of the prompt token after `position`; its rank field carries the position, for tests."""
        assert position + 1 < row.new.num_prompt, f"position {position} scores no prompt token"
        return TokenLogprobs(-float(row.tokens[position + 1]), position + 1, [], [])
