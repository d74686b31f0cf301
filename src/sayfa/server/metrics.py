"""Keeps the values of `base.metrics` and renders them for Prometheus.

Called by the request path (received, rejected, tokens, ended) and by the wire client's callbacks (step, engine state).
Knows no HTTP. Everything is observed once a step or once a chunk; the vLLM names are made when a scrape asks, from the
same values, so they cannot differ from ours.
"""

from collections.abc import Iterable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from sayfa.base.messages import EngineInfo, RequestTimes, StepStats
from sayfa.base.metrics import METRICS, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_KNOWN = {
    "step_duration_seconds": ("decide", "compute", "update"),
    "request_success": ("stop", "length", "abort", "error", "deadline"),
}

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics of one server.

    Invariant: received = ended + rejected + in flight, as long as each `received` is followed by exactly one of
    `rejected` and `ended`. Counters never fall, also when the engine is started again and its own totals begin at 0.
    """

    def __init__(self, model_name: str, *, vllm_names: bool = True, engine: str = "0") -> None:
        self._labels = (model_name, engine)
        self._counters = {m.name: Counter(m.name, m.doc, _labels(m), registry=None) for m in _of("counter")}
        self._gauges = {m.name: Gauge(m.name, m.doc, _labels(m), registry=None) for m in _of("gauge")}
        self._histograms = {
            m.name: Histogram(m.name, m.doc, _labels(m), registry=None, buckets=m.buckets) for m in _of("histogram")
        }
        self._totals: dict[str, int] = {}
        self._registry = CollectorRegistry()
        made: dict[str, Collector] = {**self._counters, **self._gauges, **self._histograms}
        self._registry.register(_Shown(made, vllm_names))
        # Bound once, since every chunk of every stream comes by here.
        self._generated = self._counters["generation_tokens"].labels(*self._labels)
        self._gaps = self._histograms["inter_token_latency_seconds"].labels(*self._labels)
        self._show_zeros()

    def _show_zeros(self) -> None:
        """Make each series that is known beforehand, so that a rate over a scrape can be taken from the first one."""
        for metric in METRICS.values():
            for values in [()] if not metric.labels else [(value,) for value in _KNOWN.get(metric.name, ())]:
                known = (
                    self._counters.get(metric.name) or self._gauges.get(metric.name) or self._histograms[metric.name]
                )
                known.labels(*self._labels, *values)

    def _add(self, name: str, amount: float = 1, *values: str) -> None:
        self._counters[name].labels(*self._labels, *values).inc(amount)

    def _set(self, name: str, value: float, *values: str) -> None:
        self._gauges[name].labels(*self._labels, *values).set(value)

    def _observe(self, name: str, value: float, *values: str) -> None:
        self._histograms[name].labels(*self._labels, *values).observe(value)

    # ------------------------------------------------------------------------------------------------ the engine

    def engine_ready(self, info: EngineInfo) -> None:
        """The engine said hello: note the cache's shape."""
        self._set("engine_up", 1)
        memory = info.memory
        values = (str(memory.page_size), str(memory.num_pages), info.kv_dtype, str(info.prefix_caching))
        self._set("cache_config_info", 1, *values)

    def engine_lost(self) -> None:
        """The engine died or is being stopped: nothing runs and nothing waits in it."""
        self._totals.clear()
        for name in ("engine_up", "num_requests_running", "num_requests_waiting", "waiting_tokens",
                     "kv_cache_usage_perc", "kv_cache_cached_perc", "kv_cache_fragmentation_perc"):  # fmt: skip
            self._set(name, 0)

    def engine_restarted(self) -> None:
        """The engine process was started again."""
        self._add("engine_restarts")

    def step(self, stats: StepStats, page_size: int) -> None:
        """Note one step's figures. Pages and slots become shares here."""
        self._set("num_requests_running", stats.running)
        self._set("num_requests_waiting", stats.waiting)
        self._set("waiting_tokens", stats.waiting_tokens)
        pages = max(1, stats.pages_total)
        self._set("kv_cache_usage_perc", stats.pages_used / pages)
        self._set("kv_cache_cached_perc", stats.pages_cached / pages)
        slots = stats.pages_used * page_size
        self._set("kv_cache_fragmentation_perc", 1 - stats.slots_used / slots if slots else 0)
        self._add("steps")
        self._observe("iteration_tokens_total", stats.tokens_prompt + stats.tokens_decode)
        for part, seconds in (("decide", stats.decide_s), ("compute", stats.compute_s), ("update", stats.update_s)):
            self._observe("step_duration_seconds", seconds, part)
        self._advance("num_preemptions", stats.preemptions)
        self._advance("prefix_cache_queries", stats.prefix_queries)
        self._advance("prefix_cache_hits", stats.prefix_hits)

    def _advance(self, name: str, total: int) -> None:
        """Add what a total of the engine grew by; a smaller total means a new engine."""
        before = self._totals.get(name, 0)
        self._totals[name] = total
        self._add(name, total - before if total >= before else total)

    # ---------------------------------------------------------------------------------------------- the requests

    def received(self) -> None:
        """A generation request passed the key check."""
        self._add("requests_received")
        self._gauges["requests_in_flight"].labels(*self._labels).inc()

    def rejected(self, reason: str) -> None:
        """A received request was refused before any work; reason is a short stable word."""
        self._gauges["requests_in_flight"].labels(*self._labels).dec()
        self._add("admission_rejections", 1, reason)

    def first_token(self, since_arrival_s: float) -> None:
        """The first token of an answer is here."""
        self._observe("time_to_first_token_seconds", since_arrival_s)

    def tokens(self, count: int, gap_s: float | None) -> None:
        """Tokens of one answer arrived together, `gap_s` after its last ones (None for the first ones)."""
        self._generated.inc(count)
        if gap_s is not None:
            self._gaps.observe(gap_s)

    def ended(
        self, reason: str, *, e2e_s: float, num_prompt: int = 0, num_cached: int = 0, num_output: int = 0,
        first_token_s: float | None = None, times: RequestTimes | None = None
    ) -> None:  # fmt: skip
        """A received request that was not rejected came to its end; times are None if the engine told none."""
        self._gauges["requests_in_flight"].labels(*self._labels).dec()
        self._add("request_success", 1, reason)
        self._add("prompt_tokens", num_prompt)
        self._add("prompt_tokens_cached", num_cached)
        self._observe("e2e_request_latency_seconds", e2e_s)
        self._observe("request_prompt_tokens", num_prompt)
        self._observe("request_generation_tokens", num_output)
        if first_token_s is not None and num_output > 1:
            self._observe("request_time_per_output_token_seconds", (e2e_s - first_token_s) / (num_output - 1))
        if times is not None:
            self._observe("request_queue_time_seconds", times.queue_s)
            self._observe("request_prefill_time_seconds", times.prefill_s)
            self._observe("request_decode_time_seconds", times.decode_s)
            self._observe("request_inference_time_seconds", times.prefill_s + times.decode_s)
            self._observe("request_num_preemptions", times.preempted)

    def params(self, n: int, max_tokens: int) -> None:
        """What a request asked for, once it was taken in."""
        self._observe("request_params_n", n)
        self._observe("request_params_max_tokens", max_tokens)

    def render(self) -> bytes:
        """The page for a scrape, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Shown(Collector):
    """Gives each metric under our prefix and, if wished, under vLLM's."""

    def __init__(self, made: dict[str, Collector], vllm_names: bool) -> None:
        self._made = made
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Family]:
        """One family for each metric and each of its names."""
        for name, collector in self._made.items():
            names = [f"sayfa:{name}"] + [f"vllm:{alias}" for alias in METRICS[name].aliases if self._vllm_names]
            for family in collector.collect():
                yield from _renamed(family, name, names)


def _renamed(family: Family, name: str, names: Iterable[str]) -> Iterator[Family]:
    for shown in names:
        copy = Family(shown, family.documentation, family.type)
        copy.samples = [sample._replace(name=shown + sample.name.removeprefix(name)) for sample in family.samples]
        yield copy


def _of(kind: str) -> list[Metric]:
    return [metric for metric in METRICS.values() if metric.kind == kind]


def _labels(metric: Metric) -> tuple[str, ...]:
    return ("model_name", "engine", *metric.labels)
