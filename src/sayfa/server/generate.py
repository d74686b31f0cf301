"""One HTTP request's generation: ids to the engine, outputs back, pieces of answers out, books kept.

Called by the chat and completions handlers. A request may hold several prompts (each one engine request) and several
branches a prompt (`n`, `best_of`). In every ending, also when the client leaves, the engine is told to stop, the
metrics get exactly one outcome, and one line is logged. Knows no response format.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from sayfa.base.errors import EngineError, Overloaded
from sayfa.base.faults import fault
from sayfa.base.messages import EngineOutput, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import TokenLogprobs
from sayfa.server.answer import Branch, Piece, echo_prompt
from sayfa.server.books import Record, Usage
from sayfa.server.context import ServerContext
from sayfa.server.errors import DeadlinePassedError, ErrorAnswer, log_bug, to_answer
from sayfa.server.trust import FAILURES

MAX_UNREAD_PIECES = 64
"""Of all prompts of a request together; what is behind that stays in the mailboxes, where it is counted."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An admitted request: everything that is needed to run it.

    num_answers: choices shown for each prompt; params.n of them are computed (best_of). echo: the prompt leads each
    text. wants_entries: log-probabilities are to be told.
    """

    id: str
    prompts: list[list[int]]
    params: SamplingParams
    num_answers: int
    tenant: str
    salt: str
    priority: int = 0
    deadline_s: float | None = None
    echo: bool = False
    wants_entries: bool = False


class Generation:
    """Runs a Plan. Iterate `pieces()` once; `usage` and `prompt_logprobs` are complete when it has ended."""

    def __init__(self, context: ServerContext, plan: Plan, record: Record) -> None:
        self.plan = plan
        self.prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in plan.prompts]
        self.branches: list[list[Branch]] = []
        self._context = context
        self._record = record
        record.begin(plan.id, sum(map(len, plan.prompts)), plan.params, len(plan.prompts))
        tokenizer = context.tools.tokenizer
        wants = plan.wants_entries or plan.params.n > plan.num_answers
        for number in range(len(plan.prompts)):
            start = number * plan.params.n
            self.branches.append([Branch(start + i, tokenizer, plan.params, wants) for i in range(plan.params.n)])

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self._record.usage

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield pieces of all answers as they come.

        Raises RequestError if the engine refuses, DeadlinePassedError, EngineError or EngineDead if it fails. Leaving
        early aborts the engine's work; the books stay open then for whoever knows why: `explain`, or the edge.
        """
        try:
            async with aclosing(self._run(0) if len(self.plan.prompts) == 1 else self._run_all()) as run:
                async for piece in run:
                    yield piece
        except Exception as error:
            self._record.fail(error)
            raise
        ends = {branch.finish for group in self.branches for branch in group}
        self._record.close("length" if "length" in ends else "stop")

    def explain(self, error: Exception) -> ErrorAnswer:
        """What the client is told of an error that ends its stream; it is booked so, and logged if it is a bug."""
        self._record.fail(error)
        log_bug(error, self._record.request_id)
        return to_answer(error, self._record.request_id)

    async def _run(self, number: int) -> AsyncGenerator[Piece, None]:
        """Run one prompt."""
        plan, branches = self.plan, self.branches[number]
        request = self._request(number)
        echoed = [not plan.echo] * len(branches)
        open_branches = len(branches)
        self._context.admissions.watch(request.id, self._record)
        stream = self._context.client.generate(request)
        try:
            async for output in stream:
                fault("server.output")
                if output.prompt_logprobs:
                    self.prompt_logprobs[number] += output.prompt_logprobs
                branch = branches[output.branch]
                if branch.finish is not None:
                    continue  # a stop string ended it; the engine had not heard yet
                if output.finish is not None:
                    self._check_end(output, request)
                if not echoed[output.branch] and (output.tokens or output.finish is not None):
                    echoed[output.branch] = True
                    yield await self._echo(number, branch)
                piece = branch.push(output)
                self._record.note(piece.choice, len(piece.tokens), output)
                yield piece
                if piece.finish is not None:
                    open_branches -= 1
                    if open_branches == 0:
                        return
                    if output.finish is None:  # a stop string ended it, of which the engine does not know
                        self._context.client.abort(request.id, [output.branch])
        finally:
            self._context.admissions.forget(request.id)
            await _close(stream)

    async def _run_all(self) -> AsyncGenerator[Piece, None]:
        """Run all prompts at once and merge what they yield; the first failure ends them all."""
        merged: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(MAX_UNREAD_PIECES)

        async def feed(number: int) -> None:
            try:
                async with aclosing(self._run(number)) as run:
                    async for piece in run:
                        await merged.put(piece)
                await merged.put(None)
            except Exception as error:
                await merged.put(error)

        tasks = [asyncio.create_task(feed(number)) for number in range(len(self.plan.prompts))]
        try:
            running = len(tasks)
            while running:
                item = await merged.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _request(self, number: int) -> Request:
        fault("server.request")
        plan = self.plan
        return Request(
            id=plan.id if len(plan.prompts) == 1 else f"{plan.id}-{number}",
            prompt=plan.prompts[number],
            params=plan.params,
            salt=plan.salt,
            tenant=plan.tenant,
            priority=plan.priority,
            deadline_s=self._left_s(),
        )

    def _left_s(self) -> float | None:
        """Say how much of the deadline is left: reading and tokenizing the body took a part of it."""
        if self.plan.deadline_s is None:
            return None
        left_s = self.plan.deadline_s - (self._context.clock.monotonic() - self._record.arrived_s)
        if left_s <= 0:
            raise self._expired()
        return left_s

    def _expired(self) -> DeadlinePassedError:
        message = f"The answer was not complete within `deadline_s` ({self.plan.deadline_s} s)."
        return DeadlinePassedError(message, param="deadline_s", code="deadline_exceeded")

    def _check_end(self, output: EngineOutput, request: Request) -> None:
        """Raise for the endings that are no answers."""
        if output.error_code in FAILURES:
            self._context.trust.note_error(request)
            if output.error_code == "numerical_error":
                self._context.metrics.numerical_error()
        elif output.finish in ("stop", "length"):
            self._context.trust.note_end()
        if output.finish == "deadline":
            raise self._expired()
        if output.finish == "abort" or output.error_code == "shutdown":
            raise Overloaded(
                "The server is shutting down; the answer is not complete.", code="draining", retry_after_s=5
            )
        if output.finish == "error":
            code = output.error_code or "engine_error"
            raise EngineError("The engine could not compute this answer; other requests go on.", code=code)

    async def _echo(self, number: int, branch: Branch) -> Piece:
        plan = self.plan
        work = partial(
            echo_prompt,
            self._context.tools.tokenizer,
            plan.prompts[number],
            self.prompt_logprobs[number],
            plan.params.skip_special_tokens,
            plan.wants_entries,
        )
        text, entries = await self._context.text_work(len(plan.prompts[number]), work)
        return branch.begin_with(text, entries)


async def _close(stream: AsyncIterator[EngineOutput]) -> None:
    """Leave an engine stream, which aborts what is unfinished."""
    close: Callable[[], Any] | None = getattr(stream, "aclose", None)
    if close is not None:
        await close()
