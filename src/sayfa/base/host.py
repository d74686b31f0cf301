"""What this machine has to give: free memory and cores, as far as the process may use them. Called by `engine.build`.

A container's limit counts as well as the machine's memory: what the kernel would kill us for is not free.
"""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping: the machine's available memory, or less where a cgroup says less.

    Where neither can be read (not Linux) the physical memory stands in, halved.
    """
    limits = [value for value in (_available(meminfo), _cgroup_room(cgroup)) if value is not None]
    if limits:
        return min(limits)
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
