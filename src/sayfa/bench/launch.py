"""Starts a server for a measurement, watches its memory, and ends it.

Called by `cli` and by `benchmarks/peers.py`. The server is any command line; it is ready when it has answered with a
first token. Knows no workload.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sayfa.base.errors import EngineError
from sayfa.bench.client import CompletionClient

WATCH_INTERVAL_S = 1.0
"""Adding up the pages of a large process costs the kernel milliseconds; more often would disturb the measurement."""
END_LIMIT_S = 20.0


def end_politely() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that servers it has started are stopped, too."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def free_port() -> int:
    """A TCP port on loopback that nobody uses at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class LaunchedServer:
    """A server of ours. `peak_bytes`: the most memory its processes held together, as seen once a second.

    Memory is the sum of the proportional shares (PSS), so that pages which several processes share count once.
    """

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str | None] | None = None) -> None:
        """Start it in its own group, its output in the file `log`. environ: variables to set, None to take one away.

        Raises EngineError if it cannot be started.
        """
        self.log = log
        self.peak_bytes = 0
        self._begun_s = time.perf_counter()
        self._over = threading.Event()
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    env={name: value for name, value in {**os.environ, **(environ or {})}.items() if value is not None},
                )  # fmt: skip
        except OSError as error:
            raise EngineError(f"{command[0]} cannot be started: {error.strerror}") from None
        self._watcher = threading.Thread(target=self._watch, name="memory watch", daemon=True)
        self._watcher.start()

    async def ready(self, client: CompletionClient, limit_s: float = 600.0) -> float:
        """Wait for the first token; return the seconds from the command to it. Raises EngineError."""
        last: Exception | None = None
        while time.perf_counter() - self._begun_s < limit_s:
            if self._process.poll() is not None:
                raise EngineError(f"the server ended with exit code {self._process.returncode}:\n{self.last_lines()}")
            try:
                if not client.model:
                    client.model = await client.first_model()
                await asyncio.wait_for(client.complete("Hello", 1), limit_s)
                return time.perf_counter() - self._begun_s
            except (EngineError, OSError) as error:
                last = error
                await asyncio.sleep(0.02)
        raise EngineError(f"the server was not ready after {limit_s:.0f} s: {last}\n{self.last_lines()}")

    def last_lines(self, count: int = 12) -> str:
        """The end of what the server wrote."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-count:])

    def stop(self) -> None:
        """End the server and all that it started in its group."""
        self._over.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(WATCH_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, sum(map(_held_bytes, _family(self._process.pid))))


def _family(pid: int) -> list[int]:
    """The process and all that it started, as the kernel lists them."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _held_bytes(pid: int) -> int:
    """Memory of one process; pages that several share count in parts (PSS). 0 where the kernel does not tell."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
