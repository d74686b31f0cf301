"""Jobs of the offline door: what one prompt asks of the engine, what came back of it so far, and what its caller gets.

Called by `llm`, which gives the records their public names. Knows one request at a time, and no engine. An answer grows
by the server's own rules (`server.answer`), so that the same wishes give the same text and log-probabilities.
"""

from collections.abc import Iterable, Iterator

import msgspec

from sayfa.base.errors import EngineError
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import TokenLogprobs
from sayfa.server.answer import Branch
from sayfa.text.tokenizer import Tokenizer


class TokenChoice(msgspec.Struct, frozen=True):
    """One token of an answer with its log-probability; `top` holds (id, text, log-probability), best first."""

    token_id: int
    text: str
    logprob: float
    rank: int
    top: list[tuple[int, str, float]]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request: prompt, all answers together, and how many of the prompt's were found in the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a prompt.

    finish_reason: "stop" (end token or stop string) or "length"; with any other it is not whole, and `error` says why.
    stop_reason: the stop string, or the id of the token, that ended it. token_ids: all that were drawn, those of a stop
    string included; logprobs: of the tokens that begin in the text.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenChoice] | None = None
    error: str | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt gave: `outputs` are its `n` answers in order; `text` is the first one's."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Answer]
    usage: Usage
    prompt_logprobs: list[TokenChoice] | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text


class _Growing:
    """One answer in the making."""

    def __init__(self, index: int, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[tuple[int, TokenLogprobs]] = []
        self.stop_reason: str | int | None = None
        self.failure: EngineError | None = None
        self._branch = Branch(index, tokenizer, params, wants_entries=params.logprobs is not None)

    @property
    def finish(self) -> str | None:
        """How it ended; None while it grows."""
        return self._branch.finish or (None if self.failure is None else "error")

    def take(self, output: EngineOutput) -> None:
        piece = self._branch.push(output)
        self.text += piece.text
        self.token_ids += piece.tokens
        self.logprobs += [(entry.token, entry.logprobs) for entry in piece.entries if entry.logprobs is not None]
        self.stop_reason = self._branch.stop_string or output.stop_token
        if piece.finish not in (None, "stop", "length"):
            sentence = output.error or f"the engine ended this answer before it was whole ({piece.finish})"
            self.failure = EngineError(sentence, code=output.error_code or piece.finish)


class Refused:
    """One prompt that cannot be served, and why."""

    def __init__(self, error: str) -> None:
        self._error = error

    def result(self) -> RequestOutput:
        """Say so in the form of an answer."""
        answer = Answer(index=0, text="", token_ids=[], finish_reason="error", error=self._error)
        usage = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        return RequestOutput(prompt=None, prompt_token_ids=[], outputs=[answer], usage=usage)


class Job:
    """One prompt, its wishes and what came back. Raises InvalidRequest for wishes that nobody could serve."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | None, ids: list[int], params: SamplingParams) -> None:
        params.check()
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._ids = ids
        self._params = params
        self._branches = [_Growing(index, tokenizer, params) for index in range(params.n)]
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_cached = 0

    def request(self, request_id: str) -> Request:
        """Make the engine's request: the wishes, and the end tokens that the engine cannot know."""
        params = msgspec.structs.replace(self._params, eos_token_ids=sorted(self._tokenizer.eos_ids))
        return Request(id=request_id, prompt=self._ids, params=params)

    def take(self, output: EngineOutput) -> bool:
        """Take a step's output of one branch; tell whether all branches are done."""
        self._prompt_logprobs += output.prompt_logprobs
        self._num_cached = max(self._num_cached, output.num_cached)
        branch = self._branches[output.branch]
        if branch.finish is None:
            branch.take(output)
        return self.done

    def fail(self, error: EngineError) -> None:
        """End all branches that are not done: the engine was lost."""
        for branch in self._branches:
            if branch.finish is None:
                branch.failure = error

    @property
    def done(self) -> bool:
        """Whether all branches are done."""
        return all(branch.finish is not None for branch in self._branches)

    def stopped(self, output: EngineOutput) -> bool:
        """Whether a stop string has ended this output's branch while the engine goes on with it."""
        return output.finish is None and self._branches[output.branch].finish is not None

    @property
    def failure(self) -> EngineError | None:
        """Why the engine failed the request; None if it did not, or not yet."""
        return next((branch.failure for branch in self._branches if branch.failure is not None), None)

    @property
    def text(self) -> str:
        """The first answer's text so far."""
        return self._branches[0].text

    def result(self) -> RequestOutput:
        """Put together what came."""
        answers = [self._answer(index, branch) for index, branch in enumerate(self._branches)]
        usage = Usage(
            prompt_tokens=len(self._ids),
            completion_tokens=sum(len(answer.token_ids) for answer in answers),
            cached_tokens=self._num_cached,
        )
        scored = None
        if self._params.prompt_logprobs is not None:
            scored = list(self._choices(zip(self._ids[1:], self._prompt_logprobs, strict=False)))
        return RequestOutput(
            prompt=self._prompt, prompt_token_ids=self._ids, outputs=answers, usage=usage, prompt_logprobs=scored
        )

    def _answer(self, index: int, branch: _Growing) -> Answer:
        return Answer(
            index=index,
            text=branch.text,
            token_ids=branch.token_ids,
            finish_reason=branch.finish or "stop",
            stop_reason=branch.stop_reason,
            logprobs=None if self._params.logprobs is None else list(self._choices(branch.logprobs)),
            error=None if branch.failure is None else branch.failure.message,
        )

    def _choices(self, scored: Iterable[tuple[int, TokenLogprobs]]) -> Iterator[TokenChoice]:
        text = self._tokenizer.token_text
        for token, score in scored:
            top = [(other, text(other), value) for other, value in zip(score.top_ids, score.top_logprobs, strict=True)]
            yield TokenChoice(token, text(token), score.logprob, score.rank, top)
