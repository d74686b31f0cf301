"""POST /v1/chat/completions: messages to ids by the model's template, pieces to chat objects or chunks.

Called by the app's routing table. Knows no tokens' meaning and no engine.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sayfa.server import limits
from sayfa.server.answer import Piece
from sayfa.server.books import Record
from sayfa.server.context import ServerContext
from sayfa.server.generate import Generation, Plan
from sayfa.server.openai.chunks import Envelope, usage_object, whole
from sayfa.server.openai.logprobs import chat_logprobs, prompt_logprobs, size_of
from sayfa.server.openai.messages import chat_ids
from sayfa.server.openai.protocol import ChatRequest, refuse_unserved, usage_mode
from sayfa.server.routes import context_of, generation
from sayfa.server.sse import EventStream


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    return await generation(request, ChatRequest, _answer)


async def _answer(request: Request, body: ChatRequest, record: Record) -> Response:
    context = context_of(request)
    info = context.ready_info()
    model = context.check_model(body.model)
    refuse_unserved(body)
    tokenizer = context.tools.tokenizer
    figures = limits.Figures.of(info, tokenizer.vocab_size, context.options)
    params = limits.admit_chat(body, figures, tokenizer.eos_ids)
    ids = await chat_ids(context, body, figures)
    limits.check_ids("messages", ids, figures)
    max_tokens, length_field = limits.asked_length(body)
    limits.admit_lengths([ids], params, figures, "messages", None if max_tokens is None else length_field)
    plan = Plan(
        id=context.new_id("chatcmpl"),
        prompts=[ids],
        params=params,
        num_answers=params.n,
        tenant=request.scope.get("sayfa.tenant", ""),
        salt=context.salt(request.scope.get("sayfa.tenant", ""), body.cache_salt),
        priority=body.priority or 0,
        deadline_s=context.deadline(body.deadline_s),
        wants_entries=bool(body.logprobs),
    )
    run = Generation(context, plan, record)
    fingerprint = context.fingerprint(info)
    if body.stream:
        envelope = Envelope(
            chat=True, answer_id=plan.id, created_s=context.now_s(), model=model, fingerprint=fingerprint,
            usage_mode=usage_mode(body),
        )  # fmt: skip
        events = _events(context, run, body, envelope)
        return EventStream(events, run.explain, context.streams, context.awake)
    return await _whole(context, run, body, model, fingerprint)


async def _events(
    context: ServerContext, run: Generation, body: ChatRequest, envelope: Envelope
) -> AsyncGenerator[bytes, None]:
    """One event or more for each piece: role once, then text, then the reason alone; usage and the mark at the end."""
    tokenizer = context.tools.tokenizer
    greeted: set[int] = set()
    with_ids = bool(body.return_token_ids)
    top = body.top_logprobs or 0
    async with aclosing(run.pieces()) as coming:
        async for piece in coming:
            event = b""
            index, text = piece.choice, piece.text
            if index not in greeted:
                greeted.add(index)
                event = envelope.role(index, run.usage)
            if text or piece.entries or (with_ids and piece.tokens):
                logprobs = None
                if body.logprobs:
                    work = partial(chat_logprobs, tokenizer, piece.entries, top)
                    logprobs = await context.text_work(size_of(len(piece.entries), top), work)
                event += envelope.text(index, text, logprobs, piece.tokens if with_ids else None, run.usage)
            if piece.finish is not None:
                event += envelope.finish(index, piece.finish, run.usage)
            if event:
                yield event
    yield envelope.end(run.usage)


async def _whole(context: ServerContext, run: Generation, body: ChatRequest, model: str, fingerprint: str) -> Response:
    """Collect all pieces into one object."""
    tokenizer = context.tools.tokenizer
    pieces: list[list[Piece]] = [[] for _ in range(run.plan.num_answers)]
    async with aclosing(run.pieces()) as coming:
        async for piece in coming:
            pieces[piece.choice].append(piece)
    choices: list[dict[str, Any]] = []
    for index, parts in enumerate(pieces):
        text = "".join(part.text for part in parts)
        entries = [entry for part in parts for entry in part.entries]
        logprobs = None
        if body.logprobs:
            top = body.top_logprobs or 0
            work = partial(chat_logprobs, tokenizer, entries, top)
            logprobs = await context.text_work(size_of(len(entries), top), work)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": parts[-1].finish,
        }
        if body.return_token_ids:
            choice["token_ids"] = [token for part in parts for token in part.tokens]
        choices.append(choice)
    answer: dict[str, Any] = {
        "id": run.plan.id,
        "object": "chat.completion",
        "created": context.now_s(),
        "model": model,
        "system_fingerprint": fingerprint,
        "choices": choices,
        "usage": usage_object(run.usage),
    }
    prompt = run.plan.prompts[0]
    if body.prompt_logprobs is not None:
        top = body.prompt_logprobs
        scored = partial(prompt_logprobs, tokenizer, prompt, run.prompt_logprobs[0], top)
        answer["prompt_logprobs"] = await context.text_work(size_of(len(prompt), top), scored)
    if body.return_token_ids:
        answer["prompt_token_ids"] = prompt
    return Response(whole(answer), media_type="application/json")
