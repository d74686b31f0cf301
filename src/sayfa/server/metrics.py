"""Keep and show the values of the metrics that `base.metrics` declares, under our names and under vLLM's.

Called by the books (requests), by the engine client's callback (steps) and by the /metrics route. A value is kept once;
aliases are made when the page is rendered. Nothing here may make a request fail: errors are logged once and dropped.
Knows no HTTP.
"""

import logging
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from sayfa.base.faults import fault
from sayfa.base.messages import EngineInfo, Outputs, StepStats
from sayfa.base.metrics import METRICS, REJECTIONS, Metric
from sayfa.base.sampling_params import SamplingParams

log = logging.getLogger("sayfa.server")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OWN_PREFIX = "sayfa:"
ALIAS_PREFIX = "vllm:"
MAX_REASONS = 64
"""Distinct values of the label `reason`; more would let callers grow the page."""
_KINDS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}

P = ParamSpec("P")

disable_created_metrics()  # type: ignore[no-untyped-call]


def _harmless(method: Callable[P, None]) -> Callable[P, None]:
    """Keep an error in the books of metrics away from the request that is being counted."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            fault("server.metrics.keep")
            method(*args, **kwargs)
        except Exception:
            log.exception("a metric could not be kept")

    return run


class ServerMetrics:
    """All metrics of one server.

    Invariant: received = ended (by reason) + rejected (by reason) + in flight, whenever the page is rendered.
    """

    def __init__(self, model_name: str, with_aliases: bool) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._registry = CollectorRegistry()
        self._page = CollectorRegistry()
        self._page.register(_Aliased(self._registry, with_aliases))
        self._fixed = {"model_name": model_name, "engine": "0"}
        self._families: dict[str, Any] = {}
        self._children: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._reasons = set(REJECTIONS)
        self._totals: dict[str, int] = {}
        self._last_step: StepStats | None = None
        self._new_steps = 0
        self._page_size = 0
        for metric in METRICS.values():
            self._families[metric.name] = self._declare(metric)
        self._ttft = self._family("time_to_first_token_seconds")
        self._gap = self._family("inter_token_latency_seconds")
        self._generated = self._family("generation_tokens")
        self._parts = {
            part: self._family("step_duration_seconds", part=part) for part in ("decide", "compute", "update")
        }

    def _declare(self, metric: Metric) -> Any:
        options: dict[str, Any] = {"registry": self._registry, "labelnames": (*self._fixed, *metric.labels)}
        if metric.kind == "histogram":
            options["buckets"] = metric.buckets
        family = _KINDS[metric.kind](OWN_PREFIX + metric.name, metric.doc, **options)
        if not metric.labels:
            family.labels(**self._fixed)  # shown as 0 from the start
        for value in metric.known:
            family.labels(**self._fixed, **{metric.labels[0]: value})
        return family

    def _family(self, name: str, **labels: str) -> Any:
        """A metric's value under these labels; kept, since finding it costs more than setting it."""
        key = (name, tuple(labels.items()))
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._families[name].labels(**self._fixed, **labels)
        return child

    def render(self) -> bytes:
        """The page in Prometheus' text format."""
        fault("server.metrics.render")
        self._settle()
        return generate_latest(self._page)

    # --------------------------------------------------------------------------------------------- requests

    @_harmless
    def received(self) -> None:
        """A request passed the key check."""
        self._family("requests_received").inc()
        self._family("requests_in_flight").inc()

    @_harmless
    def admitted(self, params: SamplingParams, num_prompts: int) -> None:
        """A request goes to the engine."""
        self._family("request_params_n").observe(params.n * num_prompts)
        if params.max_tokens is not None:
            self._family("request_params_max_tokens").observe(params.max_tokens)

    @_harmless
    def first_token(self, seconds: float) -> None:
        """Its first token came, `seconds` after its arrival."""
        self._ttft.observe(seconds)

    @_harmless
    def token_gap(self, seconds: float) -> None:
        """A further token came, `seconds` after the one before."""
        self._gap.observe(seconds)

    @_harmless
    def tokens(self, count: int) -> None:
        """Tokens were generated."""
        self.generation_tokens += count
        self._generated.inc(count)

    @_harmless
    def rejected(self, reason: str) -> None:
        """A request was refused before any work."""
        if reason not in self._reasons and len(self._reasons) >= MAX_REASONS:
            reason = "other"
        self._reasons.add(reason)
        self._family("admission_rejections", reason=reason).inc()
        self._family("requests_in_flight").dec()

    @_harmless
    def connection_refused(self, reason: str) -> None:
        """A connection was ended before a request was there."""
        self._family("connections_refused", reason=reason).inc()

    @_harmless
    def ended(
        self, reason: str, counts: tuple[int, int, int], times: tuple[float, float, float], total_s: float
    ) -> None:
        """A request ended. counts: prompt, cached, output tokens. times: queue, prefill, decode in seconds."""
        num_prompt, num_cached, num_output = counts
        queue_s, prefill_s, decode_s = times
        self._family("request_success", finished_reason=reason).inc()
        self._family("requests_in_flight").dec()
        self._family("prompt_tokens").inc(num_prompt)
        self._family("prompt_tokens_cached").inc(num_cached)
        self._family("request_prompt_tokens").observe(num_prompt)
        self._family("request_generation_tokens").observe(num_output)
        self._family("e2e_request_latency_seconds").observe(total_s)
        self._family("request_queue_time_seconds").observe(queue_s)
        self._family("request_prefill_time_seconds").observe(prefill_s)
        self._family("request_decode_time_seconds").observe(decode_s)
        self._family("request_inference_time_seconds").observe(prefill_s + decode_s)

    @_harmless
    def numerical_error(self) -> None:
        """A request ended because the model gave numbers that are not finite."""
        self._family("numerical_errors").inc()

    @_harmless
    def degraded(self, is_so: bool) -> None:
        """Whether repeated failures in computing make the server not ready."""
        self._family("degraded").set(is_so)

    @_harmless
    def time_per_token(self, seconds: float, preempted: int) -> None:
        """Mean time per token after the first, and preemptions, of an ended request."""
        if seconds > 0:
            self._family("request_time_per_output_token_seconds").observe(seconds)
        self._family("request_num_preemptions").observe(preempted)

    # --------------------------------------------------------------------------------------------- the engine

    @_harmless
    def on_outputs(self, outputs: Outputs) -> None:
        """Take a step's figures; called for each message of the engine, so it leaves to `_settle` what can wait."""
        stats = outputs.stats
        if stats is None:
            return
        self._last_step = stats
        self._new_steps += 1
        self.prompt_tokens += stats.tokens_prompt
        self._parts["decide"].observe(stats.decide_s)
        self._parts["compute"].observe(stats.compute_s)
        self._parts["update"].observe(stats.update_s)
        self._family("iteration_tokens_total").observe(stats.tokens_prompt + stats.tokens_decode)

    @_harmless
    def _settle(self) -> None:
        """Bring what only the page shows up to the last step: its gauges and what is counted by running totals."""
        self._family("steps").inc(self._new_steps)
        self._new_steps = 0
        stats = self._last_step
        if stats is None:
            return
        self._grow("num_preemptions", stats.preemptions)
        self._grow("prefix_cache_queries", stats.prefix_queries)
        self._grow("prefix_cache_hits", stats.prefix_hits)
        pages = max(1, stats.pages_total)
        self._family("num_requests_running").set(stats.running)
        self._family("num_requests_waiting").set(stats.waiting)
        self._family("num_requests_paused").set(stats.paused)
        self._family("waiting_tokens").set(stats.waiting_tokens)
        self._family("kv_cache_usage_perc").set(stats.pages_used / pages)
        self._family("kv_cache_cached_perc").set(stats.pages_cached / pages)
        slots = stats.pages_used * self._page_size
        self._family("kv_cache_fragmentation_perc").set(max(0.0, 1 - stats.slots_used / slots) if slots else 0.0)

    @_harmless
    def engine_ready(self, info: EngineInfo) -> None:
        """An engine said Hello: note its facts, and that a new engine counts from 0."""
        self._settle()
        self._last_step = None
        self._page_size = info.memory.page_size
        self._totals.clear()
        facts = {
            "block_size": str(info.memory.page_size),
            "num_gpu_blocks": str(info.memory.num_pages),
            "cache_dtype": info.kv_dtype,
            "enable_prefix_caching": str(info.prefix_caching).lower(),
        }
        self._families["cache_config_info"].clear()
        self._families["cache_config_info"].labels(**self._fixed, **facts).set(1)

    @_harmless
    def engine_state(self, state: str, restarted: bool) -> None:
        """Note whether the engine serves; when it does not, nothing runs or waits there."""
        self._family("engine_up").set(1 if state in ("ready", "draining") else 0)
        if restarted:
            self._family("engine_restarts").inc()
        if state in ("dead", "failed"):
            self._settle()
            self._last_step = None
            for name in ("num_requests_running", "num_requests_waiting", "num_requests_paused", "waiting_tokens",
                         "kv_cache_usage_perc", "kv_cache_cached_perc", "kv_cache_fragmentation_perc"):  # fmt: skip
                self._family(name).set(0)

    def _grow(self, name: str, total: int) -> None:
        """Add what a total grew by; a total that fell belongs to a new engine, which began at 0."""
        before = self._totals.get(name, 0)
        self._totals[name] = total
        self._family(name).inc(total - before if total >= before else total)


class _Aliased(Collector):
    """Shows each kept family under its own name and under its aliases."""

    def __init__(self, kept: CollectorRegistry, with_aliases: bool) -> None:
        self._kept = kept
        self._with_aliases = with_aliases

    def collect(self) -> Iterator[Family]:
        """Yield every family, then its copies under other names."""
        for family in self._kept.collect():
            yield family
            declared = METRICS[family.name.removeprefix(OWN_PREFIX)]
            for alias in declared.aliases if self._with_aliases else ():
                name = ALIAS_PREFIX + alias
                copy = Family(name, family.documentation, family.type)
                copy.samples = [
                    Sample(name + sample.name.removeprefix(family.name), *sample[1:]) for sample in family.samples
                ]
                yield copy
