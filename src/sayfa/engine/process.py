"""The engine process: load, say hello, then drain the inbox, step, send; until drained, told to end, or orphaned.

Started by `wire.process_client` as `python -m sayfa.engine FD`; the first frame on that descriptor is the
EngineConfig as JSON, later ones are `base.messages`. One thread, one loop, no asyncio. Must not know HTTP, text or
users.

Exit codes: 0 ended as asked or the parent is gone; 1 the engine failed while serving; 2 it cannot start (settings,
model).
"""

import ctypes
import faulthandler
import gc
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec
import setproctitle

from sayfa.base.clock import Clock, SystemClock
from sayfa.base.config import EngineConfig
from sayfa.base.errors import ConfigError, ModelError, RequestError
from sayfa.base.faults import fault
from sayfa.base.log import keep_standard_descriptors, logger
from sayfa.base.log import setup as set_up_log
from sayfa.base.messages import (
    Abort,
    Add,
    Drain,
    EngineInfo,
    Failed,
    FromEngine,
    Hello,
    Outputs,
    Pause,
    Ping,
    Pong,
    Refused,
    Request,
    ResetCache,
    Starting,
    ToEngine,
)
from sayfa.wire.codec import MalformedMessageError, decode_to_engine, encode, encode_in_parts
from sayfa.wire.sockets import Connection, DisconnectedError

log = logger("engine")

CONFIG_WAIT_S = 10.0
MAX_UNSENT_BYTES = 64 << 20
"""Output that the parent has not read; above this no step is made until it reads again."""
SIGNAL_DRAIN_S = 30.0
"""How long running requests get after SIGTERM, when no Drain message said otherwise."""

_PR_SET_PDEATHSIG = 1

Progress = Callable[[str, float], None]


class ServingEngine(Protocol):
    """What the loop needs of `engine.engine.Engine`."""

    @property
    def has_work(self) -> bool: ...
    @property
    def has_requests(self) -> bool: ...
    @property
    def info(self) -> EngineInfo: ...
    def add(self, request: Request) -> None: ...
    def abort(self, ids: list[str], branches: list[int] | None = None) -> None: ...
    def pause(self, ids: list[str], on: bool) -> None: ...
    def step(self, tell: Callable[[Outputs], None]) -> Outputs: ...
    def refuse_waiting(self) -> list[Refused]: ...
    def end_all(self, reason: str) -> Outputs: ...
    def idle(self) -> bool: ...
    def reset_cache(self) -> None: ...
    def pong(self, number: int) -> Pong: ...
    def describe(self) -> str: ...
    def audit(self) -> None: ...


class EngineLoop:
    """The busy loop of a loaded engine; parks on the connection when there is nothing to do."""

    def __init__(self, engine: ServingEngine, connection: Connection, clock: Clock) -> None:
        self._engine = engine
        self._connection = connection
        self._clock = clock
        self._drain_until_s: float | None = None
        self._signals = 0
        self._may_idle = True

    def run(self) -> None:
        """Serve until drained. Raises DisconnectedError when the parent is gone."""
        while self.turn():
            pass
        self._connection.flush(1.0)

    def turn(self) -> bool:
        """Go round once: messages, then a step if there is work, or some idle work; False when it is time to end."""
        if self._finished():
            self._take_messages(0.0)  # who sent a request while the end came is told that it was not taken
            return False
        self._take_messages(self._wait_s())
        if self._can_step():
            self._send(self._engine.step(self._send))
        elif self._may_idle:
            self._may_idle = self._engine.idle()
        return True

    def _can_step(self) -> bool:
        return self._engine.has_work and self._connection.unsent_bytes <= MAX_UNSENT_BYTES

    def on_signal(self, number: int, frame: Any) -> None:
        """Handle SIGTERM: the first drains, the second ends what runs at once. Only notes it; the loop acts."""
        self._signals += 1

    def on_dump(self, number: int, frame: Any) -> None:
        """Handle SIGUSR1, by which the parent asks why nothing moves: log what the engine holds."""
        log.warning("asked for its state, the engine says: %s", self._engine.describe())

    def _finished(self) -> bool:
        """Tell whether the loop should end; act on signals and on a drain whose time is up."""
        if self._signals and self._drain_until_s is None:
            self._start_draining(SIGNAL_DRAIN_S)
        if self._drain_until_s is None:
            return False
        fault("process.while_draining")
        if self._engine.has_requests and (self._signals > 1 or self._clock.monotonic() >= self._drain_until_s):
            self._send(self._engine.end_all("the server shut down before the answer was complete"))
            return True
        return not self._engine.has_requests

    def _start_draining(self, limit_s: float) -> None:
        until_s = self._clock.monotonic() + limit_s
        if self._drain_until_s is not None:
            self._drain_until_s = min(self._drain_until_s, until_s)
            return
        self._drain_until_s = until_s
        for refused in self._engine.refuse_waiting():
            self._send(refused)

    def _wait_s(self) -> float | None:
        """Say how long `receive` may wait: not at all with work of any kind, until the drain's end, or for ever."""
        if self._can_step() or self._may_idle:
            return 0.0
        if self._drain_until_s is not None:
            return max(0.0, self._drain_until_s - self._clock.monotonic())
        return None

    def _take_messages(self, wait_s: float | None) -> None:
        for payload in self._connection.receive(wait_s):
            fault("process.decode")
            try:
                message = decode_to_engine(payload)
            except MalformedMessageError as error:
                log.error("a message that cannot be read was dropped: %s", error)
                if error.request_id is not None:
                    self._send(Refused(id=error.request_id, kind="invalid", message="the request could not be read"))
                continue
            fault("process.before_handle")
            self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Add(request=request):
                self._add(request)
            case Abort(ids=ids, branches=branches):
                self._engine.abort(ids, branches)
            case Pause(ids=ids, on=on):
                self._engine.pause(ids, on)
            case Ping(number=number):
                self._send(self._engine.pong(number))
            case Drain(limit_s=limit_s):
                self._start_draining(limit_s)
            case ResetCache():
                self._engine.reset_cache()

    def _add(self, request: Request) -> None:
        if self._drain_until_s is not None:
            sentence = "the server is shutting down; send the request to another one"
            self._send(Refused(id=request.id, kind="draining", message=sentence, retry_after_s=5))
            return
        try:
            self._engine.add(request)
        except RequestError as error:
            self._send(refusal(request.id, error))
        except Exception:  # the border of a request: its failure is its own, unless it left something half done
            log.exception("request %s could not be taken", request.id)
            self._engine.abort([request.id])
            self._engine.audit()
            sentence = "the request failed in the engine"
            self._send(Refused(id=request.id, kind="overloaded", message=sentence, code="engine_error"))

    def _send(self, message: FromEngine) -> None:
        fault("process.encode")
        payloads = list(encode_in_parts(message))
        fault("process.before_send")
        for payload in payloads:
            self._connection.send(payload)


_KINDS: dict[int, Literal["overloaded", "limited"]] = {429: "limited", 503: "overloaded"}


def refusal(request_id: str, error: RequestError) -> Refused:
    """Turn the error of `Engine.add` into the message that makes the client raise it again."""
    return Refused(
        id=request_id,
        kind=_KINDS.get(error.status, "invalid"),
        message=error.message,
        param=error.param,
        code=error.code,
        retry_after_s=error.retry_after_s,
    )


# --------------------------------------------------------------------------------------------------- start


Build = Callable[[EngineConfig, Progress], ServingEngine]


def serve(sock: socket.socket, build: Build, clock: Clock) -> int:
    """Read the settings from `sock`, build the engine, serve it; return the exit code."""
    connection = Connection(sock)
    try:
        return _serve(connection, build, clock)
    except DisconnectedError:
        return 0  # the parent is gone: nobody is left to serve
    finally:
        connection.close()


def _serve(connection: Connection, build: Build, clock: Clock) -> int:
    try:
        config = msgspec.json.decode(_first_frame(connection), type=EngineConfig)
        set_up_log(config.log_level, config.log_format)
        fault("process.before_build")
        engine = build(config, lambda phase, done: connection.send(encode(Starting(phase, done))))
    except (ConfigError, ModelError, msgspec.MsgspecError) as error:
        return _fail(connection, str(error))
    except MemoryError:
        return _fail(connection, "there is not enough memory to load this model")
    except DisconnectedError:
        raise
    except Exception as error:
        log.exception("the engine cannot start")
        return _fail(connection, f"the engine cannot start: {type(error).__name__}: {error}", exit_code=1)
    loop = EngineLoop(engine, connection, clock)
    connection.wake_on_signals()
    signal.signal(signal.SIGTERM, loop.on_signal)
    faulthandler.unregister(signal.SIGUSR1)  # it would not see that there is another handler now
    signal.signal(signal.SIGUSR1, loop.on_dump)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)  # shows the stacks even inside a kernel
    gc.collect()
    gc.freeze()  # what was loaded lives as long as the process; no collection needs to look at it again
    fault("process.before_hello")
    connection.send(encode(Hello(engine.info)))
    try:
        loop.run()
    except DisconnectedError:
        raise
    except Exception:
        log.exception("the engine failed while serving")
        return 1
    return 0


def _first_frame(connection: Connection) -> bytes:
    frames: list[bytes] = []
    while not frames:
        frames = connection.receive(CONFIG_WAIT_S)
        if not frames:
            raise ConfigError(f"no settings came within {CONFIG_WAIT_S:.0f} s; `sayfa serve` starts this program")
    return frames[0]


def _fail(connection: Connection, sentence: str, exit_code: int = 2) -> int:
    connection.send(encode(Failed(sentence, exit_code)))
    connection.flush(1.0)
    return exit_code


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, however that happens.

    The end of the connection tells the same everywhere, but only between steps; this works within one, on Linux.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("PR_SET_PDEATHSIG failed (errno %d); relying on the socket", ctypes.get_errno())


def _option(arguments: list[str], name: str, default: str) -> str:
    return arguments[arguments.index(name) + 1] if name in arguments else default


def run(arguments: list[str], build: Build) -> int:
    """Set this process up as an engine on the descriptor named by the last argument, and serve; return the exit code.

    Before it may stand `--log-level` and `--log-format`, each with a value, as the server has them.
    """
    keep_standard_descriptors()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's matter
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where a load hangs
    set_up_log(_option(arguments, "--log-level", "info"), _option(arguments, "--log-format", "text"))
    setproctitle.setproctitle("sayfa: engine")
    sock = socket.socket(fileno=int(arguments[-1]))
    sock.set_inheritable(False)
    return serve(sock, build, SystemClock())
