"""The one thing that tests may lack: the native library, which a machine without a C++ compiler cannot build.

Where SAYFA_TEST_COMPLETE is set, as .ci/run does, its absence is a failure: a build that broke must not pass as
skipped.
"""

import os

import pytest

from sayfa.nn.program.native_library import missing_because


def native_library() -> None:
    """Skip the test, or fail it where tests must be complete, if the library is not there; else do nothing."""
    if not missing_because:
        return
    reason = f"the native library is not there ({missing_because}); with a C++ compiler, `make native` builds it"
    if os.environ.get("SAYFA_TEST_COMPLETE"):
        pytest.fail(reason)
    pytest.skip(reason)
