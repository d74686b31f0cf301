"""For all tests: what others have left in memory is no work for its collector while one runs."""

import gc

import pytest

_at: list[object] = []
"""The module whose tests run now."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Thousands of tests and what they import live as long as the process; a pass over them takes half a second.

    Tests that count CPU time mean the server's.
    """
    module = getattr(item, "module", None)
    if _at != [module]:
        _at[:] = [module]
        gc.collect(1)
        gc.freeze()
