"""The pool: any number of workers, a busy neighbour, and the C++ attack on it where a compiler is at hand."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fakes.single_op import Product, random_piece
from sayfa.nn.program.native_library import usable_cores
from sayfa.nn.program.program import Weight

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("clang++")


def test_usable_cores_are_those_of_the_affinity_mask():
    """The default number of workers follows taskset and cgroups' cpusets."""
    mine = sorted(os.sched_getaffinity(0))
    assert usable_cores() == len(mine)
    code = "import os, sayfa.nn.program.native_library as n; os.sched_setaffinity(0, {%d}); print(n.usable_cores())"
    source = str(CSRC.parent / "src")
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        [sys.executable, "-c", code % mine[0]], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert told.stdout.strip() == "1"


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_any_number_of_workers_gives_the_same_bits(threads):
    """More workers than cores, more than panels: slower perhaps, never different."""
    rng = np.random.default_rng(0)
    weight = Weight((random_piece(rng, "Q4_0", 96, 256), random_piece(rng, "BF16", 70, 256)))
    x = rng.standard_normal((20, 256), dtype=np.float32)
    alone, product = Product(weight), Product(weight)
    wanted = alone.run(alone.executor(20, threads=1), x)
    executor = product.executor(20, threads=threads)
    assert executor.threads == threads
    for num_rows in (20, 1, 7):
        assert (product.run(executor, x[:num_rows]) == wanted[:num_rows]).all()


def _compile(folder: Path, *flags: str) -> Path:
    program = folder / "threads_test"
    sources = [str(CSRC / name) for name in ("test/threads_test.cpp", "threads.cpp", "memory.cpp")]
    subprocess.run([str(COMPILER), "-std=gnu++17", "-O2", *flags, *sources, "-o", str(program), "-pthread"], check=True)
    return program


def _attack(program: Path, rounds: int) -> None:
    done = subprocess.run([str(program), str(rounds)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_every_chunk_is_done_once_and_jobs_never_overlap(tmp_path):
    """Thousands of short job lists on 1 to 64 workers."""
    _attack(_compile(tmp_path), 30)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_pool_under_sanitizers(tmp_path, sanitizer):
    """No data race, no use after free: the gate orders everything that workers share."""
    _attack(_compile(tmp_path, f"-fsanitize={sanitizer}", "-g"), 30)


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_a_busy_neighbour_takes_no_more_than_its_share():
    """One process that spins on any core: at least 45 % of the undisturbed speed is left (one core of two is 50 %)."""
    rng = np.random.default_rng(0)
    product = Product(Weight((random_piece(rng, "Q4_0", 3072, 576),)))
    executor = product.executor(32, threads=usable_cores())
    x = rng.standard_normal((32, 576), dtype=np.float32)

    def speed() -> float:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < 2.0:
            product.run(executor, x)
            count += 1
        return count / (time.perf_counter() - start)

    undisturbed = speed()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            disturbed = speed()
        finally:
            neighbour.kill()
    assert disturbed >= 0.45 * undisturbed, f"{disturbed:.0f} of {undisturbed:.0f} products a second are left"
