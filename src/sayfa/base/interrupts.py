"""Hold back Ctrl-C while something must not be left half done.

Called by `llm` around what its engine does: an interrupt inside a step would cost the engine, and with it all later
calls of a conversation or a notebook. Knows no engine.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Let a SIGINT that comes within the block have its effect behind it; a second one has it at once.

    Does nothing outside the main thread, which alone gets signals, and where no Python function waits for them.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(came) == 1:
            handler(signal.SIGINT, None)
