"""The server's end of the wire: a child process, and its connection inside an event loop.

Called by `wire.process_client` only. The child gets one descriptor and nothing else of ours; its end of the stream
tells that it died before the process can even be waited for.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Protocol, cast

from sayfa.base.faults import altered
from sayfa.base.log import logger
from sayfa.base.settings import environ_for_child
from sayfa.wire.sockets import BrokenStreamError, FrameReader, frame, make_pair
from sayfa.wire.watch import Signs

log = logger("wire")

_USER_TIME = 11
"""Place of utime behind the name in /proc/PID/stat; stime follows it (proc_pid_stat(5), fields 14 and 15)."""


class Child(Protocol):
    """An engine process as its client sees it, whatever carries it."""

    @property
    def pid(self) -> int: ...

    async def attach(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> "Link":
        """Connect to it, once; `received` gets each frame's payload, `lost` is called when it is gone."""
        ...

    def ask_for_state(self) -> None:
        """Let it write its state to its log."""
        ...

    def signs(self) -> Signs | None:
        """Tell what the kernel knows of its work; None where that cannot be told."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    async def end(self, limit_s: float) -> int | None:
        """Wait for it to end by itself, at most `limit_s`, then kill it; return its exit code."""
        ...


class EngineProcess:
    """A child process and our end of the connection to it."""

    def __init__(self, child: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
        self._child = child
        self._sock: socket.socket | None = sock

    @classmethod
    def spawn(cls, command: list[str], first_frame: bytes) -> "EngineProcess":
        """Start `command` with its descriptor's number as the last argument, and send it the first frame.

        Raises OSError if the program cannot be started.
        """
        ours, theirs = make_pair()
        try:
            child = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environ_for_child(os.environ),
                process_group=0,  # Ctrl-C and signals to our group are ours; the engine hears of them from us
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(ConnectionError):  # a child that is gone already shows in `attach`
            ours.sendall(first_frame)
        ours.setblocking(False)
        return cls(child, ours)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask_for_state(self) -> None:
        """Let the process write its stacks and its state to its log (SIGUSR1)."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGUSR1)

    def signs(self) -> Signs | None:
        """Processor time and bytes from storage so far, from /proc; None elsewhere, and once the process is gone."""
        try:
            with open(f"/proc/{self._child.pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            with open(f"/proc/{self._child.pid}/io", encoding="ascii") as file:
                counts = dict(line.split(": ") for line in file.read().splitlines())
            ticks = int(fields[_USER_TIME]) + int(fields[_USER_TIME + 1])
            return Signs(ticks / os.sysconf("SC_CLK_TCK"), int(counts["read_bytes"]))
        except (OSError, ValueError, KeyError, IndexError):
            return None

    def kill(self) -> None:
        """End the process at once; the connection's end tells the rest."""
        self._child.kill()

    async def attach(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> "Link":
        """Put our end under the running event loop; once only."""
        if self._sock is None:
            raise RuntimeError("the socket of this process was taken before")
        sock, self._sock = self._sock, None
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: Link(received, lost), sock=sock)
        return link

    async def end(self, limit_s: float) -> int | None:
        """Wait for the process to end by itself, at most `limit_s`, then kill it; return its exit code."""
        if self._sock is not None:
            self._sock.close()
        if not await self._exited(limit_s):
            self._child.kill()
            await self._exited(limit_s)
        return self._child.returncode

    async def _exited(self, limit_s: float) -> bool:
        if self._child.poll() is not None:
            return True
        loop = asyncio.get_running_loop()
        try:
            watcher = os.pidfd_open(self._child.pid)
        except (AttributeError, OSError):  # not Linux, or gone: ask again and again
            deadline_s = loop.time() + limit_s
            while self._child.poll() is None and loop.time() < deadline_s:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return self._child.poll() is not None
        gone = asyncio.Event()
        loop.add_reader(watcher, gone.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await gone.wait()
        finally:
            loop.remove_reader(watcher)
            os.close(watcher)
        return self._child.poll() is not None


class Link(asyncio.Protocol):
    """Frames in and out on an event loop; `lost` is called once, when the other side is gone."""

    def __init__(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        self._received = received
        self._lost = lost
        self._reader = FrameReader()
        self._num_sent = 1  # `spawn` sent the first
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's, so this cannot be asked with isinstance.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._reader.feed(altered("wire.client_reads", data))
        except BrokenStreamError as error:
            log.error("the connection to the engine process broke and is ended: %s", error)
            self.close()
            return
        for payload in payloads:
            self._received(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, payload: bytes) -> None:
        """Send one frame; silently nothing once the other side is gone (`lost` tells that)."""
        if self._transport is not None and not self._transport.is_closing():
            data = frame(payload, self._num_sent)
            self._num_sent += 1
            self._transport.write(altered("wire.client_writes", data))

    def close(self) -> None:
        """Close the connection; the other side sees the end of the stream."""
        if self._transport is not None:
            self._transport.close()
