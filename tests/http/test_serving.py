"""Laws of the server's life: the address is taken first, work drains on SIGTERM, the exit code is right.

R08, T19; issue of exit codes: 0 after a clean stop, the engine's own code when it cannot be had.
"""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from http_support import MODEL, SayingEngine, chat_body, ids_of, text_tools, until

from sayfa.base.access import check_access
from sayfa.base.config import ServerOptions
from sayfa.base.errors import ConfigError, EngineDead, ModelError
from sayfa.base.messages import EngineInfo, Failed
from sayfa.server.serve import bind, serve, url_of
from sayfa.wire.client import ClientState


class ManagedEngine(SayingEngine):
    """A fake engine with a life of its own: starts, drains, fails."""

    failure: Failed | None = None
    started = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watchers: list[Callable[[ClientState], None]] = []
        self.ready = asyncio.Event()
        self.ready.set()

    async def start(self) -> None:
        self.started = True

    async def wait_ready(self) -> EngineInfo:
        await self.ready.wait()
        if self.failure is not None or self.info is None:
            raise EngineDead(self.failure.message if self.failure else "closed")
        return self.info

    def on_state(self, callback: Callable[[ClientState], None]) -> None:
        self.watchers.append(callback)

    def fail(self, failure: Failed) -> None:
        self.failure, self.state = failure, "failed"
        self.ready.set()
        for watcher in self.watchers:
            watcher("failed")


class Life:
    """A running server: its port, its engine, and its end."""

    def __init__(self, engine: ManagedEngine, port: int, task: "asyncio.Task[int]") -> None:
        self.engine = engine
        self.port = port
        self.task = task
        self.ready = asyncio.Event()

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """One request on a connection of its own; status and body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        content = json.dumps(body).encode() if body is not None else b""
        method = "POST" if body is not None else "GET"
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]


@asynccontextmanager
async def living(engine: ManagedEngine, load: Callable[[], Any] = text_tools, **options: Any) -> AsyncIterator[Life]:
    settings = ServerOptions(port=0, **options)
    sock = bind(settings)
    port = 0 if settings.uds else sock.getsockname()[1]
    ready = asyncio.Event()
    task = asyncio.create_task(
        serve(sock, engine, load, options=settings, names=[MODEL], version="0", on_ready=lambda info: ready.set())
    )
    life = Life(engine, port, task)
    life.ready = ready
    try:
        yield life
    finally:
        engine.hold.set()
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 10)


async def test_requests_wait_politely_while_the_model_loads() -> None:
    """Liveness is 200 at once; readiness and work are 503 with Retry-After until engine and tokenizer are there."""
    engine = ManagedEngine()
    engine.state = "starting"
    engine.ready.clear()
    async with living(engine) as life:
        await until(lambda: engine.started)
        assert (await life.ask("/health/live"))[0] == 200
        assert (await life.ask("/health/ready"))[0] == 503
        assert (await life.ask("/v1/chat/completions", chat_body()))[0] == 503
        assert not life.ready.is_set()
        engine.state = "ready"
        engine.ready.set()
        await asyncio.wait_for(life.ready.wait(), 5)
        assert (await life.ask("/health/ready"))[0] == 200
        assert (await life.ask("/v1/chat/completions", chat_body()))[0] == 200


async def test_r08_sigterm_drains_running_requests_and_ends_with_0() -> None:
    """R08: readiness turns 503, new work is refused, liveness stays 200, what runs is finished, exit code 0."""
    engine = ManagedEngine(lambda request, branch: ids_of("Hello world and the END"))
    engine.hold.clear()
    async with living(engine) as life:
        await asyncio.wait_for(life.ready.wait(), 5)
        plain = asyncio.create_task(life.ask("/v1/chat/completions", chat_body()))
        streamed = asyncio.create_task(life.ask("/v1/chat/completions", chat_body(stream=True)))
        await until(lambda: len(engine.requests) == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: engine.drained == 30.0)
        assert (await life.ask("/health/ready"))[0] == 503
        assert (await life.ask("/health/live"))[0] == 200
        status, body = await life.ask("/v1/chat/completions", chat_body())
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        engine.hold.set()
        assert json.loads((await plain)[1])["choices"][0]["message"]["content"] == "Hello world and the END"
        assert b"[DONE]" in (await streamed)[1]
        assert b"error" not in (await streamed)[1]
        assert await asyncio.wait_for(life.task, 5) == 0
    assert engine.closed


async def test_r08_a_second_signal_ends_everything_within_two_seconds() -> None:
    """R08: streams that still run end with one error event; the exit code stays 0."""
    engine = ManagedEngine(lambda request, branch: ids_of("Hello " * 30))
    engine.hold.clear()
    async with living(engine) as life:
        await asyncio.wait_for(life.ready.wait(), 5)
        streamed = asyncio.create_task(life.ask("/v1/chat/completions", chat_body(stream=True)))
        await until(lambda: len(engine.requests) == 1)
        await asyncio.sleep(1.1)  # until the status line is out
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: engine.drained is not None)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(2.5):
            assert await life.task == 0
        status, body = await streamed
        assert status == 200
        assert body.count(b'data: {"error"') == 1


async def test_an_engine_that_cannot_start_ends_the_server_with_its_code() -> None:
    """The engine's own exit code and sentence."""
    engine = ManagedEngine()
    engine.state = "starting"
    engine.ready.clear()
    async with living(engine) as life:
        await until(lambda: engine.started and bool(engine.watchers))
        engine.fail(Failed("the file is damaged", exit_code=2))
        assert await asyncio.wait_for(life.task, 5) == 2


async def test_a_model_without_a_tokenizer_ends_the_server_with_2() -> None:
    """Before anything could be served."""

    def load() -> Any:
        raise ModelError("the folder has no tokenizer.json")

    async with living(ManagedEngine(), load) as life:
        assert await asyncio.wait_for(life.task, 5) == 2


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    """One sentence with the port and the way out."""
    first = bind(ServerOptions(port=0))
    try:
        with pytest.raises(ConfigError, match=r"port \d+ .* --port"):
            bind(ServerOptions(port=first.getsockname()[1]))
    finally:
        first.close()
    with pytest.raises(ConfigError, match="no address of this machine"):
        bind(ServerOptions(host="no.such.host.invalid", api_key=["x"]))
    for host in ("a..b", "a" * 300):
        with pytest.raises(ConfigError, match="no host name"):
            bind(ServerOptions(host=host, api_key=["x"]))


def test_t19_strangers_need_a_key() -> None:
    """Another address than loopback without a key needs the explicit flag."""
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.com", "127.example.com"):
        with pytest.raises(ConfigError, match="--insecure-no-auth"):
            check_access(ServerOptions(host=host))
        check_access(ServerOptions(host=host, api_key=["k"]))
        check_access(ServerOptions(host=host, insecure_no_auth=True))
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1"):
        check_access(ServerOptions(host=host))


def test_a_unix_socket_is_private_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    """Mode 0600; a dead server's socket file is taken over, a live one is refused, another file is left alone."""
    path = tmp_path / "s"
    first = bind(ServerOptions(uds=str(path)))
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="in use"):
        bind(ServerOptions(uds=str(path)))
    first.close()
    bind(ServerOptions(uds=str(path))).close()
    with pytest.raises(ConfigError, match=r"too long.*name a shorter one"):
        bind(ServerOptions(uds=str(tmp_path / ("s" * 120))))
    other = tmp_path / "file"
    other.write_text("keep me")
    with pytest.raises(ConfigError, match="is there already and is no socket; remove it"):
        bind(ServerOptions(uds=str(other)))
    assert other.read_text() == "keep me"


def test_a_socket_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "no" / "s", "No such file"),
        (tmp_path / ("a" * 200), "too long.*107; name a short"),
    ):
        with pytest.raises(ConfigError, match=f"--uds {path} cannot be used .*{words}"):
            bind(ServerOptions(uds=str(path)))


def test_the_url_is_one_that_works_here() -> None:
    """An address for any is shown as one that can be typed."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert url_of(sock, ServerOptions()) == f"http://127.0.0.1:{port}"
        assert url_of(sock, ServerOptions(host="0.0.0.0")) == f"http://127.0.0.1:{port}"
        assert url_of(sock, ServerOptions(host="::1", ssl_certfile="x")) == f"https://[::1]:{port}"


@pytest.mark.parametrize("taken", [False, True])
async def test_the_file_of_a_unix_socket_is_gone_after_a_stop_and_another_server_s_stays(
    tmp_path: Path, taken: bool
) -> None:
    path = tmp_path / "s"
    async with living(ManagedEngine(), uds=str(path)) as life:
        await asyncio.wait_for(life.ready.wait(), 5)
        if taken:
            path.unlink()
            path.write_text("another's")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(life.task, 5) == 0
    assert path.exists() == taken
