"""A collector of `sayfa serve --log-format json` reads JSON only, from the start over a death to the end."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fakes.models import make_successor_text

LIMIT_S = 90.0


class Server:
    """A server over a successor model; its stderr goes to a file."""

    def __init__(self, folder):
        self.log = folder / "log"
        model = make_successor_text(folder / "model", [b"one", b"two", b"three"])
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SAYFA_")}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sayfa", "serve", "--model", str(model), "--port", "0", "--max-model-len", "128",
                 "--kv-cache-memory", "16MiB", "--served-model-name", "m", "--log-format", "json"],
                stderr=output, stdout=subprocess.DEVNULL, env=clean,
            )  # fmt: skip

    @property
    def lines(self):
        whole = self.log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def line(self, words):
        """The line with these words in it, as soon as it is there."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s and self.process.poll() is None:
            for line in self.lines:
                if words in line["message"]:
                    return line
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def complete(self, port, request_id):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"content-type": "application/json", "x-request-id": request_id}
        body = json.dumps({"model": "m", "prompt": [1, 2], "max_tokens": 2})
        connection.request("POST", "/v1/completions", body, headers)
        status = connection.getresponse().status
        connection.close()
        return status


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


def test_every_line_is_json_and_tells_a_story(server):
    start = server.line("serves m")
    assert start["models"] == ["m"]
    assert start["curl"].startswith(f"curl {start['address']}/v1/")
    port = int(start["address"].rpartition(":")[2])
    assert server.complete(port, "mine-1") == 200
    assert server.line("/v1/completions length")["request_id"] == "mine-1"
    [engine] = psutil.Process(server.process.pid).children()
    engine.kill()
    assert "killed by signal 9, SIGKILL" in server.line("the engine process ended")["message"]
    assert server.line("the engine serves again")["level"] == "info"
    assert server.complete(port, "mine-2") == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(LIMIT_S) == 0
    assert [line["request_id"] for line in server.lines if "request_id" in line] == ["mine-1", "mine-2"]
