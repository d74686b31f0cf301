"""Messages to bytes and back: msgpack of the typed unions in `base.messages`, nothing else.

What does not decode raises MalformedMessageError, which ends that message and not the process. Called by both ends of
the wire. Must not know frames, only that they are bounded.
"""

from collections.abc import Iterator

import msgspec

from sayfa.base.messages import FromEngine, Outputs, ToEngine

LONG_BYTES = 4 << 20
"""A step's message is cut until each part is shorter: far below what a frame may hold, and read in some 40 ms, so that
the reader serves others in between. Only what a single output or event takes can be longer."""

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


def encode_in_parts(message: FromEngine) -> Iterator[bytes]:
    """Encode what the engine sends: one message, or several in place of a step's that is too long.

    A crowd that ends at once makes such a step: an output for each branch, also of those that only waited.
    """
    payload = _encoder.encode(message)
    if len(payload) <= LONG_BYTES or not isinstance(message, Outputs) or len(message.outputs) + len(message.events) < 2:
        yield payload
        return
    for half in _halves(message):
        yield from encode_in_parts(half)


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


def _halves(message: Outputs) -> tuple[Outputs, Outputs]:
    """Cut between events and outputs, or in the middle of what there is; the figures stay with the end."""
    outputs, events, first = message.outputs, message.events, message.first_event
    num_outputs = 0 if events else len(outputs) // 2
    num_events = len(events) if outputs else len(events) // 2
    return (
        Outputs(outputs=outputs[:num_outputs], first_event=first, events=events[:num_events]),
        Outputs(
            outputs=outputs[num_outputs:],
            stats=message.stats,
            first_event=first + num_events,
            events=events[num_events:],
        ),
    )


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
