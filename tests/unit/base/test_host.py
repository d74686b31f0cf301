"""Laws of the host's memory: the smaller of machine and container counts, and file cache can be given back."""

import os
import resource

import pytest

from sayfa.base.host import free_memory_bytes, usable_cores


def machine(tmp_path, available_kib, limit=None, used=0, inactive_file=0):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text(f"MemTotal: 999 kB\nMemAvailable:   {available_kib} kB\n")
    cgroup.mkdir()
    if limit is not None:
        (cgroup / "memory.max").write_text(f"{limit}\n")
        (cgroup / "memory.current").write_text(f"{used}\n")
        (cgroup / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")
    return free_memory_bytes(meminfo, cgroup)


def test_without_a_container_the_machine_counts(tmp_path):
    assert machine(tmp_path, 2048) == 2048 * 1024


def test_a_container_without_limit_changes_nothing(tmp_path):
    assert machine(tmp_path, 2048, limit="max") == 2048 * 1024


def test_a_tighter_container_counts(tmp_path):
    assert machine(tmp_path, 2048, limit=100_000, used=70_000, inactive_file=20_000) == 50_000


def test_a_container_over_its_limit_has_nothing(tmp_path):
    assert machine(tmp_path, 2048, limit=100, used=900) == 0


@pytest.mark.parametrize(("kind", "used"), [(resource.RLIMIT_AS, 900), (resource.RLIMIT_DATA, 300)])
def test_a_limit_of_the_process_counts_as_a_container_s_does(tmp_path, monkeypatch, kind, used):
    """`ulimit -v` and `-d`: pages for half of the machine's memory would be refused at every start."""
    limit = 1000 * os.sysconf("SC_PAGE_SIZE")
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (limit if asked == kind else infinite, infinite))
    (tmp_path / "meminfo").write_text("MemAvailable:   99999999 kB\n")
    (tmp_path / "statm").write_text("900 500 400 1 0 300 0\n")
    free = free_memory_bytes(tmp_path / "meminfo", tmp_path / "no", tmp_path / "statm")
    assert free == (1000 - used) * os.sysconf("SC_PAGE_SIZE")


def test_without_either_there_is_still_an_answer(tmp_path):
    assert free_memory_bytes(tmp_path / "no", tmp_path / "no") > 1 << 20
    assert usable_cores() >= 1


@pytest.mark.parametrize(
    ("written", "cores"), [("max 100000", 4), ("800000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("x", 4)]
)
def test_a_container_s_share_of_the_processors_counts_in_whole_cores(tmp_path, monkeypatch, written, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cpu.max").write_text(written + "\n")
    assert usable_cores(tmp_path) == cores
    assert usable_cores(tmp_path / "no") == 4
