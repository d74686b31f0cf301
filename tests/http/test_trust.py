"""R13: repeated failures in computing turn readiness red, a single one does not; liveness stays green."""

import asyncio
import logging

import httpx2
import pytest
from http_support import MODEL, SayingEngine, text_tools

from fakes.client import make_info
from sayfa.base.clock import FakeClock
from sayfa.base.config import ServerOptions
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.server.app import create_app
from sayfa.server.trust import MIN_CONTENTS, WINDOW_S, Trust


def request(content: int) -> Request:
    return Request(id=f"r{content}", prompt=[content], params=SamplingParams())


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0, 1.8e9)


@pytest.fixture
def trust(clock: FakeClock) -> Trust:
    return Trust(clock)


def test_one_request_proves_nothing_however_often_it_is_sent(trust: Trust) -> None:
    for _ in range(50):
        trust.note_error(request(1))
    trust.note_error(request(2))
    assert trust.why_not() == ""


def test_errors_of_different_content_do_and_the_log_says_so_once(
    trust: Trust, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sayfa"):
        for content in range(MIN_CONTENTS + 3):
            trust.note_error(request(content))
            assert bool(trust.why_not()) == (content + 1 >= MIN_CONTENTS)
    assert "not finite" in trust.why_not()
    assert [record.message.split(":")[0] for record in caplog.records] == ["not ready any more"]


@pytest.mark.parametrize(("num_good", "is_ready"), [(26, False), (28, True), (5000, True)])
def test_a_few_among_many_do_not(trust: Trust, num_good: int, is_ready: bool) -> None:
    for content in range(3):
        trust.note_error(request(content))
    for _ in range(num_good):
        trust.note_end()
    assert (trust.why_not() == "") == is_ready


def test_all_of_any_number_do(trust: Trust) -> None:
    """Of errors fewer were remembered than of requests: above ten thousand the server was ready again."""
    for number in range(20_001):
        trust.note_error(request(number % 50))
    assert "20001 of 20001" in trust.why_not()


def test_ten_minutes_without_them_or_a_new_engine_end_it(
    trust: Trust, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for content in range(3):
        trust.note_error(request(content))
    clock.advance(WINDOW_S)
    assert trust.why_not()
    with caplog.at_level(logging.WARNING, "sayfa"):
        clock.advance(1.0)
        assert trust.why_not() == ""
    assert "ready again" in caplog.text
    for content in range(3):
        trust.note_error(request(content))
    assert trust.why_not()
    trust.forget_all()
    assert trust.why_not() == ""


def test_memory_is_bounded(trust: Trust, clock: FakeClock) -> None:
    for content in range(5000):
        trust.note_error(request(content))
        clock.advance(1.0)
    assert len(trust._errors) <= 1000
    assert len(trust._ended) <= WINDOW_S / 10 + 3


class SpoiledEngine(SayingEngine):
    """Each request of priority 1 fails in computing."""

    failure = ""

    def _output(self, request: Request, branch: int, answer: list[int], step: int) -> EngineOutput:
        if request.priority == 1:
            return EngineOutput(id=request.id, branch=branch, finish="error", error="no", error_code=self.failure)
        return super()._output(request, branch, answer, step)


@pytest.mark.parametrize(("failure", "num_numerical"), [("numerical_error", 4), ("step_failed", 0)])
async def test_readiness_metrics_and_liveness_of_a_server(failure: str, num_numerical: int) -> None:
    engine = SpoiledEngine(**{"max_queued_requests": make_info().max_queued_requests})
    engine.failure = failure
    app = create_app(engine, text_tools(), ServerOptions(log_stats_interval=0.0), [MODEL])
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):

        async def ask(prompt: str, spoiled: bool) -> int:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "priority": int(spoiled)}
            answer = await http.post("/v1/completions", json=body)
            assert (answer.status_code == 500) == spoiled
            assert not spoiled or answer.json()["error"]["code"] == failure
            return answer.status_code

        async def state() -> tuple[int, str, int]:
            ready, live = await http.get("/health/ready"), await http.get("/health/live")
            page = (await http.get("/metrics")).text
            gauge = next(line for line in page.splitlines() if line.startswith("sayfa:degraded{"))
            assert ("reason" in ready.json()) == (ready.status_code == 503)
            assert int(float(gauge.split()[-1])) == (ready.status_code == 503)
            return ready.status_code, ready.json()["status"], live.status_code

        await ask("one", True)
        await ask("one", True)
        await ask("well", False)
        assert await state() == (200, "ready", 200)
        await asyncio.gather(ask("two", True), ask("three", True))
        assert await state() == (503, "degraded", 200)
        await ask("still served", False)
        page = (await http.get("/metrics")).text
        count = next(line for line in page.splitlines() if line.startswith("sayfa:numerical_errors_total{"))
        assert float(count.split()[-1]) == num_numerical
