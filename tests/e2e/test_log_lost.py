"""R15: a server whose log is closed, or read by nobody any more, goes on serving and ends as it should."""

import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fakes.models import make_successor_text
from sayfa.bench.launch import free_port

LIMIT_S = 90.0


class Server:
    """A `sayfa serve` over a successor model, whose stderr is a pipe of ours."""

    def __init__(self, folder):
        self.port = free_port()
        self.log, writes = os.pipe()
        fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 1 << 14)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SAYFA_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sayfa", "serve", "--model", str(folder), "--port", str(self.port),
             "--max-model-len", "128", "--kv-cache-memory", "16MiB", "--served-model-name", "m"],
            stderr=writes, stdout=subprocess.DEVNULL, env=clean,
        )  # fmt: skip
        os.close(writes)
        end_s = time.monotonic() + LIMIT_S
        while self.ask("GET", "/health/ready") != 200 and time.monotonic() < end_s and self.process.poll() is None:
            time.sleep(0.05)

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"content-type": "application/json"} if body else {}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def complete(self):
        return self.ask("POST", "/v1/completions", {"model": "m", "prompt": [1, 2], "max_tokens": 2})


@pytest.fixture
def server(tmp_path):
    made = Server(make_successor_text(tmp_path / "model", [b"one", b"two", b"three"]))
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


@pytest.mark.parametrize("fate", ["closed", "left unread"])
def test_a_server_serves_on_without_its_log(server, fate):
    assert server.complete() == 200
    if fate == "closed":
        os.close(server.log)
    # Each request writes a line of some 200 bytes, all together several times what the pipe holds.
    assert {server.complete() for _ in range(150)} == {200}
    assert server.ask("GET", "/health/live") == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(LIMIT_S) == 0
    if fate != "closed":
        told = os.read(server.log, 1 << 16).decode()
        assert "completions" in told
        assert all(line.count("INFO") <= 1 for line in told.splitlines())
        os.close(server.log)
