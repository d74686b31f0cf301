"""The offline door: `LLM(model).generate(prompts)` and `.chat(messages)` over an engine in this process.

Called by users and by `sayfa generate`. Text goes in and comes out here; the engine itself sees token ids only.
Importing this file loads neither numpy nor torch: the engine is imported when an `LLM` is made.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from sayfa.base.errors import ConfigError, InvalidRequest, Overloaded
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.registry import Registry
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.settings import engine_config
from sayfa.base.step import TokenLogprobs
from sayfa.hub import resolve_model
from sayfa.text.chat_template import ChatTemplate, load_chat_template
from sayfa.text.detokenizer import Detokenizer
from sayfa.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from sayfa.engine.engine import Engine

Prompt: TypeAlias = str | list[int]
Message: TypeAlias = dict[str, Any]
OnError: TypeAlias = Literal["raise", "return"]

_PARTS = Registry("sayfa.llm", {"build_engine": "sayfa.engine.build:build_engine"})


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

    finish_reason: "stop" (end token or stop string), "length", "deadline" or "error" (then `error` is a sentence).
    stop_reason: the stop string, or the id of the token, that ended it.
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


class LLM:
    """A model in this process.

    model: as on the command line (alias, .gguf file, folder, hub id). options: the engine's settings by their names,
    for example `max_model_len=4096`, `threads=2`. Raises ConfigError or ModelError. Not for use from several threads.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = engine_config({**options, "model": model})
        path = resolve_model(model, revision=config.model.revision, offline=config.model.offline)
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=str(path)))
        self._engine: Engine = _PARTS.get("build_engine")(config)
        self._tokenizer = load_tokenizer(path)
        source = None if config.model.chat_template is None else _read_template(config.model.chat_template)
        self._template: ChatTemplate | None = load_chat_template(self._tokenizer, source)
        self._num_requests = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def engine(self) -> "Engine":
        """The engine underneath."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        errors: OnError = "raise",
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); return the outputs in the order of the prompts.

        params: one for all, or one for each. on_progress: called with (prompts done, all) after each that is done. A
        request that cannot be served raises InvalidRequest before any work or, with errors="return", has an `error`
        in its output as one that fails later does; the others are served.
        """
        pairs = _pair(_as_list(prompts), params)
        return self._run([self._checked(partial(self._prompt_job, *pair), errors) for pair in pairs], on_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        errors: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answer one conversation or several; a message is {"role": ..., "content": ...}. Else like `generate`.

        If the last message is the assistant's, it is continued.
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        pairs = _pair(list(conversations), params)
        return self._run([self._checked(partial(self._chat_job, *pair), errors) for pair in pairs], on_progress)

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """Answer one conversation, yielding the text as it comes (of the first answer). Leaving early ends the
        request.
        """
        job = self._chat_job(messages, params or SamplingParams())
        request = job.request(self._new_id(), self._tokenizer)
        self._engine.add(request)
        try:
            done, given = False, 0
            while not done:
                for output in self._engine.step().outputs:
                    done = done or (output.id == request.id and job.take(output))
                text = job.text
                if len(text) > given:
                    yield text[given:]
                    given = len(text)
        finally:
            self._clear([request.id])

    def _checked(self, make: "Callable[[], _Job]", errors: OnError) -> "_Job | _Refused":
        """Make a job that the engine would take. Raises InvalidRequest, or wraps it for errors="return"."""
        if errors not in get_args(OnError):
            raise ConfigError(f"errors is {errors!r}; choose one of {', '.join(get_args(OnError))}")
        try:
            job = make()
            self._engine.check(job.request("unnamed", self._tokenizer))
        except InvalidRequest as error:
            if errors == "raise":
                raise
            return _Refused(str(error))
        return job

    def _prompt_job(self, prompt: Prompt, params: SamplingParams) -> "_Job":
        ids = prompt if isinstance(prompt, list) else self._tokenizer.encode(prompt)
        return _Job(self._tokenizer, None if isinstance(prompt, list) else prompt, ids, params)

    def _chat_job(self, conversation: Sequence[Message], params: SamplingParams) -> "_Job":
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use `generate`, or give one with `chat_template`")
        goes_on = bool(conversation) and conversation[-1].get("role") == "assistant"
        rendered = self._template.render(
            conversation, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
        return _Job(self._tokenizer, rendered.text, rendered.encode(self._tokenizer), params)

    def _new_id(self) -> str:
        self._num_requests += 1
        return f"offline-{self._num_requests}"

    def _clear(self, ids: list[str]) -> None:
        """Abort what is left and let the engine come to rest."""
        self._engine.abort(ids)
        while self._engine.has_work:
            self._engine.step()

    def _run(
        self, jobs: "Sequence[_Job | _Refused]", on_progress: Callable[[int, int], None] | None
    ) -> list[RequestOutput]:
        """Feed the jobs as the engine has room, step until all are done."""
        engine, waiting = self._engine, [job for job in reversed(jobs) if isinstance(job, _Job)]
        open_jobs: dict[str, _Job] = {}
        done = len(jobs) - len(waiting)
        try:
            while waiting or open_jobs:
                self._feed(waiting, open_jobs)
                for output in engine.step().outputs:
                    job_or_none = open_jobs.get(output.id)
                    if job_or_none is None:
                        continue
                    if job_or_none.take(output):
                        del open_jobs[output.id]
                        engine.abort([output.id])  # the engine does not know of a stop string that ended the last of it
                        done += 1
                        if on_progress is not None:
                            on_progress(done, len(jobs))
                    elif job_or_none.stopped(output):
                        engine.abort([output.id], [output.branch])
        finally:
            self._clear(list(open_jobs))
        return [job.result() for job in jobs]

    def _feed(self, waiting: "list[_Job]", open_jobs: "dict[str, _Job]") -> None:
        """Hand jobs to the engine, last first, until its queue is full."""
        while waiting and len(open_jobs) < 2 * self._engine.info.max_num_seqs:
            request = waiting[-1].request(self._new_id(), self._tokenizer)
            try:
                self._engine.add(request)
            except Overloaded:
                if not open_jobs:  # nobody is there who would make room
                    raise
                return
            open_jobs[request.id] = waiting.pop()


class _Branch:
    """One answer in the making."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.detokenizer = Detokenizer(
            tokenizer, params.stop, params.include_stop_str_in_output, params.skip_special_tokens
        )
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.last: EngineOutput | None = None
        self.stop_string: str | None = None

    @property
    def done(self) -> bool:
        return self.last is not None or self.stop_string is not None

    def take(self, output: EngineOutput) -> None:
        for index, token in enumerate(output.tokens):
            if self.stop_string is not None:
                return
            self.token_ids.append(token)
            self.logprobs += output.logprobs[index : index + 1]
            self.detokenizer.push([token], output.finish is not None and index + 1 == len(output.tokens))
            self.stop_string = self.detokenizer.stop_string
        if output.finish is not None and self.stop_string is None:
            self.detokenizer.push([], True)
            self.last = output


class _Refused:
    """One prompt that cannot be served, and why."""

    def __init__(self, error: str) -> None:
        self._error = error

    def result(self) -> RequestOutput:
        """Say so in the form of an answer."""
        answer = Answer(index=0, text="", token_ids=[], finish_reason="error", error=self._error)
        usage = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        return RequestOutput(prompt=None, prompt_token_ids=[], outputs=[answer], usage=usage)


class _Job:
    """One prompt, its wishes and what came back."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | None, ids: list[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._ids = ids
        self._params = params
        self._branches = [_Branch(tokenizer, params) for _ in range(params.n)]
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_cached = 0

    def request(self, request_id: str, tokenizer: Tokenizer) -> Request:
        """Make the engine's request. Raises InvalidRequest."""
        self._params.check()
        params = msgspec.structs.replace(self._params, eos_token_ids=sorted(tokenizer.eos_ids))
        return Request(id=request_id, prompt=self._ids, params=params)

    def take(self, output: EngineOutput) -> bool:
        """Take a step's output of one branch; tell whether all branches are done."""
        self._prompt_logprobs += output.prompt_logprobs
        self._num_cached = max(self._num_cached, output.num_cached)
        branch = self._branches[output.branch]
        if not branch.done:
            branch.take(output)
        return all(branch.done for branch in self._branches)

    def stopped(self, output: EngineOutput) -> bool:
        """Whether a stop string has ended this output's branch while the engine goes on with it."""
        return output.finish is None and self._branches[output.branch].stop_string is not None

    @property
    def text(self) -> str:
        """The first answer's text so far."""
        return self._branches[0].detokenizer.text

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
            scored = list(self._choices(self._ids[1:], self._prompt_logprobs))
        return RequestOutput(
            prompt=self._prompt, prompt_token_ids=self._ids, outputs=answers, usage=usage, prompt_logprobs=scored
        )

    def _answer(self, index: int, branch: _Branch) -> Answer:
        last = branch.last
        reason: str = "stop" if branch.stop_string is not None or last is None or last.finish is None else last.finish
        return Answer(
            index=index,
            text=branch.detokenizer.text,
            token_ids=branch.token_ids,
            finish_reason=reason,
            stop_reason=branch.stop_string if last is None else last.stop_token,
            logprobs=None if self._params.logprobs is None else list(self._choices(branch.token_ids, branch.logprobs)),
            error=None if last is None else last.error,
        )

    def _choices(self, ids: list[int], scores: list[TokenLogprobs]) -> Iterator[TokenChoice]:
        text = self._tokenizer.token_text
        for token, score in zip(ids, scores, strict=False):
            top = [(other, text(other), value) for other, value in zip(score.top_ids, score.top_logprobs, strict=True)]
            yield TokenChoice(token, text(token), score.logprob, score.rank, top)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path!r} cannot be read: {error}") from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from several: a list of ints is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [[int(item) for item in prompts if isinstance(item, int)]]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]


def _pair(
    items: list[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterator[tuple[Any, SamplingParams]]:
    """Give each item its params. Raises InvalidRequest if there are more of one than of the other."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(items)
    if len(params) != len(items):
        raise InvalidRequest(
            f"there are {len(items)} prompts but {len(params)} params; give one for all or one for each."
        )
    yield from zip(items, params, strict=True)
