"""All tests of the native ops once more, on a library built with the address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sayfa import _native

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")
CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
RUNTIMES = ("libasan.so", "libubsan.so")

# Loads the sanitized library under the real one's name, then runs pytest.
LOAD = """
import importlib.util, sys
import sayfa
spec = importlib.util.spec_from_file_location("sayfa._native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["sayfa._native"] = sayfa._native = module
spec.loader.exec_module(module)
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def _build(folder: Path) -> Path:
    """Only what this machine can run: with the sanitizers each instruction set takes minutes to compile."""
    runnable = ";".join(isa for isa in _native.isas() if isa != "plain")
    configure = [
        str(CMAKE), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        "-DSAYFA_SANITIZE=ON", f"-DSAYFA_X86_ISAS={runnable}", f"-DSAYFA_OUTPUT={folder}/out",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    for command in (configure, [str(CMAKE), "--build", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return next((folder / "out").glob("_native*.so"))


def _runtime(name: str) -> str:
    command = [str(COMPILER), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(COMPILER is None or CMAKE is None, reason="no C++ compiler or no cmake")
def test_native_tests_pass_under_sanitizers(tmp_path):
    """No byte outside an array, nothing that C++ leaves undefined, in any kernel that this machine can run."""
    library = _build(tmp_path / "build")
    runtimes = [_runtime(name) for name in RUNTIMES]
    tests = [str(path) for path in sorted(Path(__file__).parent.glob("test_*.py")) if path.name != Path(__file__).name]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "PYTHONMALLOC": "malloc",
    }
    # -s: a finding ends the process, and pytest would take what it said to its grave
    command = [sys.executable, "-c", LOAD, str(library), "-q", "-x", "-s", "--timeout=900", "-m", "not slow", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
