"""GET /v1/models and /v1/models/{id}: the names under which the model is served. Knows no weights."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sayfa.server.context import ServerContext
from sayfa.server.routes import context_of


def _card(context: ServerContext, name: str) -> dict[str, Any]:
    info = context.client.info
    return {
        "id": name,
        "object": "model",
        "created": context.created_s,
        "owned_by": "sayfa",
        "root": context.names[0],
        "parent": None,
        "max_model_len": info.max_model_len if info is not None else None,
    }


async def list_models(request: Request) -> Response:
    """All names of the model."""
    context = context_of(request)
    cards = [_card(context, name) for name in context.names]
    return Response(msgspec.json.encode({"object": "list", "data": cards}), media_type="application/json")


async def show_model(request: Request) -> Response:
    """One name; 404 `model_not_found` for another."""
    context = context_of(request)
    name = context.check_model(request.path_params["model"])
    return Response(msgspec.json.encode(_card(context, name)), media_type="application/json")
