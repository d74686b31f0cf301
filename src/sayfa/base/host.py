"""What this machine has to give: free memory and cores, as far as the process may use them. Called by `engine.build`.

A container's limit counts as well as the machine's memory, and so does one of the shell (`ulimit -v`): what the kernel
would kill us for, or refuse, is not free.
"""

import os
import resource
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_STATM = Path("/proc/self/statm")


def free_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, statm: Path = _STATM) -> int:
    """Bytes that can be taken without swapping: the machine's available memory, or less where a cgroup or a limit of
    this process says less.

    Where neither can be read (not Linux) the physical memory stands in, halved.
    """
    limits = (_available(meminfo), _cgroup_room(cgroup), _room_of_process(statm))
    known = [value for value in limits if value is not None]
    if known:
        return min(known)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may keep busy: those it may run on, or fewer where a cgroup gives it less of their time.

    Parts of a core do not count: a worker that is stopped for the rest of a period stops all that wait for it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return cores


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room(cgroup: Path) -> int | None:
    """Limit minus use of the innermost version-2 group that shows itself here; file cache can be given back."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def _room_of_process(statm: Path) -> int | None:
    """Limits of address space and data (`ulimit -v`, `-d`) minus what this process has mapped of each."""
    try:
        pages = [int(word) for word in statm.read_text().split()]
        mapped = ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5]))
    except (OSError, ValueError, IndexError):
        return None
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    limits = [(resource.getrlimit(kind)[0], used * page_bytes) for kind, used in mapped]
    return min((max(0, limit - used) for limit, used in limits if limit != resource.RLIM_INFINITY), default=None)
