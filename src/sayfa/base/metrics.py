"""Every metric, declared once: name, kind, unit, labels, buckets, and the names other dashboards know it by.

`server.metrics` keeps the values and renders them; docs and tests read the same table. Names carry no prefix here:
they are shown as `sayfa:NAME` and, with `--vllm-metric-names`, as `vllm:ALIAS` too (the names that Grafana boards,
autoscalers and the Gateway API inference extension look for). Each series has the labels `model_name` and `engine`.

The books balance at every scrape: requests_received = sum(request_success) + sum(admission_rejections) +
requests_in_flight. `request_success` counts every end of a request that was taken in, by reason, as vLLM does.
"""

from typing import Literal

import msgspec

SECONDS_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SECONDS_LONG = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FEW = (0, 1, 2, 3, 5, 10, 20)
ANSWERS = (1, 2, 5, 10, 20, 50, 100)

ENDINGS = ("stop", "length", "abort", "error", "deadline")
"""How a request ends that was taken in."""
REJECTIONS = (
    # before it was understood
    "unsupported_media_type", "request_timeout", "request_too_large", "invalid_json",
    # for what it asks
    "invalid_request_error", "invalid_value", "invalid_type", "invalid_unicode", "invalid_token_id",
    "unsupported_parameter", "unsupported_content_type", "model_not_found", "no_chat_template", "template_error",
    "template_too_costly", "refused_by_template", "tokenizer_failed", "context_length_exceeded", "exceeds_page_pool",
    "quarantined",
    # for now
    "queue_full", "share_of_queue_full", "deadline_unreachable", "starting", "draining", "engine_error",
    # beyond the number of distinct ones that the server shows
    "other",
)  # fmt: skip
"""Codes of the errors with which a request is refused before any work, as its answer tells them. `invalid_value` is
that of a field's value where no other word says more; `invalid_request_error` stands for no code."""
CONNECTION_ENDS = (
    "too_many_connections", "too_many_connections_of_address", "request_timeout", "headers_too_large", "uri_too_long",
    "malformed_http", "upgrade_not_served", "bad_request", "other",
)  # fmt: skip
"""Codes of the errors with which a connection is ended before a request was there."""


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. doc ends with the unit; counters get `_total` when shown; aliases carry no prefix.

    known: values of its one label that are shown from the start, as 0: what appears with its first event only is
    missing in sums until then, and `rate` does not see that event.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    aliases: tuple[str, ...] = ()


def _counter(name: str, doc: str, *labels: str, known: tuple[str, ...] = (), alias: bool = True) -> Metric:
    aliases = (name,) if alias else ()
    return Metric(name=name, kind="counter", doc=doc, labels=labels, known=known, aliases=aliases)


def _gauge(name: str, doc: str, *labels: str, aliases: tuple[str, ...] = ()) -> Metric:
    return Metric(name=name, kind="gauge", doc=doc, labels=labels, aliases=aliases)


def _histogram(name: str, doc: str, buckets: tuple[float, ...], *labels: str, alias: bool = True) -> Metric:
    return Metric(
        name=name, kind="histogram", doc=doc, labels=labels, buckets=buckets, aliases=(name,) if alias else ()
    )


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # The engine's state after its last step.
        _gauge("num_requests_running", "Sequences in the running batch", aliases=("num_requests_running",)),
        _gauge("num_requests_waiting", "Requests waiting for a place", aliases=("num_requests_waiting",)),
        _gauge("num_requests_paused", "Sequences that stand still because their readers are behind"),
        _gauge("waiting_tokens", "Prompt tokens waiting, in tokens"),
        _gauge("kv_cache_usage_perc", "Part of the pages in use, 0 to 1",
               aliases=("kv_cache_usage_perc", "gpu_cache_usage_perc")),
        _gauge("kv_cache_cached_perc", "Part of the pages that keep prefixes nobody uses now, 0 to 1"),
        _gauge("kv_cache_fragmentation_perc", "Part of the token slots in used pages that hold nothing, 0 to 1"),
        _gauge("cache_config_info", "Facts about the cache as labels; always 1",
               "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", aliases=("cache_config_info",)),
        _gauge("requests_in_flight", "Requests taken in and not ended, seen by the server"),
        _gauge("engine_up", "1 while the engine serves, else 0"),
        _counter("engine_restarts", "Times the engine process was started again after it died", alias=False),
        # Steps.
        _counter("steps", "Steps made by the engine", alias=False),
        _histogram("step_duration_seconds", "Time of a step by part, in seconds", SECONDS_SHORT,
                   "part", alias=False),
        _histogram("iteration_tokens_total", "Tokens computed in a step", ROWS),
        _counter("num_preemptions", "Times a running sequence gave up its pages under memory pressure"),
        _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache, in tokens"),
        _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache, in tokens"),
        # Requests.
        _counter("requests_received", "Generation requests that passed the key check", alias=False),
        _counter("admission_rejections", "Requests refused before any work, by reason", "reason", known=REJECTIONS),
        _counter("connections_refused", "Connections ended before a request was there, by reason: limits on their "
                 "number, headers that are late, too large or no HTTP", "reason", known=CONNECTION_ENDS, alias=False),
        _counter("request_success", "Requests that ended, by reason",
                 "finished_reason", known=ENDINGS),
        _counter("numerical_errors", "Requests that ended because the model gave numbers that are not finite",
                 alias=False),
        _gauge("degraded", "1 while repeated failures in computing make the server not ready, else 0"),
        _counter("prompt_tokens", "Prompt tokens of ended requests, in tokens"),
        _counter("prompt_tokens_cached", "Of these, tokens that came from the prefix cache"),
        _counter("generation_tokens", "Tokens generated"),
        _histogram("time_to_first_token_seconds", "From arrival to the first token, in seconds", SECONDS_LONG),
        _histogram("inter_token_latency_seconds", "Between two tokens of one answer, in seconds", SECONDS_SHORT),
        _histogram("request_time_per_output_token_seconds", "Mean time per token after the first, in seconds",
                   SECONDS_SHORT),
        _histogram("e2e_request_latency_seconds", "From arrival to the last token, in seconds", SECONDS_LONG),
        _histogram("request_queue_time_seconds", "Waiting for a place in the batch, in seconds", SECONDS_LONG),
        _histogram("request_prefill_time_seconds", "From the place to the first token, in seconds", SECONDS_LONG),
        _histogram("request_decode_time_seconds", "From the first to the last token, in seconds", SECONDS_LONG),
        _histogram("request_inference_time_seconds", "From the place to the last token, in seconds", SECONDS_LONG),
        _histogram("request_prompt_tokens", "Prompt length, in tokens", TOKENS),
        _histogram("request_generation_tokens", "Answer length, in tokens", TOKENS),
        _histogram("request_params_n", "Answers asked for", ANSWERS),
        _histogram("request_params_max_tokens", "Limit of the answer's length, in tokens", TOKENS),
        _histogram("request_num_preemptions", "Preemptions of an ended request, all its answers together", FEW),
    )
}  # fmt: skip
