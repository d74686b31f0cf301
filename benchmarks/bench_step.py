"""Times the native step of a model, op by op: rows × context, with the read bandwidth measured in the same run.

    python benchmarks/bench_step.py MODEL [--threads 2] [--rows 1 8 32] [--context 32 256] [--prefill 512] [--shared 0]

No engine, no HTTP: what is left of these numbers in a server is the engine's business.
"""

import argparse
import time

import numpy as np

from sayfa import _native
from sayfa.models import load_program
from sayfa.models.config import read_config
from sayfa.models.formats.source import open_weights
from sayfa.nn.program.native import NativeExecutor
from sayfa.nn.program.program import InputBatch

PAGE = 32


def decode_batch(num_rows: int, context: int, vocab: int, shared: int = 0) -> InputBatch:
    """One new token for each of `num_rows` rows that have `context` positions, pages in random order.

    All read the same pages for the first `shared` tokens.
    """
    rng = np.random.default_rng(0)
    per_row = -(-context // PAGE)
    pages = rng.permutation(num_rows * per_row).astype(np.int32).reshape(num_rows, per_row) + 1
    pages[:, : shared // PAGE] = pages[0, : shared // PAGE]
    last = np.full(num_rows, context - 1, np.int32)
    slots = pages[:, (context - 1) // PAGE] * PAGE + (context - 1) % PAGE
    line = np.arange(num_rows + 1, dtype=np.int32)
    ids = rng.integers(0, vocab, num_rows).astype(np.int32)
    return InputBatch(ids, last, slots.astype(np.int32), line, last + 1, pages, line[:-1])


def prefill_batch(num_tokens: int, vocab: int) -> InputBatch:
    """One prompt from the start."""
    line = np.arange(num_tokens, dtype=np.int32)
    pages = np.arange(1, -(-num_tokens // PAGE) + 1, dtype=np.int32)[None]
    ids = np.random.default_rng(0).integers(0, vocab, num_tokens).astype(np.int32)
    ends = np.array([0, num_tokens], np.int32)
    return InputBatch(ids, line, line + PAGE, ends, ends[1:], pages, ends[1:] - 1)


def bandwidth(executor: NativeExecutor, block: object) -> float:
    """GB/s of reading 256 MiB, best of three."""
    return 0.268435456 / min(_native.read_seconds(executor._pool, block) for _ in range(3))


def measure(executor: NativeExecutor, batch: InputBatch, what: str, repeats: int) -> None:
    """Print median and best of `repeats` steps, and where the time of the best goes."""
    executor.time_ops(False)
    for _ in range(3):
        executor.run(batch)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        executor.run(batch)
        times.append(time.perf_counter() - start)
    executor.time_ops(True)
    best: dict[str, float] = {}
    for _ in range(repeats):
        executor.run(batch)
        ops = executor.op_times()
        if not best or sum(ops.values()) < sum(best.values()):
            best = ops
    parts = "  ".join(f"{kind} {1e3 * s:.3f}" for kind, s in sorted(best.items(), key=lambda item: -item[1]))
    tokens = len(batch.token_ids)
    print(
        f"{what:24} median {1e3 * np.median(times):8.3f} ms  best {1e3 * min(times):8.3f} ms  "
        f"{tokens / min(times):8.0f} tok/s   [{parts}]",
        flush=True,
    )


def main() -> None:
    """Load, then measure each wish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="*", default=[32, 256])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512])
    parser.add_argument("--shared", type=int, default=0, help="tokens at the start that all rows share")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--isa")
    parser.add_argument("--kv", default="bfloat16")
    parser.add_argument("--dtype", default="auto")
    wish = parser.parse_args()
    config = read_config(wish.model)
    source = open_weights(wish.model)
    program = load_program(wish.model, config, source, num_positions=max([*wish.context, *wish.prefill]))
    start = time.perf_counter()
    executor = NativeExecutor(
        program, threads=wish.threads, max_tokens=max([*wish.rows, *wish.prefill]), max_rows=max(wish.rows),
        page_size=PAGE, kv_type=wish.kv, isa=wish.isa, dtype=wish.dtype,
    )  # fmt: skip
    packed = executor.weights_bytes
    print(
        f"packed {packed / 1e6:.1f} MB in {time.perf_counter() - start:.3f} s, "
        f"{executor.isa}, {executor.threads} threads"
    )
    most = max(max(wish.rows) * -(-max(wish.context) // PAGE), -(-max([1, *wish.prefill]) // PAGE))
    executor.allocate_pages(most + 2)
    block = _native.Block(256 << 20)
    block.fill(1)
    speed = bandwidth(executor, block)
    print(f"read bandwidth {speed:.1f} GB/s: the weights alone take {packed / speed / 1e6:.2f} ms")
    for context in wish.context:
        for rows in wish.rows:
            batch = decode_batch(rows, context, config.vocab_size, min(wish.shared, context - 1))
            measure(executor, batch, f"rows {rows}, context {context}", wish.repeats)
    for tokens in wish.prefill:
        measure(executor, prefill_batch(tokens, config.vocab_size), f"prefill {tokens}", max(3, wish.repeats // 4))
    print(f"read bandwidth {bandwidth(executor, block):.1f} GB/s")


if __name__ == "__main__":
    main()
