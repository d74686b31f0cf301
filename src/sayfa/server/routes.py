"""What every generation route does around its own work: books, body, leaving clients.

Called by the handlers of chat and completions. Knows no request's meaning.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sayfa.server.body import read_model
from sayfa.server.books import Record
from sayfa.server.context import ServerContext
from sayfa.server.sse import wait_until_gone

Model = TypeVar("Model", bound=BaseModel)
CLIENT_LEFT = 499


def context_of(request: Request) -> ServerContext:
    """The server's shared state."""
    context: ServerContext = request.app.state.context
    return context


async def generation(
    request: Request, model: type[Model], work: Callable[[Request, Model, Record], Awaitable[Response]]
) -> Response:
    """Run one generation request: open its books, read its body, do `work` while its client is there."""
    context = context_of(request)
    tenant: str = request.scope.get("sayfa.tenant", "")
    request_id: str = request.scope.get("sayfa.request_id", "-")
    # As the table has it: the path as it came has a proxy's prefix (--root-path) before it.
    route, write_line = request.scope["route"].path, context.options.log_requests
    record = Record(context.metrics, context.clock, route, tenant, request_id, write_line)
    request.scope["sayfa.record"] = record
    try:
        body = await read_model(request, model, context.options.max_body_bytes, context.reader)
        return await while_connected(request, work(request, body, record))
    except ClientDisconnect:
        raise  # the edge closes the books as abandoned
    except Exception as error:
        record.fail(error)
        raise


async def while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """Await `work`, but cancel it as soon as the client closes the connection.

    The server library does not do this for plain answers; without it an abandoned request would run to its end.
    """
    working = asyncio.ensure_future(_response(work))
    gone = asyncio.ensure_future(wait_until_gone(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return Response(status_code=CLIENT_LEFT)
        return working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _response(work: Awaitable[Response]) -> Response:
    return await work
