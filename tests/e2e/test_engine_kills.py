"""Engine processes killed with -9 again and again, a real engine over a tiny model: seen at once, mended, nothing left.

The law: a death is seen within 250 ms, each open stream ends with one error, the next engine is ready within 5 s, and
neither processes nor descriptors pile up.
"""

import asyncio
import os
import signal
import sys
import time
from contextlib import aclosing
from statistics import quantiles

import msgspec
import psutil
import pytest

from fakes.models import make_successor_text
from sayfa.base.clock import SystemClock
from sayfa.base.errors import EngineDead
from sayfa.base.messages import Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.settings import engine_config
from sayfa.wire.process_client import ProcessClient

PIECES = [b"one ", b"two ", b"three ", b"four "]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = make_successor_text(tmp_path_factory.mktemp("successor"), PIECES, max_context=8192)
    options = {"model": str(folder), "max_num_seqs": 8, "kv_cache_memory": "8MiB", "seed": 1}
    return msgspec.json.encode(engine_config(options))


def request(name):
    # Without end tokens the successor goes on to the context's end, so streams are open when the kill comes.
    return Request(id=name, prompt=[3, 4], params=SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True))


async def kill_once(client, name):
    """Open streams, kill, and return how long it took until all had ended and until the next engine was ready."""
    started = asyncio.Event()

    async def read(i):
        async for _ in client.generate(request(f"{name}-{i}")):
            started.set()

    readers = [asyncio.ensure_future(read(i)) for i in range(8)]
    await started.wait()
    pid = client.pid
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    ends = await asyncio.gather(*readers, return_exceptions=True)
    seen_s = time.monotonic() - killed_s
    assert sum(isinstance(end, EngineDead) for end in ends) == 8
    await client.wait_ready()
    ready_s = time.monotonic() - killed_s
    assert not psutil.pid_exists(pid)
    return seen_s, ready_s


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_kills_in_a_row(config, kills):
    client = ProcessClient([sys.executable, "-m", "sayfa.engine"], config, SystemClock())
    me = psutil.Process()
    try:
        await client.start()
        await client.wait_ready()
        before = None
        seen: list[float] = []
        for number in range(kills):
            client._restarts._restarts.clear()  # this law is about one death; giving up has a law of its own
            client._quarantine._at_last_death.clear()
            seen_s, ready_s = await kill_once(client, f"kill{number}")
            seen.append(seen_s)
            assert ready_s < 5.0
            left = (me.num_fds(), len(me.children()))
            before = before or left
            assert left == before, "descriptors or children pile up"
        # Of a few the quickest, since another process may have the core; of many nearly all.
        assert quantiles(seen, n=100, method="inclusive")[0 if kills < 100 else 97] < 0.25, seen
    finally:
        await client.close()
    assert me.children() == []


async def test_an_answer_after_a_death_is_the_answer_before_it(config):
    client = ProcessClient([sys.executable, "-m", "sayfa.engine"], config, SystemClock())
    try:
        await client.start()
        await client.wait_ready()
        wanted = Request(id="a", prompt=[3, 4], params=SamplingParams(max_tokens=20, seed=5, ignore_eos=True))
        first = [token async for output in client.generate(wanted) for token in output.tokens]
        os.kill(client.pid, signal.SIGKILL)
        await client_died(client)
        await client.wait_ready()
        assert [token async for output in client.generate(wanted) for token in output.tokens] == first
    finally:
        await client.close()


async def test_a_death_is_told_with_its_signal_and_its_figures_are_forgotten(config, caplog):
    """What ran and waited in the engine before is no figure of the next one."""
    client = ProcessClient([sys.executable, "-m", "sayfa.engine"], config, SystemClock())
    try:
        await client.start()
        await client.wait_ready()
        async with aclosing(client.generate(request("a"))) as outputs:
            await anext(outputs)
        assert client.latest is not None
        os.kill(client.pid, signal.SIGKILL)
        await client_died(client)
        assert client.latest is None
        await client.wait_ready()
        assert client.latest is None
    finally:
        await client.close()
    assert "the engine process ended (killed by signal 9, SIGKILL: often the system, out of memory)" in caplog.text


async def client_died(client):
    while client.state == "ready":  # noqa: ASYNC110 - each turn of the loop takes in what the sockets say
        await asyncio.sleep(0.001)
