"""The table of metrics: the names that other people's dashboards and routers read are all there, and well formed."""

import re

import pytest

from sayfa.base.metrics import METRICS

READ_BY_OTHERS = """
num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc cache_config_info
prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_cached generation_tokens
request_success admission_rejections time_to_first_token_seconds inter_token_latency_seconds
request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds request_prompt_tokens
request_generation_tokens request_params_n request_params_max_tokens iteration_tokens_total request_num_preemptions
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", READ_BY_OTHERS)
def test_a_name_that_dashboards_read_is_an_alias_of_ours(name):
    assert any(name in metric.aliases for metric in METRICS.values())


def test_each_metric_is_well_formed():
    shown = [alias for metric in METRICS.values() for alias in metric.aliases]
    assert len(shown) == len(set(shown)), "two metrics must not have the same alias"
    for name, metric in METRICS.items():
        assert name == metric.name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert not (metric.kind == "counter" and name.endswith("_total")), f"{name}: the ending is added when shown"
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert len(metric.known) == len(set(metric.known))
        assert not metric.known or len(metric.labels) == 1
        assert list(metric.buckets) == sorted(set(metric.buckets))
        if name.endswith("_seconds"):
            assert "second" in metric.doc
