"""More threads than the system gives: an error in words, in a process that goes on as if nothing had been tried."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Leaves room for some of 900 stacks, tries, and tells what is left of it.
TRY = """
import os, resource, signal, sys
import numpy as np
from fakes.single_op import Product, random_piece
from sayfa.base.errors import ModelError
from sayfa.nn.program.native_library import library
from sayfa.nn.program.program import Weight

product = Product(Weight((random_piece(np.random.default_rng(0), "F32", 64, 64),)))
x = np.ones((3, 64), np.float32)
wanted = product.run(product.executor(3, threads=1), x)
stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
stack = (8 << 20) if stack == resource.RLIM_INFINITY else stack
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + 40 * stack, resource.RLIM_INFINITY))
before = len(os.listdir("/proc/self/task")), signal.pthread_sigmask(signal.SIG_BLOCK, ())
for _ in range(3):
    try:
        WHAT
    except ERROR as error:
        print(error)
assert (len(os.listdir("/proc/self/task")), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before
assert (product.run(product.executor(3, threads=3), x) == wanted).all()
print("goes on")
"""


def tried(what: str, error: str) -> list[str]:
    """Lines that the process prints."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", TRY.replace("WHAT", what).replace("ERROR", error)],
        capture_output=True, text=True, check=False, timeout=100, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout.splitlines()


pytestmark = pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="needs a bound of address space")


def test_a_thread_that_is_refused_ends_those_before_it():
    """The pool says which one it was; no thread stays, signals are as before, and a smaller pool works."""
    *errors, last = tried("library.Pool(900)", "RuntimeError")
    assert last == "goes on"
    assert len(errors) == 3
    for error in errors:
        assert error.startswith("thread ")
        assert " of 900 cannot be started" in error


def test_the_executor_names_the_setting_and_the_way_out():
    """ModelError: the flag, its value, what was refused, what to do."""
    *errors, last = tried("product.executor(3, threads=900)", "ModelError")
    assert last == "goes on"
    assert len(errors) == 3
    for error in errors:
        assert "--threads" in error
        assert "900" in error
        assert "lower" in error
