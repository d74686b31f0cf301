"""Times single weight products: GB/s of packed weights at few rows, GOP/s at many, beside the read bandwidth.

    python benchmarks/bench_ops.py [--shape smollm2 llama1b] [--types Q4_0 BF16] [--rows 1 8 32 512] [--isa avx2]

Each shape is made of as many weights as fill `--megabytes`, run in turn, so that none stays in a cache by luck.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from sayfa import _native
from sayfa.nn.program.native import NativeExecutor
from sayfa.nn.program.program import InputBatch, KvSpec, Linear, ProgramBuilder, Weight

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fakes.single_op import random_piece

SHAPES = {
    "smollm2": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)},
    "llama1b": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
}


def build(n: int, k: int, type_name: str, copies: int, wish: argparse.Namespace) -> NativeExecutor:
    """`copies` products of one shape after another."""
    builder = ProgramBuilder(KvSpec(0, 1, 32))
    x, out = builder.buffer("x", k), builder.buffer("out", n)
    last = builder.buffer("last", n, "logits")
    piece = random_piece(np.random.default_rng(0), type_name, n, k)
    for _ in range(copies):
        builder.add(Linear(x, Weight((piece,)), out))
    executor = NativeExecutor(
        builder.finish(last), threads=wish.threads, max_tokens=max(wish.rows), max_rows=1, page_size=32,
        kv_type="float32", isa=wish.isa,
    )  # fmt: skip
    executor.view(x)[:] = np.random.default_rng(1).standard_normal((max(wish.rows), k), dtype=np.float32)
    return executor


def batch_of(num_tokens: int) -> InputBatch:
    """Tokens that nobody looks at."""
    line = np.arange(num_tokens, dtype=np.int32)
    pages = np.zeros((1, -(-num_tokens // 32)), np.int32)
    ends = np.array([0, num_tokens], np.int32)
    return InputBatch(line, line, line, ends, ends[1:], pages, line[:0])


def main() -> None:
    """Run every wished combination."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", default=["smollm2"])
    parser.add_argument("--types", nargs="*", default=["Q4_0", "Q4_1", "Q8_0", "BF16"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 32, 128, 512])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--parts", nargs="*", default=[])
    wish = parser.parse_args()
    pool = _native.Pool(wish.threads or _native.usable_cores())
    block = _native.Block(256 << 20)
    block.fill(1)
    for shape in wish.shape:
        for type_name in wish.types:
            for name, (n, k) in SHAPES[shape].items():
                if wish.parts and name not in wish.parts:
                    continue
                one = build(n, k, type_name, 1, wish)
                copies = max(1, wish.megabytes * 1_000_000 // one.weights_bytes)
                executor = build(n, k, type_name, copies, wish)
                speed = 0.268435456 / min(_native.read_seconds(pool, block) for _ in range(3))
                parts = []
                for rows in wish.rows:
                    batch = batch_of(rows)
                    times = []
                    for _ in range(8 if rows < 100 else 3):
                        start = time.perf_counter()
                        executor.run(batch)
                        times.append(time.perf_counter() - start)
                    seconds = min(times)
                    gigabytes = executor.weights_bytes / seconds / 1e9
                    gigaops = 2 * rows * n * k * copies / seconds / 1e9
                    parts.append(f"{rows}: {gigabytes:.1f} GB/s {gigaops:.0f} GOP/s")
                print(f"{shape} {type_name} {name:8} [read {speed:.0f} GB/s]  " + "  ".join(parts), flush=True)


if __name__ == "__main__":
    main()
