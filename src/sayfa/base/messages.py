"""Everything that crosses a process border, as typed msgspec records. Nothing on a wire is ever unpickled.

Client to engine: `Add`, `Abort`, `Pause`, `Drain`, `Ping`, `ResetCache`. Engine to client: `Starting`, `Hello`,
`Failed`, `Outputs`, `Refused`, `Pong`.
Feed (what happened to pages and requests; the server's books read it): `Event` records, numbered without gaps by
`Outputs.first_event`.
The unions at the end are what the wire encodes and decodes; an unknown tag or field type ends the message, not the
process.
"""

from typing import Literal

import msgspec

from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation request, as token ids. Immutable.

    id: made by the server, unique for its lifetime. salt: tenant and caller salt for the page identity (never shared
    across). priority: lower runs earlier, 0 is normal. deadline_s: seconds from its arrival at the engine after which
    the answer is worthless.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    adapter: str | None = None
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None


# ------------------------------------------------------------------------------------------- client → engine


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Take this request in."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests (client left, or a stop string was found). Unknown ids are ignored.

    branches: forget only these answers of each; None for the whole request.
    """

    ids: list[str]
    branches: list[int] | None = None


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Compute nothing more of these requests, as their readers are behind (`on`), or go on. Unknown ids are ignored."""

    ids: list[str]
    on: bool


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new requests; end when the running ones have finished or `limit_s` has passed."""

    limit_s: float


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask for a Pong; the answer carries progress, so that health can tell slow from stuck."""

    number: int


class ResetCache(msgspec.Struct, frozen=True, tag="reset_cache"):
    """Forget all cached pages that no running sequence holds."""


# ------------------------------------------------------------------------------------------- engine → client


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory goes, in bytes; printed at the start."""

    weights_bytes: int
    pages_bytes: int
    buffers_bytes: int
    margin_bytes: int
    num_pages: int
    page_size: int
    bytes_per_page: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded engine that the server shows and checks against."""

    model: str
    architecture: str
    dtype: str
    kv_dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    prefix_caching: bool
    memory: MemoryPlan
    threads: int
    isa: str
    ops: dict[str, str]
    """Op kind → "native" or the sentence why the reference runs instead."""
    phases: list[tuple[str, float]]
    """Start-up phases of the engine process, in order, with seconds."""
    pid: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The engine is ready to serve."""

    info: EngineInfo


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """Progress of loading: a phase's name and how far it is, in [0, 1]."""

    phase: str
    done: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start; `message` is a sentence for the operator, `exit_code` what the process ends with."""

    message: str
    exit_code: int


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a request's life in the engine, in seconds; they add up to arrival → last token."""

    queue_s: float
    prefill_s: float
    decode_s: float
    preempted: int


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave one branch of one request.

    finish: set on the branch's last output. stop_token: the token id that ended it (left out of `tokens`), if any.
    prompt_logprobs: scored prompt positions 1.. in order, spread over the outputs of branch 0 before its first token.
    num_prompt, num_cached, times: on the last output only.
    """

    id: str
    branch: int = 0
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    error_code: str | None = None
    num_prompt: int = 0
    num_cached: int = 0
    times: RequestTimes | None = None


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one step, for metrics, the periodic log line and health.

    decide_s / compute_s / update_s: the three parts of `engine.step`. parts: the runner's own split of compute.
    Counts are after the step; `tokens_prompt` and `tokens_decode` are those computed in it.
    """

    step: int
    decide_s: float
    compute_s: float
    update_s: float
    parts: dict[str, float]
    num_rows: int
    tokens_prompt: int
    tokens_decode: int
    running: int
    waiting: int
    waiting_tokens: int
    pages_total: int
    pages_used: int
    pages_cached: int
    slots_used: int
    """Token positions filled in the used pages; used pages × page size minus this is internal fragmentation."""
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    """Totals since start, in tokens."""
    paused: int = 0


class Outputs(msgspec.Struct, frozen=True, tag="outputs", kw_only=True):
    """One message a step: all rows' outputs, the step's figures and its events.

    What would be too long for one is cut into several: the events first, the figures with the last.
    """

    outputs: list[EngineOutput] = []
    stats: StepStats | None = None
    first_event: int = 0
    events: list["Event"] = []


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """A request that was not taken: queue full, engine draining, or it can never fit. `kind` picks the error."""

    id: str
    kind: Literal["overloaded", "limited", "invalid", "draining"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


class Pong(msgspec.Struct, frozen=True, tag="pong", kw_only=True):
    """Progress: steps made so far, seconds since the last one ended, whether anything waits or runs."""

    number: int
    steps: int
    since_step_s: float
    busy: bool
    expected_step_s: float


# ------------------------------------------------------------------------------------------- the event feed


class PagesTaken(msgspec.Struct, frozen=True, tag="pages_taken", array_like=True):
    """Free pages became the property of one sequence, in the order of its tokens."""

    pages: list[int]
    request: str
    branch: int


class PagesShared(msgspec.Struct, frozen=True, tag="pages_shared", array_like=True):
    """The pages that hold a common prefix, in its order, got one more user each."""

    pages: list[int]
    request: str
    branch: int


class PageCopied(msgspec.Struct, frozen=True, tag="page_copied", array_like=True):
    """A branch split: `source` was copied to `page`, which `branch` now owns."""

    source: int
    page: int
    request: str
    branch: int


class PageStored(msgspec.Struct, frozen=True, tag="page_stored", array_like=True):
    """A page is full and can be found by its hash (hex); `parent` is the hash before it, "" at the start."""

    page: int
    hash: str
    parent: str


class PagesReleased(msgspec.Struct, frozen=True, tag="pages_released", array_like=True):
    """A sequence gave all its pages back, in this order; a page without a user left is free, or cached if it was
    stored.
    """

    pages: list[int]
    request: str
    branch: int


class PageDropped(msgspec.Struct, frozen=True, tag="page_dropped", array_like=True):
    """A cached page was taken for other use; its hash can no longer be found."""

    page: int
    hash: str


class RequestQueued(msgspec.Struct, frozen=True, tag="queued", array_like=True):
    request: str
    num_prompt: int


class RequestAdmitted(msgspec.Struct, frozen=True, tag="admitted", array_like=True):
    """A branch entered the running set in a table row with `cached` of its tokens found in pages."""

    request: str
    branch: int
    row: int
    cached: int


class RequestPreempted(msgspec.Struct, frozen=True, tag="preempted", array_like=True):
    request: str
    branch: int


class RequestFinished(msgspec.Struct, frozen=True, tag="finished", array_like=True):
    request: str
    branch: int
    reason: str


class StepMade(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """A step's rows: (request, branch, start position, token count)."""

    step: int
    rows: list[tuple[str, int, int, int]]


Event = (
    PagesTaken | PagesShared | PageCopied | PageStored | PagesReleased | PageDropped | RequestQueued
    | RequestAdmitted | RequestPreempted | RequestFinished | StepMade
)  # fmt: skip
ToEngine = Add | Abort | Pause | Drain | Ping | ResetCache
FromEngine = Hello | Starting | Failed | Outputs | Refused | Pong
