"""`sayfa serve` as a user starts it: real processes, the real model, the curl line of its own report, a clean end."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sayfa.bench.launch import free_port

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.real_model


class Server:
    """A `sayfa serve` of this test; `report` is what it printed until it was ready."""

    def __init__(self, folder, *flags):
        self.log = folder / "log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SAYFA_")}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sayfa", "serve", *flags], cwd=ROOT, stdout=output, stderr=output, env=clean
            )
        limit = time.monotonic() + 90
        while "curl " not in self.report and self.process.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)

    @property
    def report(self):
        return self.log.read_text()

    @property
    def url(self):
        return re.search(r"address +(\S+)", self.report)[1]

    def end(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(40)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Server(
        tmp_path_factory.mktemp("serve"), "--port", "0", "--max-model-len", "1024", "--kv-cache-memory", "64MiB"
    )
    yield running
    running.end(signal.SIGKILL)


def test_the_report_tells_plan_phases_ops_and_address(server):
    for words in ("serves smollm2", "weights", "pages", "buffers", "margin", "Maximum concurrency for 1,024 tokens",
                  "kinds of operation native", "start ", "http://127.0.0.1:"):  # fmt: skip
        assert words in server.report, server.report


def test_the_curl_line_of_the_report_works(server):
    [line] = [line.strip() for line in server.report.splitlines() if line.strip().startswith("curl ")]
    done = subprocess.run([*shlex.split(line), "-s", "-m", "60"], capture_output=True, text=True, check=True)
    assert '"finish_reason"' in done.stdout
    assert '"role":"assistant"' in done.stdout.replace('": "', '":"')


def test_the_example_with_openais_client_streams_an_answer(server):
    done = subprocess.run(
        [sys.executable, "examples/chat_stream.py", server.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20


def test_the_terminal_talks_to_it(server):
    done = subprocess.run(
        [sys.executable, "-m", "sayfa", "chat", "--url", server.url, "--max-tokens", "8"],
        input="Hello\nAnd again\n", capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 3


def test_the_bench_measures_it_and_writes_json(server, tmp_path):
    target = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "sayfa", "bench", "serve", "--url", server.url, "-w", "single:1", "--warm-up", "0",
         "-o", str(target)],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "single" in done.stdout
    assert '"tokens_out": 256' in target.read_text()


def test_the_bench_starts_a_server_of_its_own_with_the_same_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("SAYFA_PORT", "1")  # the bench chooses its own port
    monkeypatch.setenv("SAYFA_MAX_NUM_SEQS", "3")
    target = tmp_path / "figures.json"
    flags = ["-w", "single:1", "--warm-up", "0", "--kv-cache-memory", "64MiB", "-o", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "sayfa", "bench", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "first token" in done.stdout
    assert json.loads(target.read_text())["peak_mib"] > 50


def test_a_port_in_use_is_told_in_one_line_with_exit_code_2(server, tmp_path):
    port = server.url.rsplit(":", 1)[1]
    second = Server(tmp_path, "--port", port)
    assert second.end() == 2
    assert f"port {port}" in second.report.strip().splitlines()[-1]
    assert "Traceback" not in second.report


def test_at_a_terminal_an_error_does_not_stand_behind_the_progress_line():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sayfa", "serve", "--port", "0", "--max-model-len", "100000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the terminal's end, once nobody writes to it
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait(40) == 2
    assert b"loading [" in shown
    assert re.search(rb"(\n|\r\x1b\[K)[0-9:]{8} ERROR ", shown), shown


def test_sigterm_ends_with_0_and_leaves_no_process(tmp_path):
    running = Server(tmp_path, "--port", str(free_port()), "--kv-cache-memory", "64MiB", "--max-model-len", "512")
    children = subprocess.run(["pgrep", "-P", str(running.process.pid)], capture_output=True, text=True, check=False)
    assert running.end() == 0, running.report
    for child in children.stdout.split():
        assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len", "100000"], "max-model-len"),
        (["--kv-cache-memory", "1MiB", "--max-model-len", "4096"], "kv-cache-memory"),
        (["--ssl-certfile", "/no.pem", "--ssl-keyfile", "/no.pem"], "--ssl-certfile /no.pem cannot be read"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line_with_exit_code_2(tmp_path, flags, words):
    running = Server(tmp_path, "--port", "0", *flags)
    assert running.end() == 2
    assert words in running.report.strip().splitlines()[-1], running.report
    assert "Traceback" not in running.report
