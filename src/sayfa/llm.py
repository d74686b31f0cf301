"""The offline door: `LLM(model).generate(prompts)` and `.chat(messages)` over an engine in this process.

Called by users and by `sayfa generate`. Text goes in and comes out here; the engine itself sees token ids only.
Importing this file loads neither numpy nor torch: the engine is imported when an `LLM` is made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from numbers import Integral
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from sayfa.base.errors import ConfigError, EngineError, InvalidRequest, Overloaded, RequestError
from sayfa.base.interrupts import held_back
from sayfa.base.log import logger
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.registry import Registry
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.settings import engine_config
from sayfa.hub import resolve_model
from sayfa.llm_jobs import Answer, Job, Refused, RequestOutput, TokenChoice, Usage
from sayfa.text.chat_template import ChatTemplate, load_chat_template, read_template
from sayfa.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from sayfa.engine.engine import Engine

__all__ = ["LLM", "Answer", "RequestOutput", "TokenChoice", "Usage"]

Prompt: TypeAlias = str | list[int]
Message: TypeAlias = dict[str, Any]
OnError: TypeAlias = Literal["raise", "return"]
OnOutput: TypeAlias = Callable[[int, RequestOutput], None]

log = logger("llm")

_PARTS = Registry("sayfa.llm", {"build_engine": "sayfa.engine.build:build_engine"})


class LLM:
    """A model in this process.

    model: as on the command line (alias, .gguf file, folder, hub id). options: the engine's settings by their names,
    for example `max_model_len=4096`, `threads=2`. Raises ConfigError or ModelError. Calls may take turns: while a
    stream is open, others may be opened and read, and `generate` called, also from other threads; they share the steps.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = engine_config({**options, "model": model})
        source = None if config.model.chat_template is None else read_template(config.model.chat_template)
        path = resolve_model(model, revision=config.model.revision, offline=config.model.offline)
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=str(path)))
        self._engine: Engine = _PARTS.get("build_engine")(config)
        self._tokenizer = load_tokenizer(path)
        self._template: ChatTemplate | None = load_chat_template(self._tokenizer, source)
        self._open = _OpenJobs(self._engine)
        self._numbers = count(1)

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
        on_output: OnOutput | None = None,
        errors: OnError = "raise",
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); return the outputs in the order of the prompts.

        prompts: a text, a sequence of whole numbers (one prompt of ids), or a sequence of such texts and sequences.
        params: one for all, or one for each. on_progress: called with (prompts done, all) after each that is done;
        on_output before it, with the prompt's place and its output. A request that cannot be served raises
        InvalidRequest before any work, and one that the engine fails EngineError, which ends the others; with
        errors="return" either has an `error` in its output, and the others are served. So have, when the engine is
        lost, those that were not done.
        """
        numbered = enumerate(_pair(_as_list(prompts), params))
        jobs = [self._checked(partial(self._prompt_job, f"prompt {i}", *pair), errors) for i, pair in numbered]
        return self._run(jobs, on_progress, on_output, errors)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        on_output: OnOutput | None = None,
        errors: OnError = "raise",
    ) -> list[RequestOutput]:
        """Answer one conversation or several; a message is {"role": ..., "content": ...}. Else like `generate`.

        If the last message is the assistant's, it is continued.
        """
        if not _is_sequence(messages):
            raise InvalidRequest(
                f"the messages are of type {_type(messages)}; give a list of them, or a list of lists."
            )
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        pairs = _pair(list(conversations), params)
        jobs = [self._checked(partial(self._chat_job, *pair), errors) for pair in pairs]
        return self._run(jobs, on_progress, on_output, errors)

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """Answer one conversation, yielding the text as it comes (of the first answer). Leaving early ends the
        request. Raises EngineError, after what came, if the engine fails it.
        """
        [(messages, params)] = _pair([messages], params)
        job = self._chat_job(messages, params)
        request = job.request(self._new_id())
        try:
            waits = True
            while waits:
                with self._open.turn:
                    waits = not self._open.enter(request, job)
                    if waits:
                        self._open.step()
            given = 0
            while True:
                with self._open.turn:  # others' steps may have brought it, so it is looked at before the next one
                    if len(job.text) == given and not job.done:
                        self._open.step()
                    text, failure, done = job.text, job.failure, job.done
                if len(text) > given:
                    yield text[given:]
                    given = len(text)
                elif failure is not None:
                    raise failure
                elif done:
                    return
        finally:
            self._open.leave([request.id])

    def _checked(self, make: Callable[[], Job], errors: OnError) -> Job | Refused:
        """Make a job that the engine would take. Raises InvalidRequest, or wraps it for errors="return"."""
        if errors not in get_args(OnError):
            raise ConfigError(f"errors is {errors!r}; choose one of {', '.join(get_args(OnError))}")
        try:
            job = make()
            self._engine.check(job.request("unnamed"))
        except InvalidRequest as error:
            if errors == "raise":
                raise
            return Refused(str(error))
        return job

    def _prompt_job(self, name: str, prompt: Prompt, params: SamplingParams) -> Job:
        if isinstance(prompt, str):
            return Job(self._tokenizer, prompt, self._tokenizer.encode(prompt), params)
        return Job(self._tokenizer, None, _token_ids(name, prompt), params)

    def _chat_job(self, conversation: Sequence[Message], params: SamplingParams) -> Job:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use `generate`, or give one with `chat_template`")
        if not _is_sequence(conversation) or not all(isinstance(each, Mapping) for each in conversation):
            raise InvalidRequest('a conversation is a list of messages, each a dict: {"role": ..., "content": ...}.')
        goes_on = bool(conversation) and conversation[-1].get("role") == "assistant"
        rendered = self._template.render(
            conversation, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
        return Job(self._tokenizer, rendered.text, rendered.encode(self._tokenizer), params)

    def _new_id(self) -> str:
        return f"offline-{next(self._numbers)}"

    def _run(
        self,
        jobs: Sequence[Job | Refused],
        on_progress: Callable[[int, int], None] | None,
        on_output: OnOutput | None,
        errors: OnError,
    ) -> list[RequestOutput]:
        """Feed the jobs as the engine has room, step until all are done or, with errors="raise", one has failed."""
        outputs: dict[int, RequestOutput] = {}

        def end(place: int, job: Job | Refused) -> None:
            outputs[place] = job.result()
            if on_output is not None:
                on_output(place, outputs[place])
            if on_progress is not None and isinstance(job, Job):
                on_progress(len(outputs), len(jobs))

        waiting = [(place, job) for place, job in enumerate(jobs) if isinstance(job, Job)][::-1]
        mine: dict[str, tuple[int, Job]] = {}
        for place, refused in ((place, job) for place, job in enumerate(jobs) if isinstance(job, Refused)):
            end(place, refused)
        try:
            while waiting or mine:
                try:
                    with self._open.turn:
                        self._advance(waiting, mine)
                except Exception as error:
                    if errors == "raise" or isinstance(error, RequestError):
                        raise
                    if not isinstance(error, EngineError):
                        log.exception("the engine was lost")
                    for place, job in [*mine.values(), *waiting[::-1]]:
                        job.fail(_lost(error))
                        end(place, job)
                    break
                for request_id in [name for name, (_, job) in mine.items() if job.done]:
                    place, job = mine.pop(request_id)
                    if job.failure is not None and errors == "raise":
                        raise job.failure
                    end(place, job)
        finally:
            self._open.leave(list(mine))
        return [outputs[place] for place in range(len(jobs))]

    def _advance(self, waiting: list[tuple[int, Job]], mine: dict[str, tuple[int, Job]]) -> None:
        """Hand jobs to the engine, last first, until its queue is full; step if none is done."""
        while waiting and len(mine) < 2 * self._engine.info.max_num_seqs:
            job = waiting[-1][1]
            request = job.request(self._new_id())
            if not self._open.enter(request, job):
                break
            mine[request.id] = waiting.pop()
        if not any(job.done for _, job in mine.values()):
            self._open.step()


class _OpenJobs:
    """The jobs that are with the engine, of all calls that have not ended.

    Whoever makes a step, each job gets its own outputs of it. A call that ends or is given up says so with `leave`,
    which may come at any time: a stream that nobody holds is closed wherever garbage is collected, also inside a step.
    Ctrl-C waits until the engine is whole again, so that who stopped an answer can ask on. Who calls `enter` or `step`
    holds `turn`, from the look at what it has to the step that it needs: another thread's may bring it in between.
    """

    def __init__(self, engine: "Engine") -> None:
        self.turn = RLock()
        self._engine = engine
        self._jobs: dict[str, Job] = {}
        self._left: list[str] = []
        self._at_work = False

    @held_back()
    def enter(self, request: Request, job: Job) -> bool:
        """Queue a job's request; False if the queue is full and steps will make room. Raises as `Engine.add`."""
        if self._left:  # by a thread that could not take its turn
            self._free()
        self._at_work = True
        try:
            self._engine.add(request)
        except Overloaded:
            if not self._jobs:  # nobody is there who would make room
                raise
            return False
        finally:
            self._at_work = False
        self._jobs[request.id] = job
        return True

    @held_back()
    def step(self) -> None:
        """Make a step and give each job its outputs. Raises EngineError if the engine has nothing to do."""
        self._free()
        if not self._engine.has_work:
            raise EngineError(
                "the engine has no work, but an answer has not ended: a step of it failed, or was made by others; "
                "send the request again"
            )
        self._at_work = True
        try:
            for output in self._engine.step().outputs:
                self._give(output)
        except BaseException:  # who got what is not known: rather no answer than one that lacks a piece
            self._left += self._jobs
            self._jobs.clear()
            raise
        finally:
            self._at_work = False

    def leave(self, ids: list[str]) -> None:
        """End these requests. If nobody else is here, let the engine come to rest."""
        for request_id in ids:
            self._jobs.pop(request_id, None)
        self._left += ids
        if not self.turn.acquire(blocking=False):
            return  # another thread is here; to wait for it where garbage is collected could wait for ever
        try:
            if not self._at_work:
                # An error would hide the caller's own; a lost engine tells the next call, too.
                with suppress(Exception):
                    self._free()
        finally:
            self.turn.release()

    def _give(self, output: EngineOutput) -> None:
        job = self._jobs.get(output.id)
        if job is None:
            return
        if job.take(output):
            del self._jobs[output.id]
            self._engine.abort([output.id])  # the engine does not know of a stop string that ended the last of it
        elif job.stopped(output):
            self._engine.abort([output.id], [output.branch])

    @held_back()
    def _free(self) -> None:
        """Abort the requests that were left; with no job here, step until the engine has told all."""
        self._at_work = True
        try:
            while self._left or (not self._jobs and self._engine.has_work):
                ids, self._left = self._left, []
                self._engine.abort(ids)
                if not self._jobs and self._engine.has_work:
                    self._engine.step()
        finally:
            self._at_work = False


def _lost(error: Exception) -> EngineError:
    """What the callers are told whose answers were not done when the engine was lost."""
    if isinstance(error, EngineError):
        return error
    return EngineError(f"the engine was lost by a mistake of ours ({type(error).__name__}); make a new one")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Tell one prompt from several: a sequence of whole numbers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_sequence(prompts):
        raise InvalidRequest(
            f"the prompts are of type {_type(prompts)}; give a text, a list of token ids, or a list of such prompts."
        )
    if any(isinstance(item, Integral) for item in prompts):
        return [_token_ids("the one prompt of token ids", prompts)]
    return list(prompts)


def _token_ids(name: str, ids: Any) -> list[int]:
    """Take whole numbers, also numpy's. Raises InvalidRequest naming the place of what is none."""
    if not _is_sequence(ids):
        raise InvalidRequest(f"{name} is of type {_type(ids)}; give a text or a list of token ids.", param="prompt")
    if set(map(type, ids)) <= {int}:
        return list(ids)
    for place, item in enumerate(ids):
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise InvalidRequest(
                f"{name} holds at place {place} a value of type {_type(item)}; token ids are whole numbers.",
                param="prompt",
            )
    return [int(item) for item in ids]


def _is_sequence(value: Any) -> bool:
    """Whether it is a list or like one; bytes are, to Python, but mean text that lacks its encoding."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _type(value: Any) -> str:
    return type(value).__name__


def _pair(
    items: list[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterator[tuple[Any, SamplingParams]]:
    """Give each item its params. Raises InvalidRequest for params that are none, or not as many as items."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(items)
    wrong = [params] if not _is_sequence(params) else [each for each in params if not isinstance(each, SamplingParams)]
    if wrong:
        raise InvalidRequest(f"params of type {_type(wrong[0])} were given; give SamplingParams, or a list of them.")
    if len(params) != len(items):
        raise InvalidRequest(
            f"there are {len(items)} prompts but {len(params)} params; give one for all or one for each."
        )
    yield from zip(items, params, strict=True)
