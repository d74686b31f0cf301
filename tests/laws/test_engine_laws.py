"""Laws of the whole engine, scheduler and runner together: an answer depends on the request alone.

Each law holds bit by bit, log-probabilities included, on tiny random models; with the native executor, too, where the
library is built.
"""

import asyncio

import msgspec
import numpy as np
import pytest

from fakes.engines import EXECUTORS, Got, assert_same, build, make_requests, run
from fakes.models import make_tiny
from sayfa.base.faults import armed
from sayfa.base.messages import Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.core.sequence import branch_seed
from sayfa.engine.inproc import InprocClient

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A full-attention model, and one with sliding windows of 24 tokens, shorter than most contexts."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny("llama", root / "llama", seed=3),
        "gemma3": make_tiny("gemma3", root / "gemma3", seed=4),
    }


@pytest.fixture(params=EXECUTORS)
def executor(request):
    return request.param


@pytest.fixture
def native():
    """For laws that test_reference_equality holds the reference to."""
    return "native"


@pytest.fixture(params=["llama", "gemma3"])
def folder(request, folders):
    return folders[request.param]


def alone(folder, executor, requests, **options):
    """Run each request on an engine that holds nothing else and has never seen anything."""
    engine = build(folder, executor, enable_prefix_caching=False, **options)
    answers = {}
    for request in requests:
        answers |= run(engine, [request])
    return answers


@pytest.mark.parametrize("seed", SEEDS)
def test_alone_is_in_a_crowd(folder, native, seed):
    requests = make_requests(seed, 14)
    crowd = run(build(folder, native, enable_prefix_caching=False), requests)
    assert_same(crowd, alone(folder, native, requests))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_arrival_does_not_matter(folders, native, seed):
    requests = make_requests(seed, 10)
    assert_same(
        run(build(folders["llama"], native), requests),
        run(build(folders["llama"], native), requests[::-1]),
    )


@pytest.mark.parametrize("budget", [16, 23, 37, 160])
def test_chunked_is_whole(folder, native, budget):
    requests = make_requests(budget, 8, shortest=40, longest=120)
    whole = build(folder, native, max_num_batched_tokens=1024, enable_prefix_caching=False)
    pieces = build(folder, native, max_num_batched_tokens=budget, enable_prefix_caching=False)
    assert_same(run(whole, requests), run(pieces, requests))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_the_page_size_does_not_matter(folders, native, block_size):
    requests = make_requests(block_size, 8)
    plain = build(folders["llama"], native, block_size=16)
    assert_same(run(plain, requests), run(build(folders["llama"], native, block_size=block_size), requests))


@pytest.mark.parametrize("seed", SEEDS)
def test_cached_is_cold(folder, native, seed):
    requests = make_requests(seed, 10, shortest=30)
    common = requests[0].prompt
    requests = [msgspec.structs.replace(request, prompt=(common + request.prompt)[:120]) for request in requests]
    cold = alone(folder, native, requests)
    engine = build(folder, native)
    run(engine, requests)
    warm = run(engine, requests)
    assert_same(warm, cold)
    hits = [got.last.num_cached for request in requests for got in warm[request.id]
            if request.params.prompt_logprobs is None]  # fmt: skip
    assert hits
    assert min(hits) > 0, "a warm run that finds nothing in the cache proves nothing"


def test_preempted_at_any_step_is_undisturbed(folder):
    """All at once and in the reference; test_preemption has one after another, natively, and every kind of wish."""
    executor = "reference"
    requests = make_requests(5, 5, longest=60)
    undisturbed = run(build(folder, executor), requests)
    engine = build(folder, executor)
    num_steps = 0

    def count(step, message):
        nonlocal num_steps
        num_steps = step

    run(build(folder, executor), requests, count)
    for at in range(1, num_steps):

        def preempt(step, message, at=at):
            if step == at:
                for request in requests:
                    engine._scheduler.preempt(request.id, 0.0)

        engine.reset_cache()
        before = engine._scheduler.stats(0, 0, 0, {}).preemptions
        assert_same(run(engine, requests, preempt), undisturbed)
        if at < num_steps - 2:
            assert engine._scheduler.stats(0, 0, 0, {}).preemptions > before


@pytest.mark.parametrize("num_seqs", [2, 8])
def test_t17_paused_at_any_step_is_undisturbed(folder, executor, num_seqs):
    """Half of the requests stand still for three steps; with two rows the others take theirs meanwhile."""
    requests = make_requests(5, 5, longest=60)
    ids = [request.id for request in requests[::2]]
    undisturbed = run(build(folder, executor), requests)
    engine = build(folder, executor, max_num_seqs=num_seqs)
    num_steps, num_paused = 0, []

    def count(step, message):
        nonlocal num_steps
        num_steps = step

    run(engine, requests, count)
    for at in range(1, num_steps, 3):

        def pause(step, message, at=at):
            num_paused.append(message.stats.paused)
            if step == at:
                engine.pause(ids, on=True)
            if step == at + 3 or not engine.has_work:
                engine.pause(ids, on=False)

        engine.reset_cache()
        assert_same(run(engine, requests, pause), undisturbed)
    assert max(num_paused) >= 2


def test_a_pool_that_is_too_small_for_all_preempts_and_changes_nothing(folder, executor):
    requests = [
        msgspec.structs.replace(
            request, params=msgspec.structs.replace(request.params, max_tokens=40, stop_token_ids=[])
        )
        for request in make_requests(6, 16, shortest=80, longest=100)
    ]
    roomy = run(build(folder, executor, max_num_seqs=16), requests)
    tight = build(folder, executor, max_num_seqs=16, kv_cache_memory=1 << 20)
    assert tight.info.memory.num_pages * 16 < 1500, "the pool is not small enough to prove anything"
    preemptions = []
    answers = run(tight, requests, lambda step, message: preemptions.append(message.stats.preemptions))
    assert preemptions[-1] > 0
    assert_same(answers, roomy)


@pytest.mark.parametrize("seed", SEEDS)
def test_n_answers_are_n_separate_requests(folder, executor, seed):
    engine, separate = build(folder, executor), build(folder, executor, enable_prefix_caching=False)
    for original in make_requests(seed, 4):
        branched = msgspec.structs.replace(original, params=msgspec.structs.replace(original.params, n=4))
        together = run(engine, [branched])[original.id]
        for branch, got in enumerate(together):
            params = msgspec.structs.replace(original.params, seed=branch_seed(original.params.seed, branch))
            single = run(separate, [msgspec.structs.replace(original, params=params)])[original.id][0]
            assert (got.tokens, got.logprobs) == (single.tokens, single.logprobs)
            assert got.answer[3:] == single.answer[3:]
            assert got.prompt_logprobs == (single.prompt_logprobs if branch == 0 else [])


async def test_streamed_is_not_streamed(folders, executor):
    requests = make_requests(8, 12)
    plain = run(build(folders["llama"], executor), requests)
    client = InprocClient(build(folders["llama"], executor))

    async def read(request):
        gots = [Got() for _ in range(request.params.n)]
        async for output in client.generate(request):
            got = gots[output.branch]
            got.tokens += output.tokens
            got.logprobs += output.logprobs
            got.prompt_logprobs += output.prompt_logprobs
            got.last = output
        return gots

    streams = await asyncio.gather(*(read(request) for request in requests))
    assert_same({request.id: gots for request, gots in zip(requests, streams, strict=True)}, plain)


@pytest.mark.parametrize("point", ["runner.before_forward", "runner.before_sample"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_step_that_raises_once_harms_nobody(folders, executor, point, nth):
    requests = make_requests(9, 8)
    undisturbed = run(build(folders["llama"], executor), requests)
    engine = build(folders["llama"], executor)

    def glitch():
        raise MemoryError("armed")

    with armed(point, glitch, nth=nth) as fired:
        answers = run(engine, requests)
    assert fired.passes > nth
    assert_same(answers, undisturbed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_whose_numbers_break_ends_alone_and_leaves_nothing_in_the_cache(folders, seed):
    requests = [request for request in make_requests(seed, 8) if 9 not in request.params.logit_bias]
    victim = Request(id="victim", prompt=[5] * 40, params=SamplingParams(temperature=0.0, max_tokens=30))
    undisturbed = run(build(folders["llama"]), requests)
    engine = build(folders["llama"])
    execute = engine._runner._runner._executor.run

    def spoiled(batch):
        logits = execute(batch)
        for row, index in enumerate(batch.logit_rows):
            if batch.token_ids[index] == 5 and batch.positions[index] == 39:
                logits[row] = np.nan
        return logits

    engine._runner._runner._executor.run = spoiled
    answers = run(engine, [victim, *requests])
    end = answers.pop("victim")[0].last
    assert (end.finish, end.error_code) == ("error", "numerical_error")
    assert_same(answers, undisturbed)
    engine._runner._runner._executor.run = execute
    again = run(engine, [victim])["victim"][0]
    assert again.last.num_cached == 0
    assert again.last.finish == "length"


def test_a_request_that_makes_each_step_raise_ends_alone(folders):
    requests = make_requests(4, 7)
    undisturbed = run(build(folders["llama"]), requests)
    engine = build(folders["llama"])
    execute = engine._runner._runner._executor.run

    def fragile(batch):
        if (np.asarray(batch.token_ids) == 6).sum() >= 30:
            raise FloatingPointError("armed")
        return execute(batch)

    engine._runner._runner._executor.run = fragile
    guilty = Request(id="guilty", prompt=[6] * 33, params=SamplingParams(max_tokens=5))
    answers = run(engine, [*requests[:3], guilty, *requests[3:]])
    end = answers.pop("guilty")[0].last
    assert (end.finish, end.error_code) == ("error", "step_failed")
    assert_same(answers, undisturbed)
