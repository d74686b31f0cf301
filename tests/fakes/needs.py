"""What tests may lack: the native library, which a machine without a C++ compiler cannot build, a kernel that is new
enough, and the Gemma file.

Where SAYFA_TEST_COMPLETE is set, as .ci/run does, a missing library is a failure: a build that broke must not pass as
skipped; and tests that are given some time take more of it.
"""

import os
import platform
import re
from pathlib import Path

import pytest

from sayfa.nn.program.native_library import missing_because


def completeness() -> bool:
    """Whether nothing may be missing here."""
    return bool(os.environ.get("SAYFA_TEST_COMPLETE"))


def native_library() -> None:
    """Skip the test, or fail it where tests must be complete, if the library is not there; else do nothing."""
    if not missing_because:
        return
    reason = f"the native library is not there ({missing_because}); with a C++ compiler, `make native` builds it"
    if completeness():
        pytest.fail(reason)
    pytest.skip(reason)


def memory_ahead_of_its_use() -> None:
    """Skip the test on a kernel older than the call (MADV_POPULATE_WRITE, Linux 5.14), by its version: whether the call
    works is what the test asks. Also where tests must be complete, since no setup can make up for it.
    """
    release = platform.release()
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < (5, 14):
        pytest.skip(f"Linux {release} gives no memory ahead of its use; 5.14 and later do")


def gemma3_file() -> Path:
    """The Gemma 3 270M GGUF file that SAYFA_TEST_GEMMA3_GGUF names; skip the test if it names none."""
    path = os.environ.get("SAYFA_TEST_GEMMA3_GGUF")
    if path is None:
        pytest.skip(
            "SAYFA_TEST_GEMMA3_GGUF names no file: Gemma 3 270M is large and has terms of its own; it is not shipped, "
            "and tiny models of its family are tested all the same"
        )
    return Path(path)
