"""Each request gets its own outputs to its end, whatever its reader and the others do."""

import asyncio
import random
from contextlib import aclosing

import pytest

from sayfa.base.clock import FakeClock
from sayfa.base.errors import EngineDead, EngineError, InvalidRequest, Overloaded
from sayfa.base.messages import EngineOutput, Refused, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import TokenLogprobs
from sayfa.wire.streams import MAX_UNREAD_BYTES, MAX_UNREAD_TOKENS, SLOW_READER_LIMIT_S, RequestStreams
from world.loop import VirtualClock, VirtualLoop


class Bench:
    """Streams on a fake clock; `sent`, `aborted` and `paused` are what the engine would have got."""

    def __init__(self, clock=None):
        self.clock = clock or FakeClock()
        self.sent = []
        self.aborted = []
        self.paused = []
        self.streams = RequestStreams(self.clock, self.aborted.append, lambda name, on: self.paused.append((name, on)))

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


@pytest.mark.parametrize(("kind", "error", "code"), [("invalid", InvalidRequest, "c"), ("overloaded", Overloaded, "c"),
                                                     ("draining", Overloaded, "draining")])  # fmt: skip
async def test_refusals_become_the_error_they_were(kind, error, code):
    bench = Bench()
    task = asyncio.ensure_future(bench.collect("a"))
    await settle()
    bench.streams.refuse(Refused(id="a", kind=kind, message="no", param="p", code="c", retry_after_s=None))
    with pytest.raises(error, match="no") as raised:
        await task
    assert (raised.value.param, raised.value.code) == ("p", code)
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


def in_virtual_time(test):
    """Run an async test on a loop whose time passes at once; it is handed a bench on the loop's own clock."""

    def run():
        clock = VirtualClock()
        loop = VirtualLoop(clock)
        try:
            loop.run_until_complete(test(Bench(clock)))
            assert not loop.complaints
            assert not [timer for timer in loop._scheduled if not timer.cancelled()]
        finally:
            loop.close()

    run.__doc__ = test.__doc__
    return run


def scored(name, count, num_top):
    scores = [TokenLogprobs(-1.0, 1, [1] * num_top, [-1.0] * num_top)] * count
    return EngineOutput(id=name, tokens=[1] * count, logprobs=scores)


@in_virtual_time
async def test_t17_a_reader_that_stops_pauses_its_request_and_loses_it_after_the_limit(bench):
    """It is ended 10 s after the pause, to the moment, without any delivery; a fast one beside it is never paused."""
    async with aclosing(bench.read("slow")) as slow, aclosing(bench.read("fast")) as fast:
        starts = [asyncio.ensure_future(anext(reading)) for reading in (slow, fast)]
        await settle()
        bench.streams.deliver([out("slow", 1), out("fast", 1)])
        await asyncio.gather(*starts)
        num_sent = 0
        while not bench.paused:
            bench.streams.deliver([out("slow", 1), out("fast", 1)])
            num_sent += 1
            await anext(fast)
            await asyncio.sleep(0.01)
        assert bench.paused == [("slow", True)]
        assert num_sent * (240 + 36) <= MAX_UNREAD_BYTES + 300
        await asyncio.sleep(SLOW_READER_LIMIT_S - 0.02)
        assert bench.aborted == []
        await asyncio.sleep(0.02)
        assert bench.aborted == ["slow"]
        with pytest.raises(EngineError, match="not read") as error:
            await anext(slow)
        assert error.value.code == "slow_reader"
    assert bench.aborted == ["slow", "fast"]
    assert bench.paused == [("slow", True)]


@in_virtual_time
async def test_t17_the_limits_are_tokens_and_bytes(bench):
    """1,000 tokens in large outputs, or 256 KiB of scores long before."""
    assert (MAX_UNREAD_TOKENS, MAX_UNREAD_BYTES) == (1000, 256 << 10)
    for name, output in (("tokens", out("tokens", *range(500))), ("bytes", scored("bytes", 80, 20))):
        async with aclosing(bench.read(name)) as reading:
            start = asyncio.ensure_future(anext(reading))
            await settle()
            bench.streams.deliver([output])
            await start
            for _ in range(2):
                bench.streams.deliver([output])
            assert (name, True) not in bench.paused
            bench.streams.deliver([out(name, 1)] if name == "tokens" else [output])
            assert (name, True) in bench.paused


@in_virtual_time
async def test_t17_a_reader_that_goes_on_resumes_its_request(bench):
    """A slow but steady one is paused many times and keeps its request; each pause is followed by a resume."""
    given, read = 0, 0
    async with aclosing(bench.read("a")) as reading:
        start = asyncio.ensure_future(anext(reading))
        await settle()
        bench.streams.deliver([out("a", 0)])
        await start
        for _ in range(8000):  # 100 tokens a second come, 20 are read
            if not bench.paused or not bench.paused[-1][1]:
                bench.streams.deliver([out("a", given)])
                given += 1
            if bench.clock.monotonic() >= 5000.0 + read / 20:
                assert (await anext(reading)).tokens == [read]
                read += 1
            await asyncio.sleep(0.01)
        assert bench.aborted == []
        assert len(bench.paused) > 10
        assert [on for _, on in bench.paused] == [index % 2 == 0 for index in range(len(bench.paused))]


@in_virtual_time
async def test_t17_a_stall_of_our_own_is_not_the_reader_s(bench):
    """On a clock that does not count the time in which this process stood still, nobody is ended when it wakes up."""
    awake = FakeClock()
    bench.streams._clock = awake
    async with aclosing(bench.read("a")) as reading:
        start = asyncio.ensure_future(anext(reading))
        await settle()
        bench.streams.deliver([out("a", 0)])
        await start
        bench.streams.deliver([out("a", *range(MAX_UNREAD_TOKENS + 1))])
        bench.clock.advance(3600.0)
        await asyncio.sleep(0.1)
        assert bench.aborted == []
        await anext(reading)
        assert bench.paused == [("a", True), ("a", False)]


@in_virtual_time
async def test_a_paused_request_that_ends_meanwhile_is_left_alone(bench):
    """Its last outputs were on their way: they are read, nothing is resumed, aborted or ended."""
    async with aclosing(bench.read("a")) as reading:
        start = asyncio.ensure_future(anext(reading))
        await settle()
        bench.streams.deliver([out("a", 0)])
        await start
        bench.streams.deliver([out("a", *range(MAX_UNREAD_TOKENS + 1))])
        bench.streams.deliver([out("a", 7, finish="length")])
        await asyncio.sleep(2 * SLOW_READER_LIMIT_S)
        assert [output.tokens[-1] async for output in reading] == [MAX_UNREAD_TOKENS, 7]
    assert (bench.paused, bench.aborted) == ([("a", True)], [])


@in_virtual_time
async def test_an_end_within_one_delivery_pauses_nothing(bench):
    """Behind and finished in the same step: there is nothing left to pause."""
    async with aclosing(bench.read("a", n=2)) as reading:
        start = asyncio.ensure_future(anext(reading))
        await settle()
        many = range(MAX_UNREAD_TOKENS + 1)
        bench.streams.deliver([out("a", *many), out("a", finish="stop"), out("a", branch=1, finish="stop")])
        await start
        assert len([output async for output in reading]) == 2
    assert bench.paused == []


async def test_an_abort_by_the_caller_ends_the_stream_quietly():
    bench = Bench()
    task = asyncio.ensure_future(bench.collect("a"))
    await settle()
    bench.streams.close("a")
    assert await task == []
    bench.streams.close("unknown")
