"""Map the error tree to HTTP, in this one place. Called by every handler and by the edge; knows no routes.

Every error leaves as `{"error": {"message", "type", "param", "code"}}` (OpenAI's form) with JSON content type, also
when a stream has begun (one `data:` event, then `[DONE]`). Texts are written by us: a bug of ours becomes a fixed
sentence with the request's id, never the text of an exception. The log has its traceback (`log_bug`).
"""

import logging
import zlib
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from sayfa.base.errors import EngineDead, EngineError, InvalidRequest, Overloaded, RequestError

log = logging.getLogger("sayfa.server")

RETRY_AFTER_S = 2
MAX_CAUSES = 5
"""Of a bug, how many of the exceptions behind it the log shows."""

_STATUS_WORDS: dict[int, tuple[str, str, str]] = {
    400: ("invalid_request_error", "bad_request", "The request cannot be read."),
    403: ("permission_error", "forbidden", "This is not allowed."),
    404: ("not_found_error", "unknown_url", "There is no such route here; /docs lists what there is."),
    405: ("invalid_request_error", "method_not_allowed", "This route does not take this method; see /docs."),
    413: ("invalid_request_error", "request_too_large", "The request is too large."),
    414: ("invalid_request_error", "uri_too_long", "The address is too long."),
    415: ("invalid_request_error", "unsupported_media_type", "Send JSON with `Content-Type: application/json`."),
    431: ("invalid_request_error", "headers_too_large", "The header block is too large."),
}  # fmt: skip


class StatusError(RequestError):
    """A request error with a status that the tree has no class for: 403, 404 of a route, 405, 408, 414, 415, 431."""

    def __init__(self, status: int, message: str | None = None, *, code: str | None = None) -> None:
        kind, default_code, default_message = _STATUS_WORDS.get(status, _STATUS_WORDS[400])
        super().__init__(message or default_message, code=code or default_code)
        self.status = status
        self.kind = kind


class DeadlinePassedError(RequestError):
    """The caller's own `deadline_s` passed before the answer was complete (408)."""

    status = 408
    kind = "timeout_error"


class ErrorBody(msgspec.Struct, frozen=True):
    """The inner object of an error answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An error as HTTP: status, body, and seconds for Retry-After if trying again can help."""

    status: int
    error: ErrorBody
    retry_after_s: int | None = None


def to_answer(error: Exception, request_id: str) -> ErrorAnswer:
    """Turn any exception into what the caller is told. Never raises."""
    if isinstance(error, RequestError):
        code = error.code or _default_code(error)
        body = ErrorBody(error.message, error.kind, error.param, code)
        retry = error.retry_after_s
        if retry is None and error.status in (429, 503):
            retry = RETRY_AFTER_S
        # Callers that were refused together should not come back together.
        return ErrorAnswer(error.status, body, retry + zlib.crc32(request_id.encode()) % 2 if retry else retry)
    if isinstance(error, EngineDead):
        return ErrorAnswer(503, ErrorBody(error.message, "server_error", None, error.code), RETRY_AFTER_S)
    if isinstance(error, EngineError):
        return ErrorAnswer(500, ErrorBody(error.message, "server_error", None, error.code))
    message = f"The server failed to answer this request. If you report it, name the request id {request_id}."
    return ErrorAnswer(500, ErrorBody(message, "server_error", None, "internal_error"))


def log_bug(error: Exception, request_id: str) -> None:
    """Write the traceback of an exception that nobody meant; one of the tree's is told in the request's line."""
    if not isinstance(error, RequestError | EngineError):
        told = _without_texts(error)
        log.error("request %s failed", request_id, exc_info=told, extra={"request_id": request_id})


def _without_texts(error: BaseException, num_causes: int = MAX_CAUSES) -> Exception:
    """Return a stand-in with the name, frames and causes of an exception, but no text: that may quote a prompt."""
    kind = type(error)
    told: Exception = type(kind.__name__, (Exception,), {"__module__": kind.__module__})()
    told.__traceback__ = error.__traceback__
    told.__suppress_context__ = error.__suppress_context__
    if error.__cause__ is not None and num_causes:
        told.__cause__ = _without_texts(error.__cause__, num_causes - 1)
    elif error.__context__ is not None and not error.__suppress_context__ and num_causes:
        told.__context__ = _without_texts(error.__context__, num_causes - 1)
    return told


def _default_code(error: RequestError) -> str | None:
    if isinstance(error, Overloaded):
        return "server_overloaded"
    return "invalid_value" if isinstance(error, InvalidRequest) and error.param else None


def body_bytes(answer: ErrorAnswer) -> bytes:
    """The JSON body of an error answer."""
    return msgspec.json.encode({"error": answer.error})


def headers_of(answer: ErrorAnswer) -> dict[str, str]:
    """Headers that belong to an error answer: Retry-After, WWW-Authenticate, Allow is the router's."""
    headers: dict[str, str] = {}
    if answer.retry_after_s is not None:
        headers["retry-after"] = str(answer.retry_after_s)
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: Exception, request_id: str, extra_headers: Mapping[str, str] | None = None) -> Response:
    """The full HTTP response for an exception."""
    answer = to_answer(error, request_id)
    headers = headers_of(answer) | dict(extra_headers or {})
    return Response(body_bytes(answer), status_code=answer.status, headers=headers, media_type="application/json")
