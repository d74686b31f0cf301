"""Make the application: routes, error handlers, the edge around them, and the tasks that run beside.

Called by `serve` and by tests. All routes are in `ROUTES`; what is not listed there does not exist, and what is
listed needs a key unless `auth.OPEN_ROUTES` names it. Knows no engine but through its client.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from sayfa.base.access import is_local
from sayfa.base.clock import Clock
from sayfa.base.config import ServerOptions
from sayfa.server import describe, health
from sayfa.server.auth import OPEN_ROUTES, Guard, Keys
from sayfa.server.context import ServerContext, TextTools
from sayfa.server.edge import Edge, allowed_hosts
from sayfa.server.errors import StatusError, error_response
from sayfa.server.openai.chat import create_chat_completion
from sayfa.server.openai.completions import create_completion
from sayfa.server.openai.models import list_models, show_model
from sayfa.server.openai.tokenize import detokenize, tokenize
from sayfa.server.refusals import Attempt
from sayfa.server.sse import sweep
from sayfa.server.stats import log_stats
from sayfa.wire.client import EngineClient


class RouteSpec(NamedTuple):
    """A route: where, how, what it is called in the documents and the guard, and who answers."""

    path: str
    method: str
    name: str
    handler: Callable[[Request], Awaitable[Response]]


ROUTES = (
    RouteSpec("/v1/chat/completions", "POST", "create_chat_completion", create_chat_completion),
    RouteSpec("/v1/completions", "POST", "create_completion", create_completion),
    RouteSpec("/v1/models", "GET", "list_models", list_models),
    RouteSpec("/v1/models/{model:path}", "GET", "show_model", show_model),
    RouteSpec("/tokenize", "POST", "tokenize", tokenize),
    RouteSpec("/detokenize", "POST", "detokenize", detokenize),
    RouteSpec("/health", "GET", "health", health.ready),
    RouteSpec("/health/live", "GET", "health_live", health.live),
    RouteSpec("/health/ready", "GET", "health_ready", health.ready),
    RouteSpec("/ping", "GET", "ping", health.ready),
    RouteSpec("/ping", "POST", "ping", health.ready),
    RouteSpec("/version", "GET", "version", health.version),
    RouteSpec("/metrics", "GET", "metrics", health.metrics),
    RouteSpec("/openapi.json", "GET", "openapi", describe.openapi_json),
    RouteSpec("/docs", "GET", "docs", describe.docs_page),
)


def create_app(
    client: EngineClient,
    text: TextTools | None,
    options: ServerOptions,
    names: Sequence[str],
    version: str = "0",
    *,
    clock: Clock | None = None,
    rng: random.Random | None = None,
) -> FastAPI:
    """Make the application around an engine's client.

    text: None while the tokenizer is still loading; set `app.state.context.text` later. names: what clients may call
    the model, the shown one first. clock, rng: the machine's own if not given.
    """
    context = ServerContext(client, text, options, list(names), version, clock=clock, rng=rng)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        client.on_outputs(context.admissions.on_outputs)
        client.on_outputs(context.metrics.on_outputs)
        beside = [asyncio.create_task(sweep(context.streams, options.sse_keep_alive_interval, context.awake))]
        beside.append(asyncio.create_task(log_stats(context)))
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            context.pool.shutdown(wait=False)
            context.reader.shutdown(wait=False)

    app = FastAPI(
        title="Sayfa", version=version, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        redirect_slashes=False, telemetry={"tracing": False, "metrics": False, "logs": False},
    )  # fmt: skip
    app.state.context = context
    for route in ROUTES:
        _add(app, route)
    app.openapi = lambda: describe.openapi(app)  # type: ignore[method-assign]
    protected = not is_local(options) if options.protect_metrics is None else options.protect_metrics
    open_names = OPEN_ROUTES if protected else OPEN_ROUTES | {"metrics"}
    guard = Guard(Keys(options.api_key), app.router.routes, open_names)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(
        Edge, context=context, guard=guard, hosts=allowed_hosts(options.allowed_hosts, options.host),
        origins=options.cors_origins,
    )  # fmt: skip
    return app


def _add(app: FastAPI, route: RouteSpec) -> None:
    app.add_api_route(
        route.path,
        route.handler,
        methods=[route.method],
        name=route.name,
        operation_id=f"{route.name}_{route.method.lower()}" if route.name == "ping" else route.name,
        response_model=None,
        include_in_schema=route.name not in ("openapi", "docs"),
        **describe.operation(route.name),
    )
    if route.method == "GET":  # RFC 9110, 9.1: monitors and balancers ask so; uvicorn leaves the body out
        app.add_api_route(
            route.path, route.handler, methods=["HEAD"], name=route.name, response_model=None, include_in_schema=False
        )


async def _http_error(request: Request, error: Exception) -> Response:
    """Bring the router's own errors (404, 405) into the common form."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    if status == 405:  # the router names the methods of the first route with this path only
        routes = [route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE]
        headers = {"allow": ", ".join(sorted({method for route in routes for method in route.methods}))}
    refusal = StatusError(status)
    request.app.state.context.refusals.note(Attempt.of(request.scope), refusal)
    return error_response(refusal, request.scope.get("sayfa.request_id", "-"), headers)
