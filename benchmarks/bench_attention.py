"""Speed of native attention: bytes of K/V read per second in decode, useful operations per second in prefill.

    PYTHONPATH=src python benchmarks/bench_attention.py [--threads 2] [--isa NAME] [--quick]

Several layers with pages of their own, in random order, so that nothing is in a cache by luck. The read bandwidth of
the machine is measured in the same run (a greedy scan of half a GiB of logits), because it moves from minute to minute.
"""

import argparse
import time

import numpy as np

from sayfa import _native

KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2}


def matrix(rows: int, width: int) -> np.ndarray:
    """Make random rows whose starts are 64-byte aligned (width is a multiple of 16 here)."""
    raw = np.random.default_rng(1).standard_normal(rows * width + 16).astype(np.float32)
    start = (-raw.ctypes.data // 4) % 16
    return raw[start : start + rows * width].reshape(rows, width)


def mat(x: np.ndarray) -> tuple[int, int, int]:
    """Describe a matrix to the library."""
    return x.ctypes.data, x.strides[0] // 4, x.shape[1]


class Setup:
    """Sequences of one length each over some layers; `queries` tokens at the end of each are computed in a step."""

    def __init__(self, pool, isa, *, batch, context, queries, heads, kv_heads, dim, page_size, kv_type, layers):
        self.layers = layers
        self.programs = [_native.Program(pool, isa) for _ in range(layers)]
        first = self.programs[0]
        per_sequence = -(-context // page_size)
        shape = (0, 0, kv_heads, dim, page_size, KV_TYPES[kv_type])
        stride = first.kv_page_bytes(shape)
        self.pages = _native.Pages(layers, batch * per_sequence + 1, stride)
        self.tables = (np.random.default_rng(2).permutation(batch * per_sequence) + 1).astype(np.int32)
        self.tables = self.tables.reshape(batch, per_sequence)
        self.page_size, self.context = page_size, context
        self._fill(pool, isa, shape, stride, kv_heads * dim)

        total = batch * queries
        self.query, self.out = matrix(total, heads * dim), matrix(total, heads * dim)
        need = first.attention_partials_bytes((0, stride, *shape[2:]), heads, dim**-0.5, 0)
        self.partials = _native.Block(max(64, need))
        for layer, program in enumerate(self.programs):
            place = (layer, stride, *shape[2:])
            program.add_attention(
                mat(self.query), mat(self.out), place, heads, dim**-0.5, 0, total, batch, self.partials
            )
            program.set_pages(self.pages)
        positions = np.tile(np.arange(context - queries, context, dtype=np.int32), batch)
        self.arrays = [
            np.zeros(total, np.int32), positions, np.zeros(total, np.int32),
            np.arange(batch + 1, dtype=np.int32) * queries, np.full(batch, context, np.int32), self.tables,
            np.zeros(0, np.int32),
        ]  # fmt: skip
        self.sizes = (total, batch, per_sequence, 0, page_size)

    def _fill(self, pool, isa, shape, stride, width):
        """Write every slot of every layer, 1,024 tokens a step."""
        writer = _native.Program(pool, isa)
        key, value = matrix(1024, width), matrix(1024, width)
        for layer in range(self.layers):
            writer.add_kv_write(mat(key), mat(value), (layer, stride, *shape[2:]))
        writer.set_pages(self.pages)
        slots = (self.tables[:, :, None] * self.page_size + np.arange(self.page_size)).reshape(-1).astype(np.int32)
        zeros, one = np.zeros(1024, np.int32), np.zeros(2, np.int32)
        for start in range(0, len(slots), 1024):
            part = np.ascontiguousarray(slots[start : start + 1024])
            arrays = [zeros, zeros, part, np.array([0, len(part)], np.int32), one, one, one]
            writer.run(*[array.ctypes.data for array in arrays], len(part), 1, 1, 0, self.page_size)

    def seconds(self, repeats: int, clock=time.perf_counter) -> tuple[float, float]:
        """Best and median time of one layer; the layers take turns, so that each finds its pages in memory."""
        addresses = [array.ctypes.data for array in self.arrays]
        times = []
        for _ in range(repeats):
            for program in self.programs:
                start = clock()
                program.run(*addresses, *self.sizes)
                times.append(clock() - start)
        return min(times), float(np.median(times))


def read_bandwidth(pool, isa, clock=time.perf_counter) -> float:
    """GB/s of a greedy scan of half a GiB."""
    rows, vocab = 2048, 65536
    logits = np.full((rows, vocab), -1, np.float32)  # written, so that each page has memory of its own
    zeros, token = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
    none, uniform = np.full(rows, -1, np.int32), np.zeros(rows)
    best = 1e9
    for _ in range(5):
        start = clock()
        _native.sample(
            pool, isa, logits.ctypes.data, vocab, rows, vocab, zeros.ctypes.data, zeros.ctypes.data, zeros.ctypes.data,
            token.ctypes.data, uniform.ctypes.data, token.ctypes.data, none.ctypes.data, 1, zeros.ctypes.data,
            token.ctypes.data, token.ctypes.data, zeros.ctypes.data,
        )  # fmt: skip
        best = min(best, clock() - start)
    return logits.nbytes / best / 1e9


def decode_cases(quick: bool):
    """(batch, context, heads, kv_heads, dim, page_size, kv_type)."""
    yield 32, 1024, 9, 3, 64, 32, "bfloat16"
    yield 1, 1024, 9, 3, 64, 32, "bfloat16"
    if quick:
        return
    yield 1, 256, 9, 3, 64, 32, "bfloat16"
    yield 32, 256, 9, 3, 64, 32, "bfloat16"
    yield 8, 1024, 9, 3, 64, 32, "bfloat16"
    yield 32, 1024, 9, 3, 64, 16, "bfloat16"
    yield 32, 1024, 9, 3, 64, 64, "bfloat16"
    yield 32, 1024, 9, 3, 64, 32, "int8"
    yield 32, 1024, 9, 3, 64, 64, "int8"
    yield 32, 1024, 9, 3, 64, 32, "float32"
    yield 32, 1024, 32, 8, 64, 32, "bfloat16"
    yield 8, 1024, 32, 8, 128, 32, "bfloat16"
    yield 1, 16384, 9, 3, 64, 32, "bfloat16"


def prefill_cases(quick: bool):
    """(tokens, heads, kv_heads, dim, page_size, kv_type)."""
    yield 1500, 9, 3, 64, 32, "bfloat16"
    if quick:
        return
    yield 512, 9, 3, 64, 32, "bfloat16"
    yield 1500, 9, 3, 64, 64, "bfloat16"
    yield 1500, 9, 3, 64, 16, "bfloat16"
    yield 1500, 9, 3, 64, 32, "int8"
    yield 1500, 9, 3, 64, 32, "float32"
    yield 2048, 32, 8, 64, 32, "bfloat16"
    yield 2048, 32, 8, 128, 32, "bfloat16"


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="count this thread's CPU time; with --threads 1")
    given = parser.parse_args()
    clock = time.thread_time if given.cpu_time else time.perf_counter
    pool = _native.Pool(given.threads)
    limit = read_bandwidth(pool, given.isa, clock)
    print(f"isa {given.isa or _native.isas()[0]}, {given.threads} threads, read bandwidth {limit:.1f} GB/s")
    for batch, context, heads, kv_heads, dim, page_size, kv_type in decode_cases(given.quick):
        item = {"float32": 4, "bfloat16": 2, "int8": 1}[kv_type]
        num_bytes = batch * context * kv_heads * dim * 2 * item
        layers = max(2, min(30, int(300e6 / num_bytes)))
        setup = Setup(
            pool, given.isa, batch=batch, context=context, queries=1, heads=heads, kv_heads=kv_heads, dim=dim,
            page_size=page_size, kv_type=kv_type, layers=layers,
        )  # fmt: skip
        best, median = setup.seconds(12, clock)
        print(
            f"decode  B {batch:3} ctx {context:5} heads {heads}/{kv_heads} dim {dim} page {page_size} {kv_type:8} "
            f"{best * 1e6:8.1f} us a layer (median {median * 1e6:8.1f})  {num_bytes / best / 1e9:5.1f} GB/s "
            f"= {num_bytes / best / 1e9 / limit:.0%} of read"
        )
    for tokens, heads, kv_heads, dim, page_size, kv_type in prefill_cases(given.quick):
        setup = Setup(
            pool, given.isa, batch=1, context=tokens, queries=tokens, heads=heads, kv_heads=kv_heads, dim=dim,
            page_size=page_size, kv_type=kv_type, layers=2,
        )  # fmt: skip
        best, median = setup.seconds(10, clock)
        flops = 4 * dim * heads * tokens * (tokens + 1) / 2
        print(
            f"prefill {tokens:5} tokens heads {heads}/{kv_heads} dim {dim} page {page_size} {kv_type:8} "
            f"{best * 1e3:7.2f} ms a layer (median {median * 1e3:7.2f})  {flops / best / 1e9:5.0f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
