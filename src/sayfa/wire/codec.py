"""Messages to bytes and back: msgpack of the typed unions in `base.messages`, nothing else.

What does not decode raises MalformedMessageError, which ends that message and not the process. Called by both ends of
the wire.
"""

import msgspec

from sayfa.base.messages import FromEngine, ToEngine

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_anything = msgspec.msgpack.Decoder()


class MalformedMessageError(Exception):
    """A frame is not one of our messages. `request_id` is the request that it would have added, if it can be told."""

    def __init__(self, problem: str, request_id: str | None) -> None:
        super().__init__(problem)
        self.request_id = request_id


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode_to_engine(payload: bytes) -> ToEngine:
    """Decode a message that a client sent. Raises MalformedMessageError."""
    try:
        return _to_engine.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessageError(str(error), _request_id(payload)) from error


def decode_from_engine(payload: bytes) -> FromEngine:
    """Decode a message that the engine sent. Raises MalformedMessageError."""
    try:
        return _from_engine.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessageError(str(error), _request_id(payload)) from error


def _request_id(payload: bytes) -> str | None:
    """Find `request.id` in a message that has the wrong shape, so that its sender can be told."""
    try:
        message = _anything.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    inner = message.get("request", message)
    found = inner.get("id") if isinstance(inner, dict) else None
    return found if isinstance(found, str) and len(found) <= 256 else None
