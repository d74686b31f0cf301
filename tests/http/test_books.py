"""Laws of the books: received = ended + rejected + in flight; token sums agree; times add up. R19, B007, B010."""

import asyncio
import json
import logging
import math
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from http_support import SayingEngine, chat_body, ids_of, serving, text_body
from prometheus_client.parser import text_string_to_metric_families

from sayfa.base.errors import EngineDead, EngineError, Overloaded, SayfaError
from sayfa.base.log import JsonFormatter, TextFormatter
from sayfa.base.messages import Outputs, Request, RequestAdmitted, StepStats
from sayfa.base.metrics import CONNECTION_ENDS, ENDINGS, METRICS, REJECTIONS
from sayfa.server import body
from sayfa.server.metrics import MAX_REASONS, ServerMetrics
from sayfa.server.stats import stats_line

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def read(page: bytes | str) -> dict[str, float]:
    """Sums over labels, by sample name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page if isinstance(page, str) else page.decode()):
        for sample in family.samples:
            if "le" not in sample.labels:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@pytest.mark.parametrize("seed", range(3))
async def test_r19_the_books_agree_after_any_mix(seed: int) -> None:
    """R19: plain, streamed, wrong, refused and failing requests at once; sums and token totals agree with `usage`."""
    rng = random.Random(seed)
    engine = SayingEngine(lambda request, branch: ids_of("Hello world" * rng.randint(1, 3)))
    used = {"prompt": 0, "output": 0}
    kinds = [rng.choice(["plain", "stream", "several", "wrong", "unknown"]) for _ in range(30)]
    async with serving(engine) as (client, app):

        async def one(kind: str) -> None:
            body: dict[str, Any] = chat_body(n=rng.randint(1, 2))
            if kind == "wrong":
                body["temperature"] = -1
            if kind == "unknown":
                body["model"] = "x"
            if kind == "several":
                response = await client.post(TEXT, json=text_body(prompt=["a", "b"], n=2))
            elif kind == "stream":
                extra = {"stream": True, "stream_options": {"include_usage": True}}
                response = await client.post(CHAT, json={**body, **extra})
                usage = json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["usage"]
                used["prompt"] += usage["prompt_tokens"]
                used["output"] += usage["completion_tokens"]
                return
            else:
                response = await client.post(CHAT, json=body)
            if response.status_code == 200:
                used["prompt"] += response.json()["usage"]["prompt_tokens"]
                used["output"] += response.json()["usage"]["completion_tokens"]

        await asyncio.gather(*map(one, kinds))
        sums = read(app.state.context.metrics.render())
    refused = sum(kind in ("wrong", "unknown") for kind in kinds)
    assert sums["sayfa:requests_received_total"] == 30
    assert sums["sayfa:requests_in_flight"] == 0
    assert sums["sayfa:admission_rejections_total"] == refused
    assert sums["sayfa:request_success_total"] == 30 - refused
    assert sums["sayfa:prompt_tokens_total"] == used["prompt"] == sums["sayfa:request_prompt_tokens_sum"]
    assert sums["sayfa:generation_tokens_total"] == used["output"] == sums["sayfa:request_generation_tokens_sum"]
    assert sums["sayfa:time_to_first_token_seconds_count"] == 30 - refused


async def test_every_declared_metric_is_shown_under_its_own_and_its_aliases() -> None:
    """The page holds each declared name; vLLM's names can be switched off; values are the same."""
    for wanted in (True, False):
        async with serving(vllm_metric_names=wanted) as (client, _):
            await client.post(CHAT, json=chat_body())
            page = (await client.get("/metrics")).text
        families = {family.name for family in text_string_to_metric_families(page)}
        for metric in METRICS.values():
            assert f"sayfa:{metric.name}" in families or f"sayfa:{metric.name}".removesuffix("_total") in families
            for alias in metric.aliases:
                shown = f"vllm:{alias}" in families or f"vllm:{alias}".removesuffix("_total") in families
                assert shown is wanted, alias
    sums = read(page)
    assert not any(name.startswith("vllm:") for name in sums)


@pytest.mark.parametrize(
    ("metric", "label", "known"),
    [
        ("request_success", "finished_reason", ENDINGS),
        ("admission_rejections", "reason", REJECTIONS),
        ("connections_refused", "reason", CONNECTION_ENDS),
    ],
)
async def test_the_known_reasons_are_shown_before_their_first_event(
    metric: str, label: str, known: tuple[str, ...]
) -> None:
    """The equation of the books holds over an idle server, and `rate` sees the first event."""
    async with serving() as (client, _):
        page = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    for prefix in ("sayfa:", "vllm:") if METRICS[metric].aliases else ("sayfa:",):
        shown = {sample.labels[label]: sample.value for sample in samples if sample.name == f"{prefix}{metric}_total"}
        assert shown == dict.fromkeys(known, 0.0)


async def test_the_number_of_reasons_is_bounded() -> None:
    """Codes of plug-ins, say; those beyond the limit are one."""
    metrics = ServerMetrics("m", False)
    for number in range(3 * MAX_REASONS):
        metrics.rejected(f"odd-{number}")
    metrics.rejected("queue_full")
    page = metrics.render().decode()
    lines = [line for line in page.splitlines() if line.startswith("sayfa:admission_rejections_total{")]
    assert len(lines) == MAX_REASONS
    odd = MAX_REASONS - len(REJECTIONS)
    assert (
        f'sayfa:admission_rejections_total{{engine="0",model_name="m",reason="other"}} {3 * MAX_REASONS - odd}.0'
        in page
    )
    assert 'reason="queue_full"} 1.0' in page


async def test_aliases_have_the_same_values() -> None:
    """A value is kept once."""
    async with serving() as (client, _):
        await client.post(CHAT, json=chat_body())
        sums = read((await client.get("/metrics")).text)
    for metric in METRICS.values():
        for alias in metric.aliases:
            for ending in ("", "_total", "_sum", "_count"):
                if f"vllm:{alias}{ending}" in sums:
                    assert sums[f"vllm:{alias}{ending}"] == sums[f"sayfa:{metric.name}{ending}"]


def step(**changes: Any) -> StepStats:
    facts: dict[str, Any] = {
        "step": 1, "decide_s": 0.001, "compute_s": 0.01, "update_s": 0.001, "parts": {}, "num_rows": 2,
        "tokens_prompt": 10, "tokens_decode": 2, "running": 2, "waiting": 1, "waiting_tokens": 7, "pages_total": 10,
        "pages_used": 4, "pages_cached": 3, "slots_used": 32, "preemptions": 1, "prefix_queries": 20, "prefix_hits": 5,
    }  # fmt: skip
    return StepStats(**{**facts, **changes})


async def test_step_figures_become_gauges_and_counters_that_never_fall() -> None:
    """Totals of the engine grow; after its restart they begin at 0 there and go on here."""
    async with serving() as (_, app):
        metrics = app.state.context.metrics
        metrics.engine_ready(app.state.context.client.info)
        metrics.on_outputs(Outputs(stats=step()))
        metrics.on_outputs(Outputs(stats=step(preemptions=3, prefix_queries=30, prefix_hits=8)))
        metrics.engine_state("dead", restarted=False)
        idle = read(metrics.render())
        metrics.engine_state("starting", restarted=True)
        metrics.engine_state("ready", restarted=False)
        metrics.engine_ready(app.state.context.client.info)
        assert read(metrics.render())["sayfa:cache_config_info"] == 1, "the facts of the next engine are shown"
        metrics.on_outputs(Outputs(stats=step(preemptions=2, prefix_queries=4, prefix_hits=1)))
        sums = read(metrics.render())
    assert idle["sayfa:num_requests_running"] == 0 == idle["sayfa:engine_up"]
    assert sums["sayfa:num_preemptions_total"] == 5
    assert sums["sayfa:prefix_cache_queries_total"] == 34
    assert sums["sayfa:prefix_cache_hits_total"] == 9
    assert sums["sayfa:engine_restarts_total"] == 1
    assert sums["sayfa:kv_cache_usage_perc"] == 0.4
    assert sums["sayfa:kv_cache_fragmentation_perc"] == 0.5  # 4 pages of 16 slots hold 32 tokens
    assert sums["sayfa:steps_total"] == 3


async def test_the_periodic_line_has_the_fields_that_people_search_for() -> None:
    """Throughput, running, waiting, page use, prefix hits."""
    async with serving() as (_, app):
        app.state.context.client.latest = step()
        line = stats_line(app.state.context, 12.34, 5.0)
    assert line == (
        "Avg prompt throughput: 12.3 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, KV cache usage: 40.0%, Prefix cache hit rate: 25.0%"
    )


async def test_the_line_of_a_request_carries_its_id_counts_and_times_that_add_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """queue + prefill + decode + server = total; JSON keeps each as a field; no prompt, answer or key is in it."""
    caplog.set_level(logging.INFO, "sayfa.server.request")
    key = "sk-" + "q" * 30
    async with serving(api_key=[key]) as (client, _):
        body = chat_body(messages=[{"role": "user", "content": "canary-prompt"}])
        answer = (await client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})).json()
    record = next(record for record in caplog.records if record.name == "sayfa.server.request")
    line = json.loads(JsonFormatter().format(record))
    assert answer["id"] in line["message"]
    parts = sum(line[name] for name in ("queue_s", "prefill_s", "decode_s", "server_s"))
    assert math.isclose(parts, line["total_s"], abs_tol=0.002)
    assert (line["prompt"], line["output"], line["cached"]) == (32, 2, 3)
    for secret in ("canary", "Hello", key, key[:10]):
        assert secret not in json.dumps(line)


class AdmittingEngine(SayingEngine):
    """Tells with an event that 16 tokens of a prompt were cached, as the engine does when it gives a place."""

    def _take(self, request: Request) -> None:
        for callback in self._callbacks:
            callback(Outputs(events=[RequestAdmitted(request.id, 0, 5, 16)]))
        super()._take(request)


async def test_a_route_is_called_alike_in_every_line_whatever_a_proxy_puts_before_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With --root-path the path of a request that was refused had the prefix, that of one that was served had not."""
    caplog.set_level(logging.INFO, "sayfa.server.request")
    async with serving() as (_, app):
        transport = httpx2.ASGITransport(app=app, root_path="/llm")
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for temperature, status in ((0, 200), (-1, 400)):
                response = await client.post("/llm/v1/completions", json=text_body(temperature=temperature))
                assert response.status_code == status
    lines = [record.getMessage() for record in caplog.records if record.name == "sayfa.server.request"]
    assert [line.split()[0] for line in lines] == ["/v1/completions"] * 2


async def test_cached_tokens_are_known_in_every_ending() -> None:
    """A request that a stop string ended never gets the engine's last output; its cached tokens are told."""
    async with serving(AdmittingEngine("Hello world and the END")) as (client, _):
        stopped = (await client.post(CHAT, json=chat_body(stop=["world"]))).json()
        whole = (await client.post(CHAT, json=chat_body())).json()
    assert stopped["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def never_whole() -> AsyncIterator[bytes]:
    """A body of which the end does not come."""
    yield b'{"model": '
    await asyncio.sleep(60)


REFUSED: list[tuple[int, dict[str, Any]]] = [
    (400, {"json": chat_body(temperature=-1)}),
    (400, {"content": b"{"}),
    (404, {"json": chat_body(model="nobody")}),
    (408, {"content": never_whole}),
    (413, {"json": chat_body(user="u" * 3000)}),
    (415, {"content": b"{}", "headers": {"content-type": "text/plain"}}),
]


@pytest.mark.parametrize(("status", "sent"), [(200, {"json": chat_body()}), *REFUSED])
@pytest.mark.parametrize("given", ["mine-7", "mi ne\t-7\u2028", ""])
async def test_the_id_that_the_client_holds_is_in_the_line_of_its_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int, sent: dict[str, Any], given: str
) -> None:
    """Its own, or the one that the answer's header tells; for refusals too, in both forms of the log."""
    caplog.set_level(logging.INFO, "sayfa.server.request")
    monkeypatch.setattr(body, "BODY_GRACE_S", 0.01)
    async with serving(max_body_bytes=2048) as (client, _):
        headers = {"content-type": "application/json"} | sent.get("headers", {})
        if given:
            headers["x-request-id"] = given.encode()
        content = sent.get("content")
        made = {"content": content()} if content is never_whole else {}
        response = await client.post(CHAT, **{**sent, **made, "headers": headers})
    assert response.status_code == status, response.text
    held = response.headers["x-request-id"]
    assert held == "mine-7" if given else len(held) == 32
    [record] = [record for record in caplog.records if record.name == "sayfa.server.request"]
    assert json.loads(JsonFormatter().format(record))["request_id"] == held
    assert f" request_id={held} " in TextFormatter().format(record)


@pytest.mark.parametrize(("status", "sent"), REFUSED)
async def test_a_refusal_is_booked_under_the_code_that_its_answer_tells(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, status: int, sent: dict[str, Any]
) -> None:
    """In the metric and in the line; it is one of those that are shown from the start."""
    caplog.set_level(logging.INFO, "sayfa.server.request")
    monkeypatch.setattr(body, "BODY_GRACE_S", 0.01)
    made = {"content": never_whole()} if sent.get("content") is never_whole else {}
    async with serving(max_body_bytes=2048) as (client, _):
        response = await client.post(CHAT, **{"headers": {"content-type": "application/json"}, **sent, **made})
        page = (await client.get("/metrics")).text
    code = response.json()["error"]["code"]
    assert (response.status_code, code in REJECTIONS) == (status, True)
    assert f'sayfa:admission_rejections_total{{engine="0",model_name="tiny",reason="{code}"}} 1.0' in page
    assert caplog.messages == [f"{CHAT} rejected:{code} -"]


async def test_a_bug_of_ours_is_told_and_logged_under_one_id(caplog: pytest.LogCaptureFixture) -> None:
    """The answer's header and text, its line and the line of the traceback name the same id."""
    caplog.set_level(logging.INFO)
    async with serving() as (client, app):
        app.state.context.client.generate = None  # calling it is a bug
        response = await client.post(CHAT, json=chat_body(), headers={"x-request-id": "mine-8"})
    assert response.status_code == 500
    assert "mine-8" in response.json()["error"]["message"]
    [bug] = [record for record in caplog.records if record.exc_info]
    assert "mine-8" in bug.getMessage()
    told = [vars(record)["request_id"] for record in caplog.records if record.name.startswith("sayfa.server")]
    assert told == ["mine-8", "mine-8"]


QUOTED = "-".join(("canary", "words"))
"""In a traceback's line of source it does not stand."""


class BuggyEngine(SayingEngine):
    """Behind its first output the server fails, with an exception that quotes the prompt, as does its cause."""

    async def generate(self, request: Request) -> Any:
        yield await anext(super().generate(request))
        try:
            raise KeyError(QUOTED)
        except KeyError as error:
            raise UnicodeError(QUOTED) from error


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_bug_leaves_its_traceback_once_and_no_words_of_the_caller(
    caplog: pytest.LogCaptureFixture, path: str, streamed: bool
) -> None:
    """Plain and streamed: kind and place of the exception and of its cause, under the id that the client holds."""
    async with serving(BuggyEngine()) as (client, _):
        sent = (chat_body if path == CHAT else text_body)(stream=streamed)
        response = await client.post(path, json=sent, headers={"x-request-id": "mine-9"})
    assert "name the request id mine-9" in response.text
    [bug] = [record for record in caplog.records if record.levelname == "ERROR"]
    for form in (TextFormatter(), JsonFormatter()):
        line = form.format(bug)
        assert [word for word in ("mine-9", "KeyError", "UnicodeError", __file__) if word not in line] == []
        assert QUOTED not in line


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("error", [EngineError("odd numbers"), EngineDead(), Overloaded("drained", code="draining")])
async def test_what_was_meant_is_no_bug(caplog: pytest.LogCaptureFixture, error: SayfaError, streamed: bool) -> None:
    """The line of the request tells it; the engine's own log has the traceback of its failure."""

    class Engine(SayingEngine):
        async def generate(self, request: Request) -> Any:
            yield await anext(super().generate(request))
            raise error

    async with serving(Engine()) as (client, _):
        await client.post(CHAT, json=chat_body(stream=streamed))
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
