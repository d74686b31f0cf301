"""POST /tokenize and /detokenize: what the model sees, and back. Nothing is generated. Knows no sampling."""

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sayfa.server import limits
from sayfa.server.body import read_model
from sayfa.server.context import ServerContext
from sayfa.server.openai.logprobs import show
from sayfa.server.openai.messages import chat_ids
from sayfa.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from sayfa.server.routes import context_of


def _figures(context: ServerContext) -> limits.Figures:
    return limits.Figures.of(context.ready_info(), context.tools.tokenizer.vocab_size, context.options)


async def tokenize(request: Request) -> Response:
    """Ids of a prompt, or of messages after the chat template."""
    context = context_of(request)
    body = await read_model(request, TokenizeRequest, context.options.max_body_bytes, context.reader)
    if body.model is not None:
        context.check_model(body.model)
    figures = _figures(context)
    limits.admit_tokenize(body, figures)
    tokenizer = context.tools.tokenizer
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = await context.text_work(len(body.prompt), partial(tokenizer.encode, body.prompt, special))
    else:
        ids = await chat_ids(context, body, figures)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": figures.context_tokens, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await context.text_work(len(ids), lambda: [show(tokenizer.token_bytes(i)) for i in ids])
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Text of ids, control tokens included."""
    context = context_of(request)
    body = await read_model(request, DetokenizeRequest, context.options.max_body_bytes, context.reader)
    if body.model is not None:
        context.check_model(body.model)
    limits.admit_detokenize(body, _figures(context))
    work = partial(context.tools.tokenizer.decode, body.tokens, skip_special=False)
    text = await context.text_work(len(body.tokens), work)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
