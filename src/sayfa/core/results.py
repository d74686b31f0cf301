"""What a row's result does to its sequence: `computed` moves, pages are stored, a token is added or ends it.

Called by `Scheduler.update`, once per row; must not know budgets or queues.
"""

from sayfa.base.faults import fault
from sayfa.base.messages import EngineOutput
from sayfa.base.step import RowResult, ScheduledRow
from sayfa.core.kv_cache import KvCache
from sayfa.core.roster import Roster
from sayfa.core.sequence import Sequence


class Results:
    """Applies results to the sequences of a roster."""

    def __init__(self, roster: Roster, cache: KvCache) -> None:
        self._roster = roster
        self._cache = cache
        self._page_size = cache.page_size

    def apply(
        self, sequence: Sequence, row: ScheduledRow, result: RowResult, now_s: float, outputs: list[EngineOutput]
    ) -> None:
        """Apply one row's result and add to `outputs` what its request is told."""
        fault("core.apply")
        state = sequence.state
        if result.error is not None:
            outputs += self._roster.end(state, "error", now_s, error=result.error, code=result.error_code)
            return
        if len(result.tokens) != row.sample:
            raise RuntimeError(f"row {row.row} of {sequence.id} should sample {int(row.sample)}, got {result.tokens}")
        computed = sequence.computed = row.start + row.count
        if computed // self._page_size > sequence.num_stored:
            self._cache.commit(sequence)
        if sequence.scored < computed and state.params.prompt_logprobs is not None:
            sequence.scored = min(computed, sequence.num_prompt - 1)
        if row.sample:
            outputs.append(self._take_token(sequence, result, now_s))
        elif state.max_tokens == 0 and computed >= sequence.goal:
            outputs.append(self._roster.finish(sequence, "length", now_s, prompt_logprobs=result.prompt_logprobs))
            if state.open_branches and sequence.branch == 0:  # another one may be here before the prompt is scored
                outputs += self._roster.end(state, "length", now_s)
        elif result.prompt_logprobs:
            outputs.append(EngineOutput(id=sequence.id, branch=sequence.branch, prompt_logprobs=result.prompt_logprobs))

    def _take_token(self, sequence: Sequence, result: RowResult, now_s: float) -> EngineOutput:
        """Append the sampled token, or end the branch by it. A stop token is told apart, not appended."""
        state = sequence.state
        token = result.tokens[0]
        tokens = sequence.tokens
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            if len(state.branches) < state.params.n:
                self._roster.spawn(state)
        num_output = len(tokens) - sequence.num_prompt
        if token in state.stops and num_output >= state.params.min_tokens:
            return self._roster.finish(
                sequence, "stop", now_s, stop_token=token, prompt_logprobs=result.prompt_logprobs
            )
        tokens.append(token)
        if num_output + 1 < state.max_tokens:
            return EngineOutput(
                id=state.request.id,
                branch=sequence.branch,
                tokens=result.tokens,
                logprobs=result.logprobs,
                prompt_logprobs=result.prompt_logprobs,
            )
        return self._roster.finish(
            sequence,
            "length",
            now_s,
            tokens=result.tokens,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
        )
