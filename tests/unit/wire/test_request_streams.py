"""Each request gets its own outputs to its end, whatever its reader and the others do."""

import asyncio
import random
from contextlib import aclosing

import pytest

from sayfa.base.clock import FakeClock
from sayfa.base.errors import EngineDead, EngineError, InvalidRequest, Overloaded
from sayfa.base.messages import EngineOutput, Refused, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.wire.streams import MAX_UNREAD_TOKENS, SLOW_READER_LIMIT_S, RequestStreams


class Bench:
    """Streams on a fake clock; `sent` and `aborted` are what the engine would have got."""

    def __init__(self):
        self.clock = FakeClock()
        self.sent = []
        self.aborted = []
        self.streams = RequestStreams(self.clock, self.aborted.append)

    def read(self, name, n=1):
        request = Request(id=name, prompt=[1], params=SamplingParams(n=n))
        return self.streams.read(request, self.sent.append)

    async def collect(self, name, n=1):
        return [output async for output in self.read(name, n)]


def out(name, *tokens, branch=0, finish=None):
    return EngineOutput(id=name, branch=branch, tokens=list(tokens), finish=finish)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(30))
async def test_random_crowds_get_exactly_what_was_delivered_in_order(seed):
    rng = random.Random(seed)
    bench = Bench()
    branches = {f"r{i}": rng.randint(1, 3) for i in range(rng.randint(1, 12))}
    tasks = {name: asyncio.ensure_future(bench.collect(name, n)) for name, n in branches.items()}
    await settle()
    expected = {name: [] for name in branches}
    alive = [(name, branch) for name, n in branches.items() for branch in range(n)]
    while alive:
        step = []
        for name, branch in rng.sample(alive, rng.randint(1, len(alive))):
            last = rng.random() < 0.2
            step.append(out(name, rng.randrange(100), branch=branch, finish="length" if last else None))
            expected[name].append(step[-1])
            if last:
                alive.remove((name, branch))
        bench.streams.deliver(step)
        if rng.random() < 0.5:
            await settle()
    assert {name: await task for name, task in tasks.items()} == expected
    assert bench.aborted == []
    assert len(bench.streams) == 0


async def test_a_reader_that_leaves_aborts_once_and_what_still_comes_is_dropped():
    bench = Bench()
    reading = bench.read("a")
    task = asyncio.ensure_future(anext(reading))
    await settle()
    bench.streams.deliver([out("a", 1)])
    assert (await task).tokens == [1]
    await reading.aclose()
    assert bench.aborted == ["a"]
    bench.streams.deliver([out("a", 2), out("a", finish="abort")])
    assert len(bench.streams) == 0


async def test_a_cancelled_reader_aborts_in_the_same_turn():
    bench = Bench()
    task = asyncio.ensure_future(bench.collect("a"))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.aborted == ["a"]


async def test_death_ends_every_stream_with_one_error_after_what_was_delivered():
    bench = Bench()
    readings = [bench.read(f"r{i}") for i in range(5)]
    firsts = [asyncio.ensure_future(anext(reading)) for reading in readings]
    await settle()
    bench.streams.deliver([out(f"r{i}", i) for i in range(5)])
    bench.streams.fail_all(EngineDead)
    for i, (reading, first) in enumerate(zip(readings, firsts, strict=True)):
        assert (await first).tokens == [i]
        with pytest.raises(EngineDead):
            await anext(reading)
        with pytest.raises(StopAsyncIteration):
            await anext(reading)
    assert bench.aborted == []


@pytest.mark.parametrize(("kind", "error"), [("invalid", InvalidRequest), ("overloaded", Overloaded),
                                             ("draining", Overloaded)])  # fmt: skip
async def test_refusals_become_the_error_they_were(kind, error):
    bench = Bench()
    task = asyncio.ensure_future(bench.collect("a"))
    await settle()
    bench.streams.refuse(Refused(id="a", kind=kind, message="no", param="p", code="c", retry_after_s=None))
    with pytest.raises(error, match="no") as raised:
        await task
    assert (raised.value.param, raised.value.code) == ("p", "c")
    assert bench.aborted == []


async def test_an_id_in_use_is_refused_and_the_first_goes_on():
    bench = Bench()
    first = asyncio.ensure_future(bench.collect("a"))
    await settle()
    with pytest.raises(InvalidRequest, match="in use"):
        await bench.collect("a")
    bench.streams.deliver([out("a", 1, finish="stop")])
    assert len(await first) == 1
    assert bench.sent[0].id == "a"
    assert len(bench.sent) == 1


async def test_a_reader_that_stays_behind_loses_its_request_and_a_fast_one_never():
    bench = Bench()
    async with aclosing(bench.read("slow")) as slow, aclosing(bench.read("fast")) as fast:
        starts = [asyncio.ensure_future(anext(reading)) for reading in (slow, fast)]
        await settle()
        bench.streams.deliver([out("slow", 1), out("fast", 1)])
        await asyncio.gather(*starts)
        for _ in range(3 * MAX_UNREAD_TOKENS):
            bench.streams.deliver([out("slow", 1), out("fast", 1)])
            await anext(fast)
            bench.clock.advance(2 * SLOW_READER_LIMIT_S / MAX_UNREAD_TOKENS)
        with pytest.raises(EngineError, match="not read") as error:
            await anext(slow)
        assert error.value.code == "slow_reader"
        assert bench.aborted == ["slow"]


async def test_a_reader_that_catches_up_in_time_keeps_its_request():
    bench = Bench()
    async with aclosing(bench.read("a")) as reading:
        start = asyncio.ensure_future(anext(reading))
        await settle()
        bench.streams.deliver([out("a", 0)])
        await start
        for _ in range(3):
            bench.streams.deliver([out("a", *range(MAX_UNREAD_TOKENS + 1))])
            bench.clock.advance(SLOW_READER_LIMIT_S - 1)
            await anext(reading)
            bench.streams.deliver([out("a", 1)])
            bench.clock.advance(2)
            await anext(reading)
        assert bench.aborted == []


async def test_an_abort_by_the_caller_ends_the_stream_quietly():
    bench = Bench()
    task = asyncio.ensure_future(bench.collect("a"))
    await settle()
    bench.streams.close("a")
    assert await task == []
    bench.streams.close("unknown")
