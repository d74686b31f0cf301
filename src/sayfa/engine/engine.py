"""The engine: add, abort, step. `step` is the sentence of the whole product: decide, compute, update.

Called by `engine.process`, `engine.inproc` and `llm`, from one thread; no asyncio, no locks, no text. It carries the
two records of `base.step` between the wings and owns nothing of either: queues are the scheduler's, tokens the
runner's.
"""

import random
from collections.abc import Callable, Iterable, Sequence

import msgspec

from sayfa.base.clock import Clock
from sayfa.base.errors import InvalidRequest, Overloaded
from sayfa.base.faults import fault
from sayfa.base.messages import EngineInfo, EngineOutput, Outputs, Pong, Refused, Request, StepStats
from sayfa.base.sampling_params import MAX_SEED, SamplingParams
from sayfa.core.scheduler import Scheduler
from sayfa.engine.blame import GuardedRunner, Runner
from sayfa.engine.estimate import QueueEstimate

STEP_MEMORY = 0.95
"""How much of the expected step time is left after a shorter step: it follows slow steps at once and forgets them
slowly."""


class Engine:
    """One model, one scheduler, one runner.

    seeds: where the noise keys of requests without a seed come from. idle_work: done a piece at a time by `idle`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        clock: Clock,
        seeds: random.Random,
        *,
        idle_work: Iterable[None] = (),
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = GuardedRunner(runner)
        self._clock = clock
        self._seeds = seeds
        self._idle_work = iter(idle_work)
        self._estimate = QueueEstimate(random.Random(seeds.random()))
        self._num_steps = 0
        self._progress_s = clock.monotonic()
        self._expected_step_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self._scheduler.has_work

    @property
    def has_requests(self) -> bool:
        """Whether anything is left to end or to tell: as `has_work`, and requests that are paused count, too."""
        return self._scheduler.has_requests or self._scheduler.has_work

    # --------------------------------------------------------------------------------------- requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, or Overloaded with the seconds after which to try again."""
        fault("engine.add.before_check")
        now_s = self._clock.monotonic()
        self._check_fields(request)
        if not self.has_work:
            self._progress_s = now_s  # an idle engine owed no progress until now
            self._estimate.begin(now_s)
        params = request.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.randrange(MAX_SEED))
            request = msgspec.structs.replace(request, params=params)
        retry_after_s = self._estimate.retry_after_s(self._scheduler.num_answers_waiting, now_s)
        if request.deadline_s is not None:
            self._refuse_hopeless(request, request.deadline_s, now_s, retry_after_s)
        fault("engine.add.before_queue")
        self._scheduler.add(request, now_s, retry_after_s)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest for what `add` would refuse however empty the engine is."""
        self._check_fields(request)
        self._scheduler.check(request)

    def abort(self, ids: list[str], branches: list[int] | None = None) -> None:
        """Forget requests, or only some branches of each; their pages are free when this returns.

        Unknown ids are ignored.
        """
        fault("engine.abort")
        now_s = self._clock.monotonic()
        for request_id in ids:
            self._scheduler.abort(request_id, now_s, branches)

    def pause(self, ids: list[str], on: bool) -> None:
        """Compute nothing more of these requests until they are resumed (`on` is False). Unknown ids are ignored."""
        fault("engine.pause")
        if not self.has_work:
            self._progress_s = self._clock.monotonic()  # an engine whose requests are all paused owes no progress
        for request_id in ids:
            self._scheduler.pause(request_id, on)

    def refuse_waiting(self) -> list[Refused]:
        """Turn away all requests that have not started, because the engine drains; they may go elsewhere."""
        fault("engine.refuse_waiting")
        refused = []
        for request_id in self._scheduler.unstarted():
            self.abort([request_id])
            sentence = "the server is shutting down; send the request to another one"
            refused.append(Refused(id=request_id, kind="draining", message=sentence, retry_after_s=5))
        return refused

    def end_all(self, reason: str) -> Outputs:
        """End every request with an error that says `reason`; return their last outputs."""
        fault("engine.end_all")
        now_s = self._clock.monotonic()
        outputs = []
        for request_id, branch in self._scheduler.open_branches():
            outputs.append(
                EngineOutput(id=request_id, branch=branch, finish="error", error=reason, error_code="shutdown")
            )
            self._scheduler.abort(request_id, now_s)
        return Outputs(outputs=outputs)

    def idle(self) -> bool:
        """Use a moment without work for what makes later steps faster; False when nothing of it is left."""
        for _ in self._idle_work:
            return True
        return False

    def reset_cache(self) -> None:
        """Forget all cached pages that no running sequence holds."""
        self._scheduler.reset_cache()

    def _check_fields(self, request: Request) -> None:
        """Raise InvalidRequest for what no engine of this model could serve; the scheduler checks lengths."""
        request.params.check()
        request.params.check_vocabulary(self.info.vocab_size)
        if request.adapter is not None:
            raise InvalidRequest(f"there is no adapter {request.adapter!r} here; leave `adapter` out.", param="adapter")
        if request.prompt and not 0 <= min(request.prompt) <= max(request.prompt) < self.info.vocab_size:
            raise InvalidRequest(
                f"the prompt holds a token id outside [0, {self.info.vocab_size - 1}]; use ids of this model.",
                param="prompt",
            )

    def _refuse_hopeless(self, request: Request, deadline_s: float, now_s: float, retry_after_s: int) -> None:
        """Raise Overloaded before any work if queue and answer take longer than the request's deadline.

        Of the queue counts what is certain before this request's place, a branch for each that stands there, and of the
        answer one step for each token that it must have.
        """
        wait_s = self._estimate.wait_s(self._scheduler.num_before(request), now_s) or 0.0
        room = max(1, self.info.max_model_len - len(request.prompt))
        needed_s = wait_s + self._estimate.least_s(min(_least_tokens(request.params), room))
        if needed_s > deadline_s:
            raise Overloaded(
                f"the queue takes about {wait_s:.1f} s and the answer at least {needed_s - wait_s:.1f} s, longer than "
                f"this request's deadline of {deadline_s:g} s; try again in {retry_after_s} s",
                code="deadline_unreachable",
                retry_after_s=retry_after_s,
            )

    # --------------------------------------------------------------------------------------- the step

    def step(self, tell: Callable[[Outputs], None] | None = None) -> Outputs:
        """Decide, compute, update; return what each branch was given, the step's figures and its events.

        tell: is given the events so far before somebody who enters is computed: that may end this process, and whoever
        looks after it must know who was running.
        """
        fault("engine.step.before_decide")
        begun_s = self._clock.monotonic()
        plan = self._scheduler.schedule(begun_s)
        if plan.new and tell is not None:
            tell(self._message())
        decided_s = self._clock.monotonic()
        fault("engine.step.before_compute")
        result = self._runner.execute(plan)
        computed_s = self._clock.monotonic()
        fault("engine.step.before_update")
        outputs = self._scheduler.update(result, computed_s)
        fault("engine.step.after_update")
        updated_s = self._clock.monotonic()
        fault("engine.step.figures")
        self._note_step(outputs, updated_s - begun_s, updated_s)
        stats = self._scheduler.stats(
            decided_s - begun_s, computed_s - decided_s, updated_s - computed_s, result.timings
        )
        return self._message(outputs, stats)

    def pong(self, number: int) -> Pong:
        """Tell how far the engine is: steps made, and how long ago the last one ended."""
        fault("engine.pong")
        return Pong(
            number=number,
            steps=self._num_steps,
            since_step_s=self._clock.monotonic() - self._progress_s,
            busy=self.has_work,
            expected_step_s=self._expected_step_s,
        )

    def describe(self) -> str:
        """Say in one line what is here and how long ago something moved; for the log when nothing does."""
        scheduler = self._scheduler
        unfinished = ", ".join(dict.fromkeys(request_id for request_id, _ in scheduler.open_branches()[:20]))
        return (
            f"{self._num_steps} steps made, the last ended {self._clock.monotonic() - self._progress_s:.1f} s ago; "
            f"{scheduler.num_running} run, {scheduler.num_waiting} wait, {scheduler.num_paused} are paused; "
            f"unfinished: {unfinished or 'none'}"
        )

    def audit(self) -> None:
        """Raise RuntimeError if any state of the deciding wing contradicts another. Slow: for tests and idle
        moments.
        """
        self._scheduler.audit()

    def _message(self, outputs: Sequence[EngineOutput] = (), stats: StepStats | None = None) -> Outputs:
        """Put the events since the last message to these."""
        first_event, events = self._scheduler.take_events()
        return Outputs(outputs=list(outputs), stats=stats, first_event=first_event, events=events)

    def _note_step(self, outputs: list[EngineOutput], step_s: float, now_s: float) -> None:
        self._num_steps += 1
        self._progress_s = now_s
        self._estimate.note_step(step_s)
        self._expected_step_s = max(step_s, self._expected_step_s * STEP_MEMORY)
        finished = sum(output.finish is not None for output in outputs)
        if finished:
            self._estimate.note_finished(finished, now_s)


def _least_tokens(params: SamplingParams) -> int:
    """Say how many tokens an answer to these wishes must have, at least."""
    cut = params.stop or params.stop_token_ids or not params.ignore_eos
    return max(1, params.min_tokens if cut or params.max_tokens is None else params.max_tokens)
