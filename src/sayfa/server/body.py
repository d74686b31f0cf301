"""Read and validate a request body: content type, size while it arrives, strict JSON, then the route's model.

Called by every POST handler. A validation error becomes one sentence that names the field. Knows no route's meaning.
"""

import asyncio
import logging
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from sayfa.base.errors import InvalidRequest, TooLarge
from sayfa.base.faults import fault
from sayfa.server import strict_json
from sayfa.server.errors import StatusError
from sayfa.server.patience import patience

BODY_TIME_LIMIT_S = 30.0
BODY_GRACE_S = 10.0
MIN_BODY_BYTES_PER_S = 1024
"""A body has ten seconds, one more for each KiB that has come, and never more than the limit."""
INLINE_PARSE_BYTES = 64 << 10
MAX_REPORTED_NAMES = 200
MAX_NAMES_OF_REQUEST = 20
MAX_NAME_CHARS = 64
"""Of unknown fields: how many are told in all and of one request, and how much of each name."""

log = logging.getLogger("sayfa.server")
_reported: set[str] = set()

Model = TypeVar("Model", bound=BaseModel)

_PHRASES = {
    "missing": "is missing",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "none_required": "must be null",
    "extra_forbidden": "is not known here",
}
_BOUND_PHRASES = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "greater_than": "must be above {gt}",
    "less_than": "must be below {lt}",
    "literal_error": "must be one of {expected}",
    "too_long": "has {actual_length} entries; at most {max_length} are allowed",
    "too_short": "has {actual_length} entries; at least {min_length} are needed",
    "string_too_long": "is longer than {max_length} characters",
    "string_too_short": "is shorter than {min_length} characters",
}


async def read_model(request: Request, model: type[Model], max_bytes: int, reader: Executor) -> Model:
    """Read the body and validate it as `model`; a long one is parsed by `reader`, while others are served.

    Raises InvalidRequest (400), TooLarge (413), StatusError (408, 415).
    """
    check_headers(request)
    body = await read_bytes(request, max_bytes)
    fault("server.body.parse")
    if len(body) > INLINE_PARSE_BYTES:
        value = await asyncio.get_running_loop().run_in_executor(reader, strict_json.parse, body)
    else:
        value = strict_json.parse(body)
    fault("server.body.validate")
    try:
        parsed = model.model_validate(value)
    except ValidationError as error:
        raise explain(error, value) from None
    report_unknown(parsed, request.scope["route"].path)
    return parsed


def check_headers(request: Request) -> None:
    """Take only plain JSON: a form or text would let any web page post here, an encoding could hide its size."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise StatusError(415)
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise StatusError(415, "Compressed bodies are not accepted; send plain JSON.")


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """Collect the body, counting while it arrives. Raises TooLarge (413), StatusError (408)."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0

    def allowed_s() -> float:
        return min(BODY_TIME_LIMIT_S, BODY_GRACE_S + size / MIN_BODY_BYTES_PER_S)

    try:
        async with patience(allowed_s, request.app.state.context.awake), aclosing(request.stream()) as coming:
            async for chunk in coming:
                fault("server.body.read")
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError:
        message = (
            f"The body did not arrive within {allowed_s():.0f} seconds; it may take {BODY_GRACE_S:.0f}, one more for "
            f"each {MIN_BODY_BYTES_PER_S} bytes that have come, and {BODY_TIME_LIMIT_S:.0f} at most."
        )
        raise StatusError(408, message, code="request_timeout") from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(max_bytes: int) -> TooLarge:
    message = f"The body is larger than {max_bytes} bytes; send less, or raise --max-body-bytes."
    return TooLarge(message, code="request_too_large")


def explain(error: ValidationError, value: Any) -> InvalidRequest:
    """Say which field is wrong, what it holds and what it must be, from the first of the validator's findings."""
    findings = error.errors(include_url=False, include_context=True)
    places = [_path(item, value) for item in findings]
    # Of a field with several allowed forms, the finding that went deepest into the caller's value tells most.
    best = max(range(len(findings)), key=lambda i: (len(places[i]), findings[i]["type"] != "literal_error"))
    if places[0][:1] != places[best][:1]:
        best = 0
    finding, path = findings[best], places[best]
    # Where none of the allowed forms fits, all of them are told.
    phrases = [_phrase(item) for item, place in zip(findings, places, strict=True) if place == path]
    phrase = " or ".join([phrases[0], *(other.removeprefix("must be ") for other in phrases[1:])])
    name = path[0] if path else None
    shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")[:200]
    message = f"`{shown or 'body'}` {phrase}."
    if finding["type"] not in ("missing", "value_error"):
        message = f"`{shown or 'body'}` is {_show(finding.get('input'))}, but {phrase}."
    return InvalidRequest(message, param=str(name) if name is not None else None, code="invalid_type")


def _phrase(finding: ErrorDetails) -> str:
    """What the validator wants there, in words."""
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == "value_error":
        return str(context.get("error", "cannot be used"))
    if kind in _BOUND_PHRASES:
        return _BOUND_PHRASES[kind].format(**context)
    return _PHRASES.get(kind, "has a value of the wrong type")


def _path(finding: ErrorDetails, value: Any) -> list[int | str]:
    """Where in the caller's value it was found: the validator's location without its names for the forms of a union."""
    location = finding["loc"]
    path: list[int | str] = []
    for part in location:
        if isinstance(value, dict):
            part = str(part)  # of ids as keys the validator knows the number
            if part not in value:
                # A missing field is named too; anything else that is not there is a name of ours.
                return [*path, part] if finding["type"] == "missing" and part == location[-1] else path
            value = value[part]
        elif isinstance(value, list) and isinstance(part, str):
            continue  # a list has no names: it is one of ours
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return path
        path.append(part)
    return path


def _show(value: Any) -> str:
    """A wrong value, shortened; what a caller sent is shown to that caller only."""
    if isinstance(value, str):
        return f"a string of {len(value)} characters" if len(value) > 40 else repr(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}…"
    return "a list" if isinstance(value, list) else "an object"


def report_unknown(parsed: BaseModel, path: str) -> None:
    """Write the names of unknown fields to the log, each once in the life of the process.

    They are accepted, since OpenAI's clients send new fields before servers know them.
    """
    room = min(MAX_NAMES_OF_REQUEST, MAX_REPORTED_NAMES - len(_reported))
    if not parsed.model_extra or room <= 0:
        return
    told = sorted({name[:MAX_NAME_CHARS] for name in parsed.model_extra} - _reported)[:room]
    if told:
        _reported.update(told)
        log.warning("unknown fields in a request to %s are ignored: %s", path, ", ".join(map(repr, told)))
