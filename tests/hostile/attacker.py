"""An attacker's end of HTTP: starts the scripted server, sends any bytes, and judges what came back."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

HANG_LIMIT_S = 60.0
"""A hang lasts for ever; a machine that is busy, or that stops both ends, takes its time."""
KEY = "sk-canary-0f1e2d3c4b5a69788796a5b4c3d2e1f0"
WRONG_KEY = "sk-wrong-00112233445566778899aabbccddeeff"
LEAKS = re.compile(
    rb"/(?:usr|home|work|tmp|src|opt|proc|etc|root|var)/|0x[0-9a-fA-F]{4}|Traceback|sayfa[._]|site-packages|\.py\b|pydantic"
    rb"|starlette|fastapi|uvicorn|httptools|msgspec|[a-z]Error\b|[a-z]Exception\b|object at|line \d+, in|127\.0\.0\.1"
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What a request that expects it is told before its answer."""
_STATUSES = {200, 204, 400, 401, 403, 404, 405, 408, 413, 414, 415, 431, 503}


class Server(NamedTuple):
    """A running scripted server. `log`: the file that holds what it wrote."""

    port: int
    process: psutil.Popen
    log: Path

    @property
    def anon_bytes(self) -> int:
        """Memory of its own: RssAnon and what of it was swapped out."""
        found = re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return sum(map(int, found)) << 10


def _wait_for_end(process: psutil.Popen, log: Path) -> None:
    """It ends with 0 in time; where it does not, its stacks are in the failure."""
    try:
        code = process.wait(HANG_LIMIT_S)
    except psutil.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # for the stacks to be written
        code = None
    assert code == 0, log.read_text()[-5000:]


@contextmanager
def scripted_server(folder: Path, key: str = KEY, **options: Any) -> Iterator[Server]:
    """Start it on a free loopback port; end it as a user does, and check that it ends well."""
    log = folder / "server.log"
    command = [sys.executable, str(Path(__file__).with_name("scripted_server.py")), key]
    command += [f"{name}={json.dumps(value)}" for name, value in options.items()]
    tests = Path(__file__).parents[1]
    places = [str(tests), str(tests / "http"), os.environ.get("PYTHONPATH") or str(tests.parent / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    with log.open("wb") as errors:
        process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        yield Server(int(line), process, log)
        assert process.poll() is None, "the server ended: " + log.read_text()[-2000:]
        process.send_signal(signal.SIGTERM)
        _wait_for_end(process, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def cpu_s(server: Server) -> float:
    """CPU seconds of all its threads, to the nanosecond."""
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def request(method: str, path: str, body: Any = None, key: str = KEY, close: bool = True, **headers: str) -> bytes:
    """The bytes of a well-made request; `chunked` as a header cuts the body in two."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"]
    lines += [f"authorization: Bearer {key}"] if key else []
    lines += ["connection: close"] if close else []
    chunked = headers.pop("chunked", None)
    content = b"" if body is None else json.dumps(body).encode()
    if body is not None:
        lines.append("content-type: application/json")
        lines.append("transfer-encoding: chunked" if chunked else f"content-length: {len(content)}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if chunked:
        middle = len(content) // 2
        content = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:middle], content[middle:], b""))
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def exchange(
    port: int, pieces: list[bytes], patience_s: float = 0.1, hang_limit_s: float = HANG_LIMIT_S
) -> bytes:
    """Send the pieces and give all that comes back. Fails if the server neither answers nor closes."""
    async with asyncio.timeout(hang_limit_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received = bytearray()
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            reading = asyncio.ensure_future(_read_all(reader, received))
            await asyncio.wait({reading}, timeout=patience_s)
            if not reading.done() and not writer.is_closing() and writer.can_write_eof():
                writer.write_eof()  # a request that is not complete: the server must not wait for us
            await reading
        except ConnectionError:
            pass
        finally:
            writer.close()
    return bytes(received)


async def _read_all(reader: asyncio.StreamReader, received: bytearray) -> None:
    try:
        while data := await reader.read(65536):
            received += data
    except ConnectionError:
        pass


def statuses(received: bytes) -> list[int]:
    """The status of each answer in a connection's bytes."""
    return [int(found) for found in re.findall(rb"(?:^|\n|\}|\r\n0\r\n\r\n)HTTP/1\.1 (\d{3}) ", received)]


def judge(received: bytes, sent: bytes) -> None:
    """Fail for an unknown status, a 5xx that is no armed 503, and text about ourselves in an error's body."""
    received = received.replace(CONTINUE, b"")
    for number, status in enumerate(statuses(received)):
        assert status in _STATUSES, (status, sent[:600], received[:600])
        if status == 503:
            assert b"retry-after: " in received, (sent[:600], received[:600])
        if status >= 400 and number == 0:
            body = received.partition(b"\r\n\r\n")[2]
            leak = LEAKS.search(body)
            assert leak is None or leak[0] in sent, (leak, body[:600])
            assert KEY.encode() not in body, body[:600]
