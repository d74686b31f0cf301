"""Whether to restart this server (live), whether to send it work (ready), and what it is (version, metrics).

Called by orchestrators and load balancers, without a key. Progress decides, not time alone: an engine that has work and
has made no step for much longer than its steps take is stuck. Knows no requests.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sayfa.base.faults import fault
from sayfa.server.context import ServerContext
from sayfa.server.metrics import CONTENT_TYPE
from sayfa.server.routes import context_of

STUCK_FACTOR = 20.0
STUCK_MIN_S = 10.0
"""An engine with work is stuck after STUCK_FACTOR expected steps without progress, at the earliest after this time."""


def status_of(context: ServerContext) -> tuple[bool, str]:
    """Whether the server takes work, and a word for its state."""
    if context.draining:
        return False, "draining"
    state = context.client.state
    if state != "ready":
        return False, state
    if context.text is None:
        return False, "starting"
    if is_stuck(context):
        return False, "stuck"
    return (False, "degraded") if context.trust.why_not() else (True, "ready")


def is_stuck(context: ServerContext) -> bool:
    """Whether the engine has work and makes no progress."""
    health = context.client.health()
    limit_s = max(STUCK_MIN_S, STUCK_FACTOR * health.expected_step_s)
    return bool(health.alive and health.busy and health.since_step_s > limit_s)


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
    dead = context.client.state == "failed" or (not context.draining and is_stuck(context))
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
