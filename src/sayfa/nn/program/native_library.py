"""The compiled library `sayfa._native`, if it is there, and what it can do here. Used by the native executor only."""

from importlib import import_module
from typing import Any

from sayfa.base.errors import ModelError

library: Any = None
missing_because = ""
try:
    library = import_module("sayfa._native")
except ImportError as error:
    missing_because = str(error)


def isas() -> list[str]:
    """Instruction sets that are compiled in and run on this machine, the best first; empty without the library."""
    names: list[str] = library.isas() if library else []
    return names


def usable_cores() -> int:
    """Cores in this process's affinity mask."""
    return int(library.usable_cores()) if library else 1


def make_pool(threads: int) -> Any:
    """Start the library's workers, 0 for one per usable core. Raises ModelError if the system refuses so many."""
    count = threads or usable_cores()
    try:
        return library.Pool(count)
    except (RuntimeError, MemoryError) as error:
        raise ModelError(
            f"--threads is {count}, but the system refuses that ({error or 'no memory'}); lower --threads, or raise the"
            " process's limits of threads (ulimit -u, pids of its control group) and of address space (ulimit -v)"
        ) from None
