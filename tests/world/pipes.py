"""The connection between the two processes of a world: bytes that travel in time, and the engine's end of it.

Used by `world.engine_side`, in the place of a socket pair and of `wire.sockets.Connection`.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable

from sayfa.base.messages import Outputs
from sayfa.wire.codec import decode_from_engine
from sayfa.wire.sockets import BrokenStreamError, DisconnectedError, FrameReader, frame
from world.history import Setting
from world.runner import EngineClock


class Pipe:
    """Bytes one way. They arrive in order, each write after the latency, cut in pieces if `chop`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rnd: random.Random, setting: Setting, take: Callable[[bytes], None]
    ) -> None:
        self.extra_s = 0.0
        self._loop = loop
        self._rnd = rnd
        self._setting = setting
        self._take = take
        self._last_s = 0.0
        self._closed = False
        self._on_the_way: deque[bytes] = deque()

    def write(self, data: bytes, delay_s: float = 0.0) -> None:
        if self._closed:
            return
        at_s = self._loop.time() + delay_s + self._setting.latency_s + self.extra_s
        for piece in self._pieces(data):
            at_s = self._last_s = max(at_s, self._last_s)
            self._on_the_way.append(piece)
            self._loop.call_at(at_s, self._arrive)
            at_s += 0.001

    def close(self, then: Callable[[], None]) -> None:
        """End the stream behind what was written; `then` is called when the end arrives."""
        if not self._closed:
            self._closed = True
            self._loop.call_at(max(self._loop.time() + self._setting.latency_s, self._last_s + 1e-6), then)

    def _arrive(self) -> None:
        # Timers of the same moment run in any order; bytes do not.
        self._take(self._on_the_way.popleft())

    def _pieces(self, data: bytes) -> list[bytes]:
        if not self._setting.chop or len(data) < 2 or self._rnd.random() < 0.5:
            return [data]
        cut = self._rnd.randrange(1, len(data))
        return [data[:cut], data[cut:]]


class EngineEnd:
    """Takes the place of `wire.sockets.Connection`: never waits, as the world waits for it."""

    def __init__(self, out: Pipe, clock: EngineClock) -> None:
        self.woken = asyncio.Event()
        self.gone = False
        self.garbles = False
        self.unsent_bytes = 0
        self._out = out
        self._clock = clock
        self._reader = FrameReader(first=1)  # the settings, which came first, are nobody's matter here
        self._num_sent = 0
        self._frames: deque[bytes] = deque()

    def take(self, data: bytes) -> None:
        try:
            self._frames.extend(self._reader.feed(data))
        except BrokenStreamError:
            self.gone = True
            self._frames.clear()
        self.woken.set()

    def end(self) -> None:
        self.gone = True
        self.woken.set()

    @property
    def has_news(self) -> bool:
        return self.gone or bool(self._frames)

    def receive(self, timeout_s: float | None) -> list[bytes]:
        frames = list(self._frames)
        self._frames.clear()
        self.woken.clear()
        if not frames and self.gone:
            raise DisconnectedError
        return frames

    def send(self, payload: bytes) -> None:
        if self.gone:
            raise DisconnectedError
        if self.garbles:
            message = decode_from_engine(payload)
            if isinstance(message, Outputs) and message.outputs:
                self.garbles = False
                payload = b"\xc1 is no msgpack"
        self._out.write(frame(payload, self._num_sent), self._clock.ahead_s)
        self._num_sent += 1
