"""Each fault point is fired alone, at its first and at later passes: nothing hangs, nothing leaks, no answer is wrong.

Every request ends with the right tokens or with an error, and afterwards the engine serves again with an empty pool.
"""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from fakes.engines import run
from fakes.fake_engine import make_engine
from sayfa.base.clock import SystemClock
from sayfa.base.errors import EngineDead, EngineError, Overloaded
from sayfa.base.faults import armed
from sayfa.base.messages import Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.wire.process_client import ProcessClient

PROGRAM = Path(__file__).parents[1] / "fakes" / "faulty_engine_process.py"
IN_CLIENT = ("client.before_deliver", "client.before_send", "client.before_spawn")
IN_ENGINE = (
    "engine.abort", "engine.add.before_queue", "engine.step.after_update", "engine.step.before_compute",
    "engine.step.before_decide", "engine.step.before_update", "process.before_build", "process.before_handle",
    "process.before_hello", "process.before_send", "process.while_draining", "runner.before_forward",
    "runner.before_sample",
)  # fmt: skip
HARMLESS = ("runner.before_forward", "runner.before_sample")
LIMIT_S = 10.0

REQUESTS = [
    Request(id=f"r{i}", prompt=[7 * i + k for k in range(3 + 5 * i)],
            params=SamplingParams(max_tokens=4 + i, n=1 + i % 3, seed=i))
    for i in range(6)
]  # fmt: skip


@pytest.fixture(scope="module")
def right_answers():
    answers = run(make_engine(max_num_seqs=4), REQUESTS)
    return {name: [got.tokens for got in branches] for name, branches in answers.items()}


def client_of(name, nth, action, mark):
    os.environ["PYTHONPATH"] = os.pathsep.join([*dict.fromkeys(sys.path), str(PROGRAM.parents[1])])
    command = [sys.executable, str(PROGRAM), name, str(nth), action, str(mark)]
    return ProcessClient(command, b"{}", SystemClock())


async def outcome(client, request):
    """Tokens of each branch, or the error that ended the request."""
    tokens = [[] for _ in range(request.params.n)]
    try:
        async for output in client.generate(request):
            if output.finish == "error":
                return EngineError(output.error)
            tokens[output.branch] += output.tokens
    except (EngineError, Overloaded, RuntimeError) as error:
        return error
    return tokens


async def leave_early(client):
    async for _ in client.generate(Request(id="leaver", prompt=[1], params=SamplingParams(max_tokens=99, seed=1))):
        return


async def all_together(client):
    """All requests at once, and one whose reader leaves, so that an abort is sent."""
    results = await asyncio.gather(*(outcome(client, request) for request in REQUESTS), leave_early(client),
                                   return_exceptions=True)  # fmt: skip
    return dict(zip((request.id for request in REQUESTS), results, strict=False))


async def serve_again(client, right_answers):
    """After whatever happened the engine serves, rightly, and its pool is empty at the end."""
    await client.wait_ready()
    result = await outcome(client, REQUESTS[0])
    if isinstance(result, EngineDead):  # the abort of before reached the engine only now, and this request was with it
        await client.wait_ready()
        result = await outcome(client, REQUESTS[0])
    assert result == right_answers[REQUESTS[0].id]
    for request in REQUESTS[1:3]:
        assert await outcome(client, request) == right_answers[request.id]
    pages = []
    client.on_outputs(lambda message: pages.append(message.stats.pages_used))
    assert await outcome(client, REQUESTS[0]) == right_answers[REQUESTS[0].id]
    assert pages[-1] == 0


@pytest.mark.parametrize("action", ["raise", "kill"])
@pytest.mark.parametrize("nth", [1, pytest.param(2), pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", IN_ENGINE)
async def test_a_fault_in_the_engine_process(name, nth, action, right_answers, tmp_path):
    mark = tmp_path / "armed"
    client = client_of(name, nth, action, mark)
    try:
        async with asyncio.timeout(LIMIT_S):
            await client.start()
            if name == "process.before_build" and nth == 1 and action == "raise":
                with pytest.raises(EngineDead, match="armed"):
                    await client.wait_ready()
                return
            await client.wait_ready()
            results = await all_together(client)
            if name == "process.while_draining":
                await client.drain(1.0)
                return
            for request_id, result in results.items():
                assert isinstance(result, EngineError | Overloaded) or result == right_answers[request_id]
            if name in HARMLESS and action == "raise":
                assert results == right_answers
            await serve_again(client, right_answers)
    finally:
        await client.close()
    assert mark.exists()


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("name", IN_CLIENT)
async def test_a_fault_in_the_client(name, nth, right_answers, tmp_path):
    mark = tmp_path / "armed"
    mark.touch()
    client = client_of("engine.abort", 1, "raise", mark)

    def boom():
        raise OSError("armed")

    try:
        async with asyncio.timeout(LIMIT_S):
            await client.start()
            await client.wait_ready()
            with armed(name, boom, nth=nth):
                if name == "client.before_spawn":
                    os.kill(client.pid, 9)
                results = await all_together(client)
                await client.wait_ready()
            for request_id, result in results.items():
                assert isinstance(result, Exception) or result == right_answers[request_id]
            await serve_again(client, right_answers)
    finally:
        await client.close()
