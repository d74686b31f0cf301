"""Native objects end with their last holder, and an interpreter that ends while some are held says nothing about it."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fakes.programs import RandomProgram
from sayfa.nn.program.native import NativeExecutor
from sayfa.nn.program.native_library import library

SRC = Path(__file__).parents[2] / "src"

HELD = {
    "by a thread that is not waited for": """
import threading
def hold(pool):
    here.set()
    threading.Event().wait()
here = threading.Event()
threading.Thread(target=hold, args=(library.Pool(2),), daemon=True).start()
here.wait()
""",
    "in a cycle that is not collected": """
import gc
class Holder: pass
holder = Holder()
holder.itself, holder.pool = holder, library.Pool(2)
gc.freeze()
""",
}


@pytest.mark.parametrize("held", HELD)
def test_an_end_with_native_objects_held_is_silent(held):
    """Python frees neither such frames nor such cycles; a list of leaks would look like a fault of ours."""
    code = "from sayfa.nn.program.native_library import library\n" + HELD[held]
    path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout + done.stderr == ""


def num_threads(expected: int) -> int:
    """Threads of this process, counted again while they are more: one that was joined is listed a moment longer."""
    for _ in range(100_000):
        if (now := len(os.listdir("/proc/self/task"))) <= expected:
            break
        os.sched_yield()
    return now


def test_what_nobody_holds_ends_at_once():
    """A pool's workers end with the last of those who use it; an executor is in no cycle that would keep it."""
    gc.collect()  # else what other tests have left could end meanwhile
    before = len(os.listdir("/proc/self/task"))
    pool = library.Pool(4)
    program = library.Program(pool, "")
    assert num_threads(before + 3) == before + 3
    del pool
    assert num_threads(before + 3) == before + 3
    del program
    assert num_threads(before) == before
    executor = NativeExecutor(
        RandomProgram(0).build(20), threads=4, max_tokens=8, max_rows=8, page_size=16, kv_type="float32"
    )
    executor.allocate_pages(3)
    logits = executor.view(executor._program.logits)
    assert num_threads(before + 3) == before + 3
    del executor
    assert num_threads(before) == before
    logits[:] = 1.0  # a view keeps the memory that it looks at
    assert np.all(logits == 1.0)
