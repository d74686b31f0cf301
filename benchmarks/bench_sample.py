"""Speed of the native draw: time of one call over all rows, greedy and sampled, with and without log-probabilities.

    PYTHONPATH=src python benchmarks/bench_sample.py [--threads 2] [--isa NAME] [--vocab 49152]

Several matrices of logits are used in turn, so that a call does not find its rows in the second-level cache.
"""

import argparse
import time

import numpy as np

from sayfa import _native
from sayfa.runner.draw import DrawColumns, draw

CASES = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "top-k 40": {"temperature": 0.8, "top_k": 40},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 40, top-p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top-k 5000": {"temperature": 0.8, "top_k": 5000},
    "top-p 0.95, flat logits": {"temperature": 50.0, "top_p": 0.95},
    "greedy, 5 log-probabilities": {"num_top": 5},
}


def columns(rows: int, ask: dict[str, float]) -> DrawColumns:
    """Give all rows the same wishes."""
    return DrawColumns(
        temperature=np.full(rows, ask.get("temperature", 0.0), np.float32),
        top_p=np.full(rows, ask.get("top_p", 1.0), np.float32),
        min_p=np.full(rows, ask.get("min_p", 0.0), np.float32),
        top_k=np.full(rows, ask.get("top_k", 0), np.int32),
        uniform=np.random.default_rng(0).random(rows),
        num_top=np.full(rows, ask.get("num_top", -1), np.int32),
    )


def time_native(pool, isa: str, matrices: list[np.ndarray], ask: DrawColumns, *, clock) -> tuple[float, float]:
    """Best and median seconds of one call."""
    rows, vocab = matrices[0].shape
    token, rank, ids = np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.zeros((rows, 20), np.int32)
    logprob, values = np.zeros(rows, np.float32), np.zeros((rows, 20), np.float32)
    times = []
    for turn in range(60):
        logits = matrices[turn % len(matrices)]
        start = clock()
        _native.sample(
            pool, isa, logits.ctypes.data, vocab, rows, vocab, ask.temperature.ctypes.data, ask.top_p.ctypes.data,
            ask.min_p.ctypes.data, ask.top_k.ctypes.data, ask.uniform.ctypes.data, token.ctypes.data,
            ask.num_top.ctypes.data, 20, logprob.ctypes.data, rank.ctypes.data, ids.ctypes.data, values.ctypes.data,
        )  # fmt: skip
        times.append(clock() - start)
    return min(times), float(np.median(times))


def main() -> None:
    """Print one line per case and number of rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--cpu-time", action="store_true", help="count this thread's CPU time; with --threads 1")
    given = parser.parse_args()
    clock = time.thread_time if given.cpu_time else time.perf_counter
    pool = _native.Pool(given.threads)
    print(f"isa {given.isa or _native.isas()[0]}, {given.threads} threads, vocabulary {given.vocab}")
    rng = np.random.default_rng(1)
    for rows in (1, 32):
        count = max(2, 12 // rows)
        matrices = [(rng.standard_normal((rows, given.vocab)) * 3).astype(np.float32) for _ in range(count)]
        for name, asked in CASES.items():
            ask = columns(rows, asked)
            best, median = time_native(pool, given.isa, matrices, ask, clock=clock)
            start = time.perf_counter()
            draw(matrices[0][:4], columns(4, asked))
            reference = (time.perf_counter() - start) / min(4, rows) * 1e6
            print(
                f"{rows:3} rows, {name:28} {best * 1e6:8.1f} us (median {median * 1e6:8.1f})  "
                f"{best / rows * 1e6:6.1f} us a row; numpy {reference:7.0f} us a row"
            )


if __name__ == "__main__":
    main()
