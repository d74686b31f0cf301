"""The books of one request: when it came, what it used, how it ended. Exactly one ending, in every case.

A `Record` is opened by `routes` when a generation request has passed the key check, and closed by whoever sees its end
first; the edge closes what nobody closed (a client that left before the stream was read). Knows no response format.

Law: received = ended by reason + rejected by reason + in flight, at any moment.
"""

import logging

import msgspec

from sayfa.base.clock import Clock
from sayfa.base.errors import RequestError
from sayfa.base.faults import fault
from sayfa.base.messages import EngineOutput, Outputs, RequestAdmitted, RequestPreempted
from sayfa.base.sampling_params import SamplingParams
from sayfa.server.errors import DeadlinePassedError, to_answer
from sayfa.server.metrics import ServerMetrics

log = logging.getLogger("sayfa.server.request")


class Usage(msgspec.Struct):
    """Token counts of a request so far. A prompt counts once, whatever `n` is; an end token does not count."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class Times(msgspec.Struct):
    """Parts of a request's life in seconds; with the server's own part they add up to the total."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def sum_s(self) -> float:
        return self.queue_s + self.prefill_s + self.decode_s


class Admissions:
    """Tells records when the engine gave their requests a place, and took it from them, from the engine's own events.

    A request that fails, is abandoned or ended by a stop string never gets a last output that could tell.
    """

    def __init__(self) -> None:
        self._watched: dict[str, Record] = {}

    def watch(self, engine_id: str, record: "Record") -> None:
        """Begin to watch a request of the engine."""
        self._watched[engine_id] = record

    def forget(self, engine_id: str) -> None:
        """Stop watching it."""
        self._watched.pop(engine_id, None)

    def on_outputs(self, outputs: Outputs) -> None:
        """Take a step's events."""
        for event in outputs.events:
            if type(event) is RequestAdmitted and event.branch == 0:
                record = self._watched.get(event.request)
                if record is not None:
                    fault("server.admissions")
                    record.admitted(event.request, event.cached)
            elif type(event) is RequestPreempted:
                record = self._watched.get(event.request)
                if record is not None:
                    record.preempted()


class Record:
    """One request's books. Invariant: `close` has an effect once.

    request_id: as the answer's header `x-request-id` has it, known from the start; `id` is the answer's own, later.
    """

    def __init__(  # noqa: PLR0917 - made in one place
        self, metrics: ServerMetrics, clock: Clock, route: str, tenant: str, request_id: str, write_line: bool
    ) -> None:
        self._clock = clock
        self.arrived_s = clock.monotonic()
        self.usage = Usage()
        self.id = "-"
        self._metrics = metrics
        self._route = route
        self._tenant = tenant
        self.request_id = request_id
        self._write_line = write_line
        self._params: SamplingParams | None = None
        self._times = Times()
        self._submitted_s: float | None = None
        self._admitted_s: float | None = None
        self._first_s: float | None = None
        self._last_s: dict[int, float] = {}
        self._cached: dict[str, int] = {}
        self._num_seen_preempted = self._num_told_preempted = 0
        self._open = True
        fault("server.books.open")
        metrics.received()

    def begin(self, answer_id: str, num_prompt: int, params: SamplingParams, num_prompts: int) -> None:
        """Note that the request was admitted: its answer's id, its length and wishes."""
        fault("server.books.begin")
        self.id = answer_id
        self._submitted_s = self._clock.monotonic()
        self._params = params
        self.usage.prompt = num_prompt
        self._metrics.admitted(params, num_prompts)

    def admitted(self, engine_id: str, num_cached: int) -> None:
        """Note that the engine gave one of the prompts a place, and how much of it was cached. Later ones count not."""
        if engine_id not in self._cached:
            self._cached[engine_id] = num_cached
            self.usage.cached += num_cached
            if self._admitted_s is None:
                self._admitted_s = self._clock.monotonic()

    def preempted(self) -> None:
        """Note that the engine took the place of one of the branches."""
        self._num_seen_preempted += 1

    def note(self, index: int, num_tokens: int, output: EngineOutput) -> None:
        """Note an engine output that added `num_tokens` to answer `index`."""
        fault("server.books.note")
        if num_tokens:
            now_s = self._clock.monotonic()
            last_s = self._last_s.get(index)
            self._last_s[index] = now_s
            self.usage.output += num_tokens
            self._metrics.tokens(num_tokens)
            if self._first_s is None:
                self._first_s = now_s
                self._metrics.first_token(now_s - self.arrived_s)
            elif last_s is not None:
                self._metrics.token_gap((now_s - last_s) / num_tokens)
        if output.finish is not None:
            # A prompt's cached tokens are told with each of its branches; its first branch found them.
            if output.branch == 0:
                self.admitted(output.id, output.num_cached)
            if output.times is not None:
                times = output.times
                self._num_told_preempted += times.preempted
                if times.queue_s + times.prefill_s + times.decode_s > self._times.sum_s:
                    self._times = Times(times.queue_s, times.prefill_s, times.decode_s)

    def fail(self, error: Exception) -> None:
        """Close with the outcome that an exception stands for; its code is the one that the client is told."""
        told = to_answer(error, self.request_id).error
        if isinstance(error, DeadlinePassedError):
            self.close("deadline")
        elif isinstance(error, RequestError) and not self.usage.output:
            self.close(f"rejected:{told.code or told.type}")
        else:
            self.close(f"error:{told.code}")

    def close(self, outcome: str) -> None:
        """End the books: stop, length, abort, deadline, error:CODE, or rejected:REASON."""
        if not self._open:
            return
        self._open = False
        end_s = self._clock.monotonic()
        total_s = end_s - self.arrived_s
        times = self._times
        try:
            times = self._final_times(end_s)
        except Exception:  # a request without its times is still one that has ended
            log.exception("the times of request %s could not be told", self.request_id)
        ending, _, code = outcome.partition(":")
        if ending == "rejected":
            self._metrics.rejected(code)
        else:
            usage = self.usage
            counts = (usage.prompt, usage.cached, usage.output)
            self._metrics.ended(ending, counts, (times.queue_s, times.prefill_s, times.decode_s), total_s)
            later_tokens = max(1, usage.output - len(self._last_s))
            per_token_s = times.decode_s * max(1, len(self._last_s)) / later_tokens
            self._metrics.time_per_token(per_token_s, self._num_preempted)
        if self._write_line:
            self._write(outcome, times, total_s)

    def _final_times(self, end_s: float) -> Times:
        """The engine's own times come with its last output; without one, the server's view must do.

            begin ──queue──▸ admitted ──prefill──▸ first token ──decode──▸ last token

        What was not reached when the request ended leaves its time to the part before it.
        """
        fault("server.books.close")
        if self._times.sum_s or self._submitted_s is None:
            return self._times
        first_s = end_s if self._first_s is None else self._first_s
        placed_s = self._admitted_s
        if placed_s is None:  # not told of an engine that has sent tokens
            placed_s = end_s if self._first_s is None else self._submitted_s
        last_s = max(self._last_s.values(), default=end_s)
        return Times(placed_s - self._submitted_s, first_s - placed_s, last_s - first_s)

    @property
    def _num_preempted(self) -> int:
        """By the events, or by the last outputs, which may be there before the events of their step are."""
        return max(self._num_seen_preempted, self._num_told_preempted)

    def _write(self, outcome: str, times: Times, total_s: float) -> None:
        usage, params = self.usage, self._params
        server_s = max(0.0, total_s - times.sum_s)
        log.info(
            "%s %s %s",
            self._route,
            outcome,
            self.id,
            extra={
                "request_id": self.request_id,
                "prompt": usage.prompt,
                "cached": usage.cached,
                "output": usage.output,
                "n": params.n if params is not None else 0,
                "tenant": self._tenant[:6] or "-",
                "queue_s": round(times.queue_s, 4),
                "prefill_s": round(times.prefill_s, 4),
                "decode_s": round(times.decode_s, 4),
                "server_s": round(server_s, 4),
                "total_s": round(total_s, 4),
                "preempted": self._num_preempted,
            },
        )
