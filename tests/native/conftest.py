"""All tests of this folder need the native library."""

import pytest

from fakes import needs


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    """Skip or fail without it."""
    needs.native_library()
