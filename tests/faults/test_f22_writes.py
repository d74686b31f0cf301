"""F22: every place that writes to a disk or a pipe, with a disk that is full, broken or read-only, and a closed pipe.

Policy: a line for people is dropped, counted and told once, and nobody waits for it; a file of results is there whole
or as it was before, and the command ends with one clear line. Requests never notice.
"""

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys

import pytest

from sayfa import hub_download
from sayfa.base import log as log_room
from sayfa.base.errors import ConfigError, ModelError
from sayfa.base.faults import armed
from sayfa.base.log import SinkHandler, TextFormatter
from sayfa.cli import offline
from sayfa.cli.config_file import read_config_file
from sayfa.cli.output import check_output, tell, write_output

NUMBERS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EPIPE]
RESULTS = b"".join(b'{"index": %d}\n' % index for index in range(3000))


def failing(number):
    def action():
        raise OSError(number, os.strerror(number))

    return action


def short(data):
    return data[: max(1, len(data) // 3)]


# --------------------------------------------------------------------------------------------------- the log


class Pipe:
    """A log whose stderr is a small pipe. The kernel calls it writable while a whole page of it is free."""

    def __init__(self, monkeypatch):
        self.reads, self.writes = os.pipe()
        fcntl.fcntl(self.writes, fcntl.F_SETPIPE_SZ, 1 << 14)
        monkeypatch.setattr(log_room, "STDERR", self.writes)
        monkeypatch.setattr(log_room, "PIPE_WAIT_MS", 1)
        self.handler = SinkHandler(os.fdopen(self.writes, "w"))
        self.handler.setFormatter(TextFormatter())
        self.log = logging.Logger("sayfa.test")
        self.log.addHandler(self.handler)

    def lines(self):
        return [line.rpartition(": ")[2] for line in os.read(self.reads, 1 << 16).decode().splitlines()]

    def close(self):
        os.close(self.reads)
        self.handler.stream.close()


@pytest.fixture
def pipe(monkeypatch):
    made = Pipe(monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize("number", NUMBERS)
def test_a_log_that_fails_loses_lines_and_says_so_once(pipe, number):
    pipe.log.error("before")
    with armed("log.write", failing(number), every=True) as point:
        for _ in range(4):
            pipe.log.error("lost")
    pipe.log.error("after")
    pipe.log.error("and on")
    assert pipe.lines() == ["before", "(4 log lines could not be written)", "after", "and on"]
    assert (pipe.handler.lost, point.passes) == (4, 4)


def test_a_log_that_takes_a_part_at_a_time_gets_whole_lines(pipe):
    with armed("log.write", alter=short, every=True):
        pipe.log.error("first %s", "x" * 500)
        pipe.log.error("second")
    assert pipe.lines() == ["first " + "x" * 500, "second"]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_line_that_was_torn_tears_no_other(pipe, number):
    passed = []

    def half_then_nothing(data):
        passed.append(1)
        if len(passed) == 2:
            failing(number)()
        return data[: len(data) // 2]

    pipe.log.error("before")
    with armed("log.write", alter=half_then_nothing, every=True):
        pipe.log.error("torn " + "x" * 50)
    pipe.log.error("after")
    before, torn, told, after = pipe.lines()
    assert (before, told, after) == ("before", "(1 log lines could not be written)", "after")
    assert torn.count("x") < 50


def test_nobody_waits_for_a_log_that_nobody_reads(pipe):
    for _ in range(500):
        pipe.log.error("x" * 100)
    lost = pipe.handler.lost
    assert lost > 300
    assert len(pipe.lines()) == 500 - lost
    pipe.log.error("read again")
    assert pipe.lines() == [f"({lost} log lines could not be written)", "read again"]


def test_a_log_whose_reader_has_gone_is_written_to_nobody(pipe):
    os.close(pipe.reads)
    for _ in range(3):
        pipe.log.error("to nobody")
    assert pipe.handler.lost == 3
    pipe.reads = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_progress_line_that_cannot_be_shown_stops_nothing(number):
    with armed("progress.write", failing(number), every=True) as point:
        tell("half way")
    assert point.passes == 1


# --------------------------------------------------------------------------------------------------- files of results


@pytest.mark.parametrize("before", [None, b"what was there\n"])
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_file_of_results_is_whole_or_as_it_was(tmp_path, number, before, nth):
    path = tmp_path / "out.jsonl"
    if before is not None:
        path.write_bytes(before)
    with armed("output.write", alter=short, every=True):
        write_output(tmp_path / "pieces", RESULTS)
    assert (tmp_path / "pieces").read_bytes() == RESULTS
    fired = []

    def second_thoughts(data):
        fired.append(1)
        if len(fired) == nth:
            failing(number)()
        return short(data)

    with armed("output.write", alter=second_thoughts, every=True), pytest.raises(ConfigError) as caught:
        write_output(path, RESULTS)
    assert os.strerror(number) in str(caught.value)
    assert (path.read_bytes() if path.exists() else None) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.jsonl"] * (before is not None) + ["pieces"]
    write_output(path, RESULTS)
    assert path.read_bytes() == RESULTS


def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match="no-such-folder"):
        check_output(tmp_path / "no-such-folder" / "out")
    check_output(tmp_path / "out")
    check_output(None)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_plain_file_stays_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", b"results\n")
    assert os.read(reader, 100) == b"results\n"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "real").write_bytes(b"old\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_output(tmp_path / "link", b"new\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new\n"


@pytest.mark.parametrize("number", NUMBERS)
def test_results_of_a_batch_whose_file_fails_are_not_lost(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(offline, "make_llm", lambda settings: None)
    monkeypatch.setattr(offline, "answer_all", lambda model, tasks, emit: [{"index": 0, "text": "hard won"}])
    monkeypatch.setattr(offline.log, "setup", lambda *level: None)
    with armed("output.write", failing(number)):
        code = offline.run_generate(None, ["prompt"], None, tmp_path / "out", {"max_tokens": 1})
    told = capsys.readouterr()
    assert code == 1
    assert json.loads(told.out) == {"index": 0, "text": "hard won"}
    assert os.strerror(number) in told.err
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("number", NUMBERS)
def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path, number):
    file = tmp_path / "file"
    file.write_text("port: 1\n")
    with armed("settings.read", failing(number)), pytest.raises(ConfigError, match=os.strerror(number)):
        read_config_file(file)
    with armed("batch.read", failing(number)), pytest.raises(ConfigError, match=os.strerror(number)):
        offline.read_tasks(file, {})


@pytest.mark.parametrize("number", NUMBERS)
def test_a_download_onto_a_full_disk_is_one_clear_line(number):
    with armed("hub.fetch", failing(number)), pytest.raises(ModelError, match=os.strerror(number)):
        hub_download.download("owner/name", None, None, offline=True)


def sayfa(*arguments, **streams):
    return subprocess.run([sys.executable, "-m", "sayfa", *arguments], timeout=60, check=False, **streams)


def test_a_command_whose_output_disk_is_full_says_so_and_ends_with_1():
    with open("/dev/full", "wb") as full:
        done = sayfa("plugins", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    [line] = done.stderr.decode().splitlines()
    assert "No space left on device" in line


def test_closed_standard_descriptors_are_nobodys_matter(tmp_path):
    """With `2>&-` the first file that is opened would get the number 2, and what is logged would go into it."""
    script = "import os, sayfa.base.log as log; log.keep_standard_descriptors(); log.setup();" \
             "fd = os.open('made', os.O_CREAT | os.O_WRONLY); log.logger('x').error('said'); print(fd)"  # fmt: skip
    done = subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "{script}" 2>&-'], cwd=tmp_path, timeout=60,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0
    assert int(done.stdout) > 2
    assert (tmp_path / "made").read_bytes() == b""
