"""An engine process inside the world: the real engine loop, engine and scheduler over a runner without a model.

Takes the place of `wire.link.EngineProcess` and of the socket pair; used by `world.play`. Bytes travel in time, may be
cut anywhere, and stop at any byte when the process dies. The process has a clock of its own, with another origin than
the client's: only differences may ever be used. While a step is computed only that clock runs on; the world catches
up before the next turn.

Checked after each turn: the audit of the deciding wing, that something moves as long as something waits, that an
engine without work holds no page and no row, that nobody is worked for whose client has gone, that no page goes from
one tenant to another.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from fakes.client import make_info
from fakes.runner import Rule
from sayfa.base.messages import EngineInfo, Hello, Starting
from sayfa.core.kv_cache import KvCache
from sayfa.core.limits import Limits
from sayfa.core.page_pool import PagePool
from sayfa.core.policy import FairPolicy, Policy, PriorityPolicy
from sayfa.core.scheduler import Scheduler
from sayfa.core.sequence import Sequence
from sayfa.engine.engine import Engine
from sayfa.engine.process import EngineLoop
from sayfa.wire.codec import encode
from sayfa.wire.link import Link
from sayfa.wire.sockets import DisconnectedError
from sayfa.wire.watch import Signs
from world.history import NUM_TOKENS, Call, Setting
from world.loop import VirtualClock
from world.pipes import EngineEnd, Pipe
from world.runner import PAGE_SIZE, DeathError, EngineClock, SpoiledRunner
from world.seen import Seen

MAX_IDLE_STEPS = 64
"""F25: so many steps without any progress while something waits are a standstill."""
MAX_LATE_TURNS = 2
KILLED = -9
STARTS = ("well", "dies", "hangs", "slow")
SLOW_PARTS, SLOW_PART_S = 4, 100.0
"""A slow load: now it tells of a phase, now only the disk tells that it reads."""


class ClientTransport(asyncio.Transport):
    """The client's end of the connection, under the real `Link`."""

    def __init__(self, process: "WorldProcess") -> None:
        super().__init__()
        self._process = process
        self._closing = False

    def write(self, data: Any) -> None:
        self._process.to_engine.write(bytes(data))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._process.client_closed()


class WorldProcess:
    """One engine process. start: what becomes of its load, one of STARTS."""

    def __init__(self, host: "Host", pid: int, start: str) -> None:
        setting = host.setting
        loop = asyncio.get_running_loop()
        self.pid = pid
        self.exit_code: int | None = None
        self.engine: Engine | None = None
        self.runner: SpoiledRunner | None = None
        self.frozen_until_s = 0.0
        self._host = host
        self.start = start
        self.loading = True
        self.num_forced = 0
        self._read_bytes = 0
        self._clock = EngineClock(host.clock, host.rnd.choice([-4_000.0, 0.0, 1e6]))
        self._link: Link | None = None
        self._early: list[bytes] = []
        self._to_client = Pipe(loop, host.rnd, setting, self._deliver)
        self._connection = EngineEnd(self._to_client, self._clock)
        self.to_engine = Pipe(loop, host.rnd, setting, self._connection.take)
        self._exited = asyncio.Event()
        self._idle_steps = 0
        self._begun = False
        self._owners: dict[bytes, str] = {}
        self._late: dict[tuple[str, int], int] = {}
        self._loop: EngineLoop | None = None
        self.task = asyncio.ensure_future(self._live())

    # ------------------------------------------------------------------------------- as the client sees it

    async def attach(self, received: Callable[[bytes], None], lost: Callable[[], None]) -> Link:
        self._link = Link(received, lost)
        self._link.connection_made(ClientTransport(self))
        for data in self._early:
            self._deliver(data)
        return self._link

    def ask_for_state(self) -> None:
        if self._loop is not None:
            self._loop.on_dump(10, None)

    def signs(self) -> Signs:
        return Signs(0.0, self._read_bytes)

    def kill(self) -> None:
        """What the client does to an engine that does not get on."""
        if self.loading and self.start != "hangs":
            self._host.broken.append("an engine was ended though its load got on")
        self.die()

    def die(self) -> None:
        """What anybody may do, at any time."""
        self.task.cancel()
        if not self._begun:  # then the task will never run
            self._finish(KILLED)

    def sigterm(self) -> None:
        if self._loop is not None:
            self._loop.on_signal(15, None)
            self._connection.woken.set()

    async def end(self, limit_s: float) -> int | None:
        try:
            async with asyncio.timeout(limit_s):
                await self._exited.wait()
        except TimeoutError:
            self.die()
            await self._exited.wait()
        return self.exit_code

    def garble(self) -> None:
        """Let the next message that holds outputs be one that nobody can read."""
        self._connection.garbles = True

    def slow_down(self, seconds: float) -> None:
        self._to_client.extra_s = self.to_engine.extra_s = seconds

    def client_closed(self) -> None:
        self.to_engine.close(self._connection.end)
        link, self._link = self._link, None
        if link is not None:
            asyncio.get_running_loop().call_soon(link.connection_lost, None)

    # ------------------------------------------------------------------------------- its life

    async def _live(self) -> None:
        code = KILLED
        self._begun = True
        try:
            code = await self._run()
        except DisconnectedError:
            code = 0
        except asyncio.CancelledError:
            pass
        except DeathError:
            pass
        finally:
            self._finish(code)

    def _finish(self, code: int) -> None:
        self.exit_code = code
        self._exited.set()
        self._host.note_death(self)
        self._to_client.close(self._end_of_stream)
        self._host.died(self)

    async def _run(self) -> int:
        host = self._host
        await asyncio.sleep(host.setting.start_s)
        await self._load()
        self.engine = self._build()
        self._connection.send(encode(Hello(self.engine.info)))
        self.loading = False
        self._host.seen.note("a slow load", self.start == "slow")
        self._loop = EngineLoop(self.engine, self._connection, self._clock)  # type: ignore[arg-type]
        try:
            while await self._turn(self._loop, self.engine):
                pass
        except (DisconnectedError, AssertionError):
            raise
        except Exception as error:
            if "armed" not in repr(error) and "steps in a row failed" not in repr(error):
                host.broken.append(f"the engine ended by {error!r}")
            return 1
        return 0

    async def _load(self) -> None:
        self._connection.send(encode(Starting("read", 0.0)))
        if self.start == "dies":
            raise DeathError
        if self.start == "hangs":
            await asyncio.Event().wait()
        if self.start == "slow":
            for part in range(SLOW_PARTS):
                await asyncio.sleep(SLOW_PART_S)
                if part % 2:
                    self._read_bytes += 4096
                else:
                    self._connection.send(encode(Starting("read", (part + 1) / SLOW_PARTS)))

    def _build(self) -> Engine:
        setting, rnd = self._host.setting, self._host.rnd
        limits = Limits(
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_model_len=setting.max_model_len,
            max_queued_requests=setting.max_queued_requests,
            share_queue=setting.policy == "fair",
        )
        cache = KvCache(PagePool(setting.num_pages), PAGE_SIZE, caching=setting.caching)
        self.runner = SpoiledRunner(setting.num_pages, self._host.rule, self._clock, setting, self._host.calls)
        scheduler = Scheduler(limits, make_policy(setting.policy), cache)
        return Engine(scheduler, self.runner, engine_info(setting, self.pid), self._clock, random.Random(rnd.random()))

    async def _turn(self, loop: EngineLoop, engine: Engine) -> bool:
        clock, connection = self._clock, self._connection
        if clock.ahead_s:
            await asyncio.sleep(clock.ahead_s)
            clock.ahead_s = 0.0
        elif not engine.has_work and not connection.has_news:
            wait_s = loop._wait_s()
            await self._wait_for_news(wait_s)
        else:
            await asyncio.sleep(0)
        now_s = asyncio.get_running_loop().time()
        if self.frozen_until_s > now_s:
            await asyncio.sleep(self.frozen_until_s - now_s)
        try:
            goes_on = loop.turn()
        finally:
            self._check(engine)
        self._host.after_turn()
        return goes_on

    async def _wait_for_news(self, wait_s: float | None) -> None:
        await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._connection.woken.wait()

    def _check(self, engine: Engine) -> None:
        scheduler = engine._scheduler
        if scheduler._plan is not None:
            return  # a fault ended the process in the middle of a step; nobody will ever see this state
        engine.audit()
        self._host.turns += 1
        self._host.seen.note_turn(scheduler, self.num_forced)
        roster = scheduler._roster
        limit = self._host.setting.max_queued_requests
        assert roster.waiting.num_new <= limit, f"{roster.waiting.num_new} requests wait, the limit is {limit}"
        if not engine.has_requests:
            assert scheduler.cache.pool.num_used == 0, "an engine without work holds pages"
            assert self.runner is not None
            assert not self.runner.rows, "an engine without work holds rows"
        self._check_owners(scheduler)
        self._check_wanted(scheduler)
        moved = bool(scheduler._last.rows) or not engine.has_work
        self._idle_steps = 0 if moved else self._idle_steps + 1
        assert self._idle_steps < MAX_IDLE_STEPS, "something waits and nothing moves"

    def _check_owners(self, scheduler: Scheduler) -> None:
        for sequence in scheduler._roster.running:
            request = sequence.state.request
            for page in sequence.pages:
                page_hash = scheduler.cache.pool.hash_of(page)
                if page_hash is not None:
                    owner = self._owners.setdefault(page_hash, request.tenant)
                    assert owner == request.tenant, "a page went from one tenant to another"

    def _check_wanted(self, scheduler: Scheduler) -> None:
        """R04: one step and 250 ms after a client has gone, in whatever way, the engine does not know its request."""
        host = self._host
        now_s = host.clock.monotonic()
        for state in scheduler._roster.requests.values():
            gone_s = host.gone_s(state.params.seed or 0)
            key = (state.request.id, state.number)
            late = gone_s is not None and now_s > gone_s + 0.25 + 2 * self.to_engine.extra_s
            self._late[key] = self._late.get(key, 0) + 1 if late else 0
            assert self._late[key] <= MAX_LATE_TURNS, f"the engine works for {state.request.id}, whose client has gone"

    def _deliver(self, data: bytes) -> None:
        if self._link is not None:
            try:
                self._link.data_received(data)
            except Exception:  # asyncio ends a connection whose protocol raises
                self.client_closed()
        else:
            self._early.append(data)

    def _end_of_stream(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.connection_lost(None)


class Host:
    """The machine that engine processes run on. Its `spawn` is handed to the real ProcessClient.

    broken: what no process may do. starts: what becomes of the next starts, each one of STARTS. gone_s: when the last
    sender of the calls with a seed went away; None while one is there.
    """

    def __init__(
        self, clock: VirtualClock, rnd: random.Random, setting: Setting, rule: Rule, calls: dict[int, Call]
    ) -> None:
        self.clock = clock
        self.rnd = rnd
        self.setting = setting
        self.rule = rule
        self.calls = calls
        self.broken: list[str] = []
        self.starts: deque[str] = deque()
        self.turns = 0
        self.deaths_s: list[float] = []
        self.processes: list[WorldProcess] = []
        self.seen = Seen()
        self.after_turn: Callable[[], None] = lambda: None
        self.gone_s: Callable[[int], float | None] = lambda seed: None

    def spawn(self, command: list[str], first_frame: bytes) -> WorldProcess:
        alive = [process.pid for process in self.processes if process.exit_code is None]
        if alive:
            self.broken.append(f"a second engine is started while {alive} is alive")
        start = self.starts.popleft() if self.starts else "well"
        process = WorldProcess(self, 100 + len(self.processes), start)
        self.processes.append(process)
        return process

    @property
    def current(self) -> WorldProcess | None:
        return self.processes[-1] if self.processes and self.processes[-1].exit_code is None else None

    def branches_of(self, seed: int) -> list[Sequence]:
        """What the engine holds of the calls with a seed."""
        process = self.current
        if process is None or process.engine is None:
            return []
        states = process.engine._scheduler._roster.requests.values()
        return [branch for state in states if state.params.seed == seed for branch in state.branches]

    def note_death(self, process: WorldProcess) -> None:
        """What a process was at when it ended by force."""
        if process.exit_code == 0:
            return
        busy = process.engine is not None and process.engine.has_work
        self.seen.note("death while loading", process.loading)
        self.seen.note("death of a busy engine", busy)
        self.seen.note("death of an idle engine", not busy and not process.loading)
        self.seen.note("a load that hung", process.loading and process.start == "hangs")

    def died(self, process: WorldProcess) -> None:
        self.deaths_s.append(self.clock.monotonic())


def make_policy(name: str) -> Policy:
    return FairPolicy() if name == "fair" else PriorityPolicy(class_lead=0) if name == "fcfs" else PriorityPolicy()


def engine_info(setting: Setting, pid: int) -> EngineInfo:
    return make_info(
        vocab_size=NUM_TOKENS, max_model_len=setting.max_model_len, max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens, max_queued_requests=setting.max_queued_requests, pid=pid,
    )  # fmt: skip
