"""The description of the API for machines (/openapi.json) and for people (/docs, a page of our own, no outside
address).

Request schemas come from the request models; answers are described here. Called by the app. Knows no handlers.
"""

from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from sayfa.server.openai import protocol

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, type[BaseModel]] = {
    "create_chat_completion": protocol.ChatRequest,
    "create_completion": protocol.CompletionRequest,
    "tokenize": protocol.TokenizeRequest,
    "detokenize": protocol.DetokenizeRequest,
}
_SUMMARIES = {
    "create_chat_completion": "Answer a conversation, streamed or whole.",
    "create_completion": "Continue one or several texts, streamed or whole.",
    "list_models": "Names under which the model is served.",
    "show_model": "One name.",
    "tokenize": "Token ids of a prompt, or of messages after the chat template.",
    "detokenize": "Text of token ids.",
    "health": "Whether requests are welcome.",
    "health_live": "Whether waiting can help this server.",
    "health_ready": "Whether requests are welcome.",
    "ping": "Whether requests are welcome.",
    "version": "Version of the software.",
    "metrics": "Metrics in Prometheus' text format.",
}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_USAGE = _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
                 {"prompt_tokens_details": _object({"cached_tokens": _COUNT})})  # fmt: skip
_REASON = {"type": "string", "enum": ["stop", "length"]}
_HEAD = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "system_fingerprint": _TEXT, "usage": _USAGE}
_CARD = _object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT})
_STATUS = _object({"status": _TEXT})
_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERROR = _object({"error": _object({"message": _TEXT, "type": _TEXT, "param": _NULLABLE_TEXT, "code": _NULLABLE_TEXT})})
_ANSWERS: dict[str, dict[str, Any]] = {
    "create_chat_completion": _object({
        **_HEAD,
        "object": {"const": "chat.completion"},
        "choices": {"type": "array", "items": _object({
            "index": _COUNT,
            "message": _object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}}),
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": _REASON,
        })},
    }),
    "create_completion": _object({
        **_HEAD,
        "object": {"const": "text_completion"},
        "choices": {"type": "array", "items": _object({
            "index": _COUNT, "text": _TEXT, "logprobs": {"type": ["object", "null"]}, "finish_reason": _REASON,
        })},
    }),
    "list_models": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _CARD}}),
    "show_model": _CARD,
    "tokenize": _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": {"type": "array", "items": _COUNT}}),
    "detokenize": _object({"prompt": _TEXT}),
    "health": _STATUS,
    "health_live": _STATUS,
    "health_ready": _STATUS,
    "ping": _STATUS,
    "version": _object({"version": _TEXT}),
}  # fmt: skip


def operation(name: str) -> dict[str, Any]:
    """What the documents say about a route, as arguments of `add_api_route`."""
    responses: dict[int | str, dict[str, Any]] = {}
    content: dict[str, Any] = {}
    if name in _ANSWERS:
        content["application/json"] = {"schema": _ANSWERS[name]}
    if name == "metrics":
        content["text/plain"] = {"schema": _TEXT}
    if name in ("create_chat_completion", "create_completion"):
        content["text/event-stream"] = {"schema": _TEXT}
    if content:
        responses[200] = {"description": "The answer", "content": content}
    failure = {"description": "Failure", "content": {"application/json": {"schema": _ERROR}}}
    responses["4XX"] = responses["5XX"] = failure
    if name.startswith("health") or name == "ping":
        responses[503] = {"description": "Not now", "content": {"application/json": {"schema": _STATUS}}}
    extra: dict[str, Any] = {}
    if name in _BODIES:
        schema = {"$ref": _REF.format(model=_BODIES[name].__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if name == "show_model":
        extra["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]
    return {"responses": responses, "openapi_extra": extra, "summary": _SUMMARIES.get(name, name)}


def openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document; made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, routes=app.routes, summary="OpenAI's API and a little more"
        )
        _, schemas = models_json_schema([(model, "validation") for model in _BODIES.values()], ref_template=_REF)
        components = document.setdefault("components", {})
        components["schemas"] = {**components.get("schemas", {}), **schemas["$defs"]}
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}, {}]
        app.openapi_schema = document
    return app.openapi_schema


async def openapi_json(request: Request) -> Response:
    """The document as JSON."""
    return Response(msgspec.json.encode(openapi(request.app)), media_type="application/json")


async def docs_page(request: Request) -> Response:
    """The page that shows the document; all it needs is in it."""
    page = files("sayfa.server").joinpath("docs.html").read_bytes()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
    )
    return Response(
        page, media_type="text/html", headers={"content-security-policy": policy, "x-frame-options": "DENY"}
    )
