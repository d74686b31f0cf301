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
from sayfa.base.registry import Registry
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.settings import engine_config
from sayfa.hub import resolve_model
from sayfa.llm_jobs import Answer, Job, Refused, RequestOutput, TokenChoice, Usage
from sayfa.text.chat_template import ChatTemplate, load_chat_template
from sayfa.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from sayfa.engine.engine import Engine

__all__ = ["LLM", "Answer", "RequestOutput", "TokenChoice", "Usage"]

Prompt: TypeAlias = str | list[int]
Message: TypeAlias = dict[str, Any]
OnError: TypeAlias = Literal["raise", "return"]

_PARTS = Registry("sayfa.llm", {"build_engine": "sayfa.engine.build:build_engine"})


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

    def _checked(self, make: Callable[[], Job], errors: OnError) -> Job | Refused:
        """Make a job that the engine would take. Raises InvalidRequest, or wraps it for errors="return"."""
        if errors not in get_args(OnError):
            raise ConfigError(f"errors is {errors!r}; choose one of {', '.join(get_args(OnError))}")
        try:
            job = make()
            self._engine.check(job.request("unnamed", self._tokenizer))
        except InvalidRequest as error:
            if errors == "raise":
                raise
            return Refused(str(error))
        return job

    def _prompt_job(self, prompt: Prompt, params: SamplingParams) -> Job:
        ids = prompt if isinstance(prompt, list) else self._tokenizer.encode(prompt)
        return Job(self._tokenizer, None if isinstance(prompt, list) else prompt, ids, params)

    def _chat_job(self, conversation: Sequence[Message], params: SamplingParams) -> Job:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use `generate`, or give one with `chat_template`")
        goes_on = bool(conversation) and conversation[-1].get("role") == "assistant"
        rendered = self._template.render(
            conversation, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
        return Job(self._tokenizer, rendered.text, rendered.encode(self._tokenizer), params)

    def _new_id(self) -> str:
        self._num_requests += 1
        return f"offline-{self._num_requests}"

    def _clear(self, ids: list[str]) -> None:
        """Abort what is left and let the engine come to rest."""
        self._engine.abort(ids)
        while self._engine.has_work:
            self._engine.step()

    def _run(
        self, jobs: Sequence[Job | Refused], on_progress: Callable[[int, int], None] | None
    ) -> list[RequestOutput]:
        """Feed the jobs as the engine has room, step until all are done."""
        engine, waiting = self._engine, [job for job in reversed(jobs) if isinstance(job, Job)]
        open_jobs: dict[str, Job] = {}
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

    def _feed(self, waiting: list[Job], open_jobs: dict[str, Job]) -> None:
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
