"""For all tests: what collecting made is no work for the collector of memory while one runs."""

import gc


def pytest_collection_finish() -> None:
    """Thousands of tests and their modules live as long as the process; a pass over them takes 0.2 s.

    Tests that count CPU time mean the server's.
    """
    gc.collect()
    gc.freeze()
