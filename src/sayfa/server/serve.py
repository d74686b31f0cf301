"""Run the server: take the address, serve while the engine loads, drain on SIGTERM, end with the right exit code.

Called by `cli`. Order at start: `bind` (a port in use is told at once, while the engine loads), then `run`. Order
at the end: readiness turns 503 and new work is refused at once; the engine refuses what waits and finishes what runs,
up to `shutdown_timeout`; then connections close. A second signal ends everything within two seconds. The listening
socket stays open until the end, so that liveness can be asked for throughout. Knows no engine but its client.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from sayfa.base.access import check_access
from sayfa.base.config import ServerOptions
from sayfa.base.errors import ConfigError, EngineError, SayfaError
from sayfa.base.faults import fault
from sayfa.base.messages import EngineInfo, Failed
from sayfa.server.app import create_app
from sayfa.server.checks import check_options
from sayfa.server.connection import behind
from sayfa.server.context import ServerContext, TextTools
from sayfa.server.gate import Gate, within_descriptors
from sayfa.wire.client import ClientState, EngineClient

log = logging.getLogger("sayfa.server")

FLUSH_LIMIT_S = 2.0
"""How long answers may take to be written after the engine has ended."""
KEEP_ALIVE_S = 75
DEAD_PEER_S = 60
SEND_BUFFER_BYTES = 128 << 10
"""Of each connection; the kernel doubles it."""
SWITCH_INTERVAL_S = 0.001
"""How long the loop waits for the interpreter's lock before the thread that reads a long body must let go."""


class ManagedClient(EngineClient, Protocol):
    """A client whose engine this server starts and ends."""

    async def start(self) -> None: ...

    async def wait_ready(self) -> EngineInfo: ...

    @property
    def failure(self) -> Failed | None: ...

    def on_state(self, callback: Callable[[ClientState], None]) -> None: ...


def bind(options: ServerOptions) -> socket.socket:
    """Take the address. Raises ConfigError if it is in use, not ours, or open to strangers without a key.

    What is served there later and cannot be (TLS files, addresses of proxies) is refused, too.
    """
    check_access(options)
    check_options(options)
    if options.uds:
        return _bind_unix(options.uds)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: of a name that no host can have, as `a..b`
        why = error.strerror if isinstance(error, OSError) else "it is no host name"
        raise ConfigError(f"--host {options.host} is no address of this machine ({why}).") from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit these: what a slow reader can make us hold is bounded, peers that vanished are noticed.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", DEAD_PEER_S), ("TCP_KEEPINTVL", 10), ("TCP_USER_TIMEOUT", DEAD_PEER_S * 1000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"port {options.port} on {options.host} cannot be used ({error.strerror}). Stop what uses it, or choose "
            "another one with --port (0 takes a free one)."
        ) from None
    sock.setblocking(False)
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(f"--uds {path} is there already and is no socket; remove it, or name another path.")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"--uds {path} is in use by another server.")
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        # A path that is too long is refused before the system is asked, whose sentence is missing then.
        reason = error.strerror or f"{error}: {len(os.fsencode(path))} bytes, where Linux takes 107; name a shorter one"
        raise ConfigError(f"--uds {path} cannot be used ({reason}).") from None
    except ConfigError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def _removed_at_end(path: str | None) -> Iterator[None]:
    """Take the file of a Unix socket away behind the block, unless another server has put its own there."""

    def identity() -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            found = os.stat(path or "")
            return found.st_ino, found.st_ctime_ns
        return None

    ours = identity()
    try:
        yield
    finally:
        if path and ours is not None and identity() == ours:
            with contextlib.suppress(OSError):
                os.unlink(path)


def url_of(sock: socket.socket, options: ServerOptions) -> str:
    """The address that a person on this machine can use."""
    if options.uds:
        return f"http+unix://{options.uds}"
    scheme = "https" if options.ssl_certfile else "http"
    host = options.host
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"


def run(  # noqa: PLR0917 - each is needed once, by one caller
    sock: socket.socket,
    client: ManagedClient,
    load_text: Callable[[], TextTools],
    options: ServerOptions,
    names: Sequence[str],
    version: str,
    on_ready: Callable[[EngineInfo], None],
) -> int:
    """Serve until a signal or until the engine cannot be had; return the process's exit code.

    load_text: loads tokenizer and template, in a thread. on_ready: called once, when the first request can be served.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()) as runner:
        serving = serve(sock, client, load_text, options=options, names=names, version=version, on_ready=on_ready)
        return runner.run(serving)


async def serve(
    sock: socket.socket,
    client: ManagedClient,
    load_text: Callable[[], TextTools],
    *,
    options: ServerOptions,
    names: Sequence[str],
    version: str,
    on_ready: Callable[[EngineInfo], None],
) -> int:
    """As `run`, inside an event loop."""
    app = create_app(client, None, options, names, version)
    context: ServerContext = app.state.context
    server = make_server(app, options)
    ending = Ending(server, client, context)
    client.on_state(ending.engine_changed)
    await client.start()
    with ending.signals(), _removed_at_end(options.uds):
        serving = asyncio.create_task(server.serve([sock]))
        loading = asyncio.create_task(_load(client, context, load_text, on_ready, ending))
        await serving
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    await client.close()
    return ending.exit_code


async def _load(
    client: ManagedClient,
    context: ServerContext,
    load_text: Callable[[], TextTools],
    on_ready: Callable[[EngineInfo], None],
    ending: "Ending",
) -> None:
    """Load the text side beside the engine; end the server if either cannot be had."""
    try:
        fault("server.load_text")
        context.text = await asyncio.to_thread(load_text)
        info = await client.wait_ready()
    except EngineError:
        ending.engine_failed()
        return
    except SayfaError as error:
        ending.fail(2, str(error))
        return
    except Exception:
        log.exception("the tokenizer could not be loaded")
        ending.fail(1)
        return
    # What was loaded lives as long as the process: the collector need not walk over it while tokens stream.
    gc.collect()
    gc.freeze()
    on_ready(info)


def make_server(app: FastAPI, options: ServerOptions) -> "_Server":
    """The HTTP server around an application, with our bounds on connections and without its own signals."""
    context: ServerContext = app.state.context
    gate = Gate(
        within_descriptors(options.max_connections), options.max_connections_per_address, options.trusted_proxies,
        context.metrics.connection_refused,
    )  # fmt: skip
    config = uvicorn.Config(
        app, http=behind(gate, context.refusals), ws="none", lifespan="on", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, root_path=options.root_path, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(FLUSH_LIMIT_S), ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )  # fmt: skip
    return _Server(config)


class _Server(uvicorn.Server):
    """uvicorn without its own signals: it would end at once, and with exit code 143."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Ending:
    """How and why this server ends. `exit_code`: 0 after a signal, else what made it end.

    Invariant: the drain starts at most once.
    """

    def __init__(self, server: uvicorn.Server, client: ManagedClient, context: ServerContext) -> None:
        self.exit_code = 0
        self._server = server
        self._client = client
        self._context = context
        self._drain: asyncio.Task[None] | None = None
        self._died_s: float | None = None
        self._seen_ready = False
        self._told = ""

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while serving."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.asked)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def asked(self) -> None:
        """A signal came: drain; the second time end at once."""
        if self._drain is None:
            log.info("shutting down: running requests get %.0f s", self._context.options.shutdown_timeout)
            self._context.draining = True
            self._drain = asyncio.create_task(self._drained())
        else:
            log.warning("shutting down at once")
            self._drain.cancel()
            self._drain = asyncio.create_task(self._now())

    async def _drained(self) -> None:
        try:
            fault("server.drain")
            await self._client.drain(self._context.options.shutdown_timeout)
        except Exception:  # a server that was asked to end does end
            log.exception("the engine could not be drained")
        await self._now()

    async def _now(self) -> None:
        await self._client.close()  # open streams end with an error event
        self._server.should_exit = True

    def engine_changed(self, state: ClientState) -> None:
        """Keep the metrics true, and end when the engine is gone for good."""
        metrics, info = self._context.metrics, self._client.info
        now_s = self._context.clock.monotonic()
        metrics.engine_state(state, restarted=state == "starting" and self._died_s is not None)
        if state == "dead" and self._died_s is None:
            self._died_s = now_s
        if state == "ready" and info is not None:
            if self._died_s is not None and self._seen_ready:  # the first time the report of the start tells it
                log.info("the engine serves again, %.1f s after it ended", now_s - self._died_s)
            self._died_s, self._seen_ready = None, True
            metrics.engine_ready(info)
            self._context.trust.forget_all()
        if state == "failed":
            self.engine_failed()

    def engine_failed(self) -> None:
        """End because no engine can be had."""
        if self._drain is not None:
            return
        failure = self._client.failure
        self.exit_code = failure.exit_code if failure is not None else 1
        if failure is not None:
            self._tell(failure.message)
        self._stop()

    def fail(self, exit_code: int, why: str | None = None) -> None:
        """End because the text side cannot be had."""
        self.exit_code = exit_code
        if why is not None:
            self._tell(why)
        self._stop()

    def _tell(self, why: str) -> None:
        """Say it once, though engine and text side may both find the same fault of a file."""
        if why != self._told:
            log.error("%s", why)
        self._told = why

    def _stop(self) -> None:
        self._context.draining = True
        self._server.should_exit = True
