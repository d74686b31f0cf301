"""Whether to restart this server (live), whether to send it work (ready), and what it is (version, metrics).

Called by orchestrators and load balancers; only the metrics may ask for a key. Progress decides, not time alone, by the
rule that the wire has for its engine (`wire.watch.judge_stall`): who has work and has made no step for much longer than
its steps take is sent no more, but only one that will hardly move again is to be restarted. Knows no requests.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sayfa.base.faults import fault
from sayfa.server.context import ServerContext
from sayfa.server.metrics import CONTENT_TYPE
from sayfa.server.routes import context_of
from sayfa.wire.watch import Verdict, judge_stall


def status_of(context: ServerContext) -> tuple[bool, str]:
    """Whether the server takes work, and a word for its state."""
    if context.draining:
        return False, "draining"
    state = context.client.state
    if state != "ready":
        return False, state
    if context.text is None:
        return False, "starting"
    verdict = progress_of(context)
    if verdict != "moving":
        return False, verdict
    return (False, "degraded") if context.trust.why_not() else (True, "ready")


def progress_of(context: ServerContext) -> Verdict:
    """Whether the engine gets on with the work it has."""
    health = context.client.health()
    return judge_stall(health.since_step_s, health.alive and health.busy, health.expected_step_s)


def _answer(status: int, body: dict[str, Any]) -> Response:
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )


async def live(request: Request) -> Response:
    """200 while this process can be helped by waiting; 503 once only a restart helps."""
    context = context_of(request)
    dead = context.client.state == "failed" or (not context.draining and progress_of(context) == "stuck")
    return _answer(503 if dead else 200, {"status": "dead" if dead else "alive"})


async def ready(request: Request) -> Response:
    """200 when requests are welcome."""
    fault("server.health")
    context = context_of(request)
    is_ready, word = status_of(context)
    body = {"status": word}
    if word == "degraded":
        body["reason"] = context.trust.why_not()
    return _answer(200 if is_ready else 503, body)


async def version(request: Request) -> Response:
    """The version of the software."""
    return _answer(200, {"version": context_of(request).version})


async def metrics(request: Request) -> Response:
    """All metrics, for Prometheus."""
    context = context_of(request)
    context.metrics.degraded(bool(context.trust.why_not()))
    page = context.metrics.render()
    return Response(page, headers={"content-type": CONTENT_TYPE})
