"""POST /v1/completions: raw prompts (text, ids, lists of these) to text_completion objects.

Called by the app's routing table. Knows no templates.
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
from sayfa.server.openai.logprobs import completion_logprobs, prompt_logprobs, size_of
from sayfa.server.openai.protocol import CompletionRequest, refuse_unserved, usage_mode
from sayfa.server.routes import context_of, generation
from sayfa.server.sse import EventStream


async def create_completion(request: Request) -> Response:
    """Continue one or several texts, streamed or whole."""
    return await generation(request, CompletionRequest, _answer)


async def _answer(request: Request, body: CompletionRequest, record: Record) -> Response:
    context = context_of(request)
    info = context.ready_info()
    model = context.check_model(body.model)
    refuse_unserved(body)
    tokenizer = context.tools.tokenizer
    figures = limits.Figures.of(info, tokenizer.vocab_size, context.options)
    params = limits.admit_completion(body, figures, tokenizer.eos_ids)
    prompts = await prompt_ids(context, body)
    limits.admit_lengths(prompts, params, figures, "prompt", None if body.max_tokens is None else "max_tokens")
    plan = Plan(
        id=context.new_id("cmpl"),
        prompts=prompts,
        params=params,
        num_answers=body.n or 1,
        tenant=request.scope.get("sayfa.tenant", ""),
        salt=context.salt(request.scope.get("sayfa.tenant", ""), body.cache_salt),
        priority=body.priority or 0,
        deadline_s=context.deadline(body.deadline_s),
        echo=bool(body.echo),
        wants_entries=body.logprobs is not None,
    )
    run = Generation(context, plan, record)
    fingerprint = context.fingerprint(info)
    if body.stream:
        envelope = Envelope(
            chat=False, answer_id=plan.id, created_s=context.now_s(), model=model, fingerprint=fingerprint,
            usage_mode=usage_mode(body),
        )  # fmt: skip
        events = _events(context, run, body, envelope)
        return EventStream(events, run.explain, context.streams, context.awake)
    return await _whole(context, run, body, model, fingerprint)


async def prompt_ids(context: ServerContext, body: CompletionRequest) -> list[list[int]]:
    """Tokenize the prompts that are text."""
    prompts = limits.split_prompts(body.prompt)
    tokenizer = context.tools.tokenizer
    special = body.add_special_tokens is not False

    def work() -> list[list[int]]:
        return [tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in prompts]

    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await context.text_work(size, work)


async def _events(
    context: ServerContext, run: Generation, body: CompletionRequest, envelope: Envelope
) -> AsyncGenerator[bytes, None]:
    """An event for each piece of text, then the reason alone; usage and the mark at the end."""
    tokenizer = context.tools.tokenizer
    with_ids = bool(body.return_token_ids)
    async with aclosing(run.pieces()) as coming:
        async for piece in coming:
            event = b""
            if piece.text or piece.entries or (with_ids and piece.tokens):
                logprobs = None
                if body.logprobs is not None:
                    work = partial(completion_logprobs, tokenizer, piece.entries, body.logprobs)
                    logprobs = await context.text_work(size_of(len(piece.entries), body.logprobs), work)
                event = envelope.text(piece.choice, piece.text, logprobs, piece.tokens if with_ids else None, run.usage)
            if piece.finish is not None:
                event += envelope.finish(piece.choice, piece.finish, run.usage)
            if event:
                yield event
    yield envelope.end(run.usage)


async def _whole(
    context: ServerContext, run: Generation, body: CompletionRequest, model: str, fingerprint: str
) -> Response:
    """Collect all pieces; of `best_of` answers to a prompt, keep the `n` likeliest per token."""
    plan = run.plan
    parts: list[list[Piece]] = [[] for _ in range(len(plan.prompts) * plan.params.n)]
    async with aclosing(run.pieces()) as coming:
        async for piece in coming:
            parts[piece.choice].append(piece)
    choices: list[dict[str, Any]] = []
    for number, branches in enumerate(run.branches):
        kept = branches
        if plan.params.n > plan.num_answers:
            kept = sorted(branches, key=lambda branch: branch.mean_logprob, reverse=True)[: plan.num_answers]
        for branch in kept:
            choice = await _choice(context, body, parts[branch.index], len(choices))
            if body.prompt_logprobs is not None:
                ids, scores = plan.prompts[number], run.prompt_logprobs[number]
                work = partial(prompt_logprobs, context.tools.tokenizer, ids, scores, body.prompt_logprobs)
                choice["prompt_logprobs"] = await context.text_work(size_of(len(ids), body.prompt_logprobs), work)
            if body.return_token_ids:
                choice["prompt_token_ids"] = plan.prompts[number]
            choices.append(choice)
    answer = {
        "id": plan.id,
        "object": "text_completion",
        "created": context.now_s(),
        "model": model,
        "system_fingerprint": fingerprint,
        "choices": choices,
        "usage": usage_object(run.usage),
    }
    return Response(whole(answer), media_type="application/json")


async def _choice(context: ServerContext, body: CompletionRequest, parts: list[Piece], index: int) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None:
        entries = [entry for part in parts for entry in part.entries]
        work = partial(completion_logprobs, context.tools.tokenizer, entries, body.logprobs)
        logprobs = await context.text_work(size_of(len(entries), body.logprobs), work)
    choice: dict[str, Any] = {
        "index": index,
        "text": "".join(part.text for part in parts),
        "logprobs": logprobs,
        "finish_reason": parts[-1].finish,
    }
    if body.return_token_ids:
        choice["token_ids"] = [token for part in parts for token in part.tokens]
    return choice
