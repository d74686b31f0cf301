"""For all tests: what others have left in memory is no work for its collector while one runs, and no test leaves the
log quieter than it was.
"""

import gc
import logging
from collections.abc import Generator

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A command that a test runs in this process sets levels, which would hide from later tests what they look for."""
    loggers = [logging.getLogger(), logging.getLogger("sayfa")]
    levels = [logger.level for logger in loggers]
    try:
        return (yield)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
