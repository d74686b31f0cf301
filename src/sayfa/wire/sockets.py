"""Bytes between two processes: frames on a Unix socket pair, and the engine's blocking end of it.

A frame is a length, a number, a checksum (4 bytes each, little-endian) and that many bytes of msgpack. Numbers have no
gaps, so that a frame that is lost, doubled or torn ends the connection, and is never taken for silence or for an answer
that is shorter. The pair is made by the parent and handed to the child as an inherited descriptor: there is no name
that another process could connect to, and when either side dies the kernel tells the other at once. Called by
`wire.process_client` (its end lives in an event loop) and `engine.process` (the blocking `Connection`); must not know
what a request is.
"""

import contextlib
import selectors
import signal
import socket
import struct
import zlib

from sayfa.base.faults import altered

MAX_FRAME_BYTES = 64 << 20
"""Longer frames are skipped and counted. The engine cuts a step's message long before (`codec.encode_in_parts`); the
longest thing that cannot be cut are the pages of one sequence: 32 MB in the longest context that can be set. A prompt
takes 5 bytes a token id, so that one of 13 million is refused."""

_HEADER = struct.Struct("<III")
_NUMBERS = 1 << 32
_READ_BYTES = 1 << 18


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Make the two ends of a connection; neither is inherited by a child unless it is named in `pass_fds`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def frame(payload: bytes, number: int = 0) -> bytes:
    """Put the header before a payload. number: how many frames went before on this connection.

    Raises ValueError if the other side would not take it.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload), number % _NUMBERS, zlib.crc32(payload)) + payload


class DisconnectedError(Exception):
    """The other side is gone."""


class BrokenStreamError(DisconnectedError):
    """Bytes were lost, doubled or changed on the way; nothing that follows can be understood."""


class FrameReader:
    """Cut a stream of bytes into frames, however it arrives in pieces. first: the number of the first frame.

    A frame over MAX_FRAME_BYTES is skipped without being held; `skipped` counts them.
    """

    def __init__(self, first: int = 0) -> None:
        self._buffer = bytearray()
        self._next = first
        self._to_skip = 0
        self.skipped = 0

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Take the next bytes and return the frames that are now complete, in order. Raises BrokenStreamError."""
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while True:
            if self._to_skip:
                taken = min(self._to_skip, len(self._buffer) - start)
                self._to_skip -= taken
                start += taken
            if self._to_skip or len(self._buffer) - start < _HEADER.size:
                break
            length, number, checksum = _HEADER.unpack_from(self._buffer, start)
            if number != self._next:
                raise BrokenStreamError(f"frame {self._next} was to come, {number} came")
            end = start + _HEADER.size + length
            if length <= MAX_FRAME_BYTES and end > len(self._buffer):
                break
            self._next = (number + 1) % _NUMBERS
            if length > MAX_FRAME_BYTES:
                self.skipped += 1
                self._to_skip = length
                start += _HEADER.size
                continue
            payload = bytes(memoryview(self._buffer)[start + _HEADER.size : end])
            if zlib.crc32(payload) != checksum:
                raise BrokenStreamError(f"frame {number} is damaged")
            frames.append(payload)
            start = end
        del self._buffer[:start]
        return frames


class Connection:
    """The engine's end: receives with or without waiting, sends without ever waiting for a slow reader.

    What the reader does not take at once is kept; `unsent_bytes` tells how much, so that the caller can stop producing.
    Signals wake a waiting `receive` (Python itself would go on waiting after its handler has run).
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._num_sent = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._waker: socket.socket | None = None

    def wake_on_signals(self) -> None:
        """Let each signal that has a Python handler end a waiting `receive`. Main thread only."""
        self._waker, inner = socket.socketpair()
        self._waker.setblocking(False)
        inner.setblocking(False)
        signal.set_wakeup_fd(inner.fileno(), warn_on_full_buffer=False)
        self._inner = inner  # kept alive: the signal module knows the number only
        self._selector.register(self._waker, selectors.EVENT_READ)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the reader has not taken yet."""
        return len(self._unsent)

    def send(self, payload: bytes) -> None:
        """Queue a frame and write as much as the reader takes now. Raises DisconnectedError."""
        self._unsent += frame(payload, self._num_sent)
        self._num_sent += 1
        self._flush()

    def receive(self, timeout_s: float | None) -> list[bytes]:
        """Return the frames that have arrived, after waiting at most `timeout_s` (None: until something happens).

        Writes what is unsent meanwhile. An empty list means that time passed, a signal came, or room to write appeared.
        Raises DisconnectedError when the other side is gone.
        """
        if self._unsent:
            self._flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._sock, events)
        frames: list[bytes] = []
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._waker:
                self._drain_waker()
                continue
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ:
                frames += self._read()
        return frames

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written, at most `timeout_s` a write; tell whether it was. Raises
        DisconnectedError.
        """
        while self._unsent:
            self._selector.modify(self._sock, selectors.EVENT_WRITE)
            if not self._selector.select(timeout_s):
                return False
            self._flush()
        return True

    def close(self) -> None:
        """Close both descriptors; the other side sees the end of the stream."""
        if self._waker is not None:
            signal.set_wakeup_fd(-1)
            self._waker.close()
            self._inner.close()
        self._selector.close()
        self._sock.close()

    def _drain_waker(self) -> None:
        if self._waker is not None:
            with contextlib.suppress(BlockingIOError):
                self._waker.recv(4096)

    def _read(self) -> list[bytes]:
        frames: list[bytes] = []
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return frames
            except ConnectionError as error:
                raise DisconnectedError(str(error)) from error
            if not data:
                if frames:
                    return frames  # handle what came last; the next call sees the end
                raise DisconnectedError("the other side closed the connection")
            frames += self._reader.feed(altered("wire.engine_reads", data))
            if len(data) < _READ_BYTES:
                return frames

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._sock.send(altered("wire.engine_writes", self._unsent))
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise DisconnectedError(str(error)) from error
            del self._unsent[:sent]
