"""The command line: exit codes, one clear last line, help that is complete and quick, files that are read strictly."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.tls_files import CERTIFICATE, KEY, LOCKED_KEY, OTHER_KEY
from sayfa import __version__
from sayfa.base.config import ServerOptions
from sayfa.base.errors import ConfigError
from sayfa.base.settings import fields, load
from sayfa.cli import main
from sayfa.cli.config_file import read_config_file
from sayfa.cli.serve import shown_name, since_start_s
from sayfa.server.serve import bind

COMMANDS = ("serve", "generate", "chat", "bench", "plugins")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SAYFA_"):
            monkeypatch.delenv(name)


def run(capsys, *arguments):
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"{__version__}\n", "")


def test_help_names_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)


def test_help_of_serve_shows_every_setting_with_its_variable(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(capsys, "serve", "--help")
    for field in fields().values():
        assert field.flag in out
        assert field.variable in out


def test_help_of_offline_commands_shows_no_server_setting(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(capsys, "generate", "--help")
    assert "--threads" in out
    assert "--cors-origins" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], "--port"), (["serve", "--port", "70000"], "--port is '70000'"),
        (["serv"], "serve"), (["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["serve", "/nowhere.gguf"], "nowhere.gguf"), (["serve", "--max-num-seqs"], "max-num-seqs"),
        (["generate"], "nothing to do"), (["generate", "/nowhere.jsonl"], "nowhere.jsonl"),
        (["bench", "serve", "-w", "lod8"], "load8"), (["bench", "serve", "--runs", "0"], "--runs"),
        (["bench", "serve", "--url", "ftp://x"], "http"), (["bench", "paging", "--tokens", "1"], "--tokens"),
        (["chat", "--url", "http://127.0.0.1:1", "--api-key", "clé"], "--api-key holds characters"),
        (["bench", "serve", "--url", "http://127.0.0.1:1", "--api-key", "a\nb"], "--api-key holds characters"),
        (["serve", "--host", "0.0.0.0"], "--api-key"), (["serve", "--chat-template", "/nowhere"], "--chat-template"),
    ],
)  # fmt: skip
def test_a_usage_error_ends_with_code_2_and_names_the_way_out(capsys, arguments, words):
    try:
        code, _, err = run(capsys, *arguments)
    except SystemExit as exit:
        code, err = exit.code, "".join(capsys.readouterr())
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_check_config_shows_each_source_and_hides_keys(capsys, monkeypatch, tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("max-num-seqs: 3\nport: 1\n")
    monkeypatch.setenv("SAYFA_PORT", "2")
    monkeypatch.setenv("SAYFA_CONFIG", str(file))
    code, out, _ = run(capsys, "serve", "--check-config", "--api-key", "a-secret-key", "--no-offline")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 0
    assert rows["max-num-seqs"] == ["3", "s.yaml"]
    assert rows["port"] == ["2", "SAYFA_PORT"]
    assert rows["offline"] == ["False", "flag"]
    assert rows["block-size"] == ["32", "default"]
    assert "a-secret-key" not in out


def test_flags_of_a_list_may_hold_commas(capsys):
    given = ["--served-model-name", "a,b", "--served-model-name", "c", "--cors-origins", "https://a,https://b"]
    code, out, _ = run(capsys, "serve", "--check-config", *given)
    assert code == 0
    assert "  a, b, c  " in out
    assert "  https://a, https://b  " in out


@pytest.mark.parametrize(
    ("certificate", "key", "proxy"),
    [
        (None, KEY, "10.0.0.7"), (CERTIFICATE, OTHER_KEY, "10.0.0.7"), ("junk", KEY, "10.0.0.7"),
        (CERTIFICATE, LOCKED_KEY, "10.0.0.7"), (CERTIFICATE, KEY, "10.0.0.7/8"), (CERTIFICATE, KEY, "proxy"),
    ],
)  # fmt: skip
def test_check_config_refuses_what_the_start_would_with_the_same_line(capsys, tmp_path, certificate, key, proxy):
    files = [tmp_path / "cert.pem", tmp_path / "key.pem"]
    for file, text in zip(files, (certificate, key), strict=True):
        if text is not None:
            file.write_text(text)
    chain, private = map(str, files)
    with pytest.raises(ConfigError) as refused:
        bind(ServerOptions(port=0, ssl_certfile=chain, ssl_keyfile=private, trusted_proxies=[proxy]))
    flags = ["--ssl-certfile", chain, "--ssl-keyfile", private, "--trusted-proxies", proxy]
    code, out, err = run(capsys, "serve", "--check-config", *flags)
    assert (code, out) == (2, "")
    assert err.splitlines() == [f"sayfa: error: {refused.value}"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "cannot be read: No such file"), (b"\xff", "no UTF-8"),
        (b"\n{% if %}", "cannot be compiled in line 2: Expected"), (b"a" * ((1 << 20) + 1), "at most 1048576"),
        (b"{{ messages | no_such_filter }}", "cannot be compiled in line 1: No filter named 'no_such_filter'.\n"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused_by_check_start_and_offline_alike(capsys, tmp_path, template, words):
    file = tmp_path / "chat.jinja"
    if template is not None:
        file.write_bytes(template)
    lines = set()
    for command in (["serve", "--check-config"], ["serve"], ["chat"], ["generate", "-p", "x"]):
        code, out, err = run(capsys, *command, "--chat-template", str(file))
        assert (code, out) == (2, "")
        lines.add(err)
    [line] = lines
    assert line.startswith(f"sayfa: error: --chat-template {file} cannot be ")
    assert words in line


def test_check_config_accepts_a_template_that_can_be_used(capsys, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    code, out, _ = run(capsys, "serve", "--check-config", "--chat-template", str(file))
    assert code == 0
    assert str(file) in out


@pytest.mark.parametrize("flags", [["--model", "nowhere"], ["--chat-template", "/nowhere"], ["--uds", "/nowhere/s"]])
def test_a_collector_gets_the_reason_of_a_failed_start_as_json(tmp_path, flags):
    model = [] if "--model" in flags else ["--model", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "sayfa", "serve", *model, *flags, "--log-format", "json", "--log-level", "error"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert "nowhere" in lines[-1]["message"]


NEVER_SENT = [
    *[("--cors-origins", origin) for origin in
      ("a.example", "https://a.example/", "https://A.example", "https://a.example:443", "http://a:80", "https://")],
    *[("--allowed-hosts", host) for host in
      ("a.example:8000", "https://a.example", "a.example/", "::1", "*.example", "[::1]:80", "é.example")],
]  # fmt: skip


@pytest.mark.parametrize(("flag", "value"), NEVER_SENT)
def test_a_name_that_no_request_could_have_is_refused_and_not_met_by_silence(capsys, flag, value):
    """All pages of a browser, or all requests, would be turned away by a server that seems well."""
    option = {flag[2:].replace("-", "_"): [value]}
    with pytest.raises(ConfigError) as refused:
        bind(ServerOptions(port=0, **option))
    code, _, err = run(capsys, "serve", "--check-config", flag, value)
    assert (code, err) == (2, f"sayfa: error: {refused.value}\n")
    assert err.startswith(f"sayfa: error: {flag} holds '{value}'")


def test_names_that_requests_have_are_taken(capsys):
    origins = "*,null,https://a.example,http://localhost:3000,https://[::1]:8443,chrome-extension://abc"
    hosts = "*,a.example,A.Example,a_b,127.0.0.1,[::1],localhost"
    assert run(capsys, "serve", "--check-config", "--cors-origins", origins, "--allowed-hosts", hosts)[0] == 0


def test_check_config_accepts_files_of_tls_that_fit(capsys, tmp_path):
    for name, text in (("cert.pem", CERTIFICATE), ("key.pem", KEY)):
        (tmp_path / name).write_text(text)
    flags = ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
    code, out, _ = run(capsys, "serve", "--check-config", *flags)
    assert (code, "ssl-keyfile" in out) == (0, True)


@pytest.mark.parametrize(
    ("given", "sent"), [("k1", "k1"), ("k1,k2", "k1"), (" k1 , k2", "k1"), ("k1,k2,k3", "k1"), (None, None)]
)
@pytest.mark.parametrize("by_flag", [True, False])
@pytest.mark.parametrize("command", ["chat", "bench serve"])
def test_a_client_sends_the_first_of_several_keys(monkeypatch, command, by_flag, given, sent):
    seen = []
    for runner in ("sayfa.cli.chat.run_chat", "sayfa.cli.benches.run_bench_serve"):
        monkeypatch.setattr(runner, lambda settings, url, api_key, *rest: seen.append(api_key) or 0)
    if given and not by_flag:
        monkeypatch.setenv("SAYFA_API_KEY", given)
    flags = ["--api-key", given] if given and by_flag else []
    assert main([*command.split(), "--url", "http://127.0.0.1:1", *flags]) == 0
    assert seen == [sent]


def test_plugins_tells_where_each_name_comes_from(capsys):
    code, out, _ = run(capsys, "plugins")
    assert code == 0
    assert "sayfa.models.llama:build" in out
    assert "smollm2" in out


def test_help_loads_nothing_heavy():
    """The time of `--help` is the time of its imports; these must not be among them."""
    program = (
        "import sys; from sayfa.cli import main; main(['serve', '--check-config']); "
        "print([m for m in ('torch', 'numpy', 'fastapi', 'zmq', 'tokenizers', 'httpx2') if m in sys.modules])"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SAYFA_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=clean)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nport: 2\n", "line 2: key 'port' stands twice"), ("a: &x 1\nb: *x\n", "line 2: aliases"),
        ("- 1\n", "holds a list"), ("a: [1\n", "line"), ("a: !!python/object/apply:os.system ['true']\n", "line 1"),
        ("\x00", "s.yaml"), ("{" * 5000, "s.yaml"), ("text", "holds a str"), ("a: !!timestamp\n", "tags"),
        ("? [a]\n: b\n", "line 1: a key must be a word"), ('x: 1\na: "\\UFFFFFFFF"\n', "names no character"),
    ],
)  # fmt: skip
def test_a_settings_file_is_read_strictly(tmp_path, text, words):
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"s\.yaml") as caught:
        read_config_file(file)
    assert words in str(caught.value)


def test_a_settings_file_may_be_empty_or_hold_lists(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("# nothing\n")
    assert read_config_file(file) == {}
    file.write_text("api-key: [a, b]\nport: 8001\n")
    assert read_config_file(file) == {"api-key": ["a", "b"], "port": "8001"}


AS_WRITTEN = ("0x1234abcd", "1.10", "010", "0o17", "1_000", "0b_", "1:30", "2024-13-45", "2024-01-01", "1e5", ".inf",
              "yes", "Off", "true", "=", "<<")  # fmt: skip


def from_file(tmp_path, text):
    file = tmp_path / "s.yaml"
    file.write_text(text)
    return load({}, {}, read_config_file(file), "s.yaml")


@pytest.mark.parametrize("word", AS_WRITTEN)
def test_text_in_a_settings_file_is_what_is_written_whatever_yaml_takes_it_for(tmp_path, word):
    settings = from_file(tmp_path, f"api-key: {word}\nrevision: {word}\nserved-model-name: [{word}, '{word}']\n")
    assert settings.server.api_key == [word]
    assert settings.model.revision == word
    assert settings.model.served_model_name == [word, word]


@pytest.mark.parametrize("word", ["010", "-010", "00", "0x1F90", "0b11", "0o17", "1:30", "017k"])
def test_a_number_that_can_be_read_in_two_ways_is_refused(tmp_path, word):
    with pytest.raises(ConfigError, match=f"s.yaml: port is '{word}'"):
        from_file(tmp_path, f"port: {word}\n")


def test_numbers_and_switches_in_a_settings_file_have_the_forms_of_flags(tmp_path):
    settings = from_file(
        tmp_path,
        "port: 0\nmax-model-len: 4_096\nkv-cache-memory-share: .5\noffline: yes\nlog-requests: Off\nthreads: ~\n"
        "shutdown-timeout: 2.50\nblock-size: 16\nuds:\n",
    )
    assert (settings.server.port, settings.model.max_model_len, settings.cache.kv_cache_memory_share) == (0, 4096, 0.5)
    assert (settings.model.offline, settings.server.log_requests, settings.parallel.threads) == (True, False, None)
    assert (settings.server.shutdown_timeout, settings.cache.block_size, settings.server.uds) == (2.5, 16, None)


@pytest.mark.parametrize("text", ["api-key: [a, ~]", "api-key: {a: b}", "api-key: [[a]]", "served-model-name: ~",
                                  "<<: {port: 1}", "host: ~", "host: [a]"])  # fmt: skip
def test_what_is_no_text_is_never_made_into_one(tmp_path, text):
    with pytest.raises(ConfigError, match=r"s\.yaml"):
        from_file(tmp_path, text + "\n")


def test_a_large_or_binary_settings_file_is_refused(tmp_path):
    file = tmp_path / "s.yaml"
    for data, words in ((b"a" * (1 << 20 | 1), "1 MiB"), (b"\xff\xfe", "UTF-8")):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=words):
            read_config_file(file)


def test_a_device_in_the_place_of_a_settings_file_is_read_no_further_than_a_file():
    with pytest.raises(ConfigError, match="1 MiB"):
        read_config_file(Path("/dev/zero"))


def test_a_path_is_never_shown_as_the_models_name(tmp_path):
    (tmp_path / "tiny.gguf").touch()
    (tmp_path / "folder").mkdir()
    assert shown_name(str(tmp_path / "tiny.gguf")) == "tiny"
    assert shown_name(str(tmp_path / "folder")) == "folder"
    assert shown_name("smollm2") == "smollm2"
    assert shown_name("owner/name") == "owner/name"


def test_the_time_since_the_start_counts_the_interpreters_own():
    seconds = float(
        subprocess.run(
            [sys.executable, "-c", "from sayfa.cli.serve import since_start_s as s; print(s())"],
            capture_output=True, text=True, check=True,
        ).stdout
    )  # fmt: skip
    assert 0.02 < seconds < 60
    assert since_start_s() > seconds / 1000


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m sayfa plugins | head -c 1", shell=True, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr


def test_what_an_encoding_lacks_is_escaped_and_ends_no_command(monkeypatch):
    sink = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(sink, "ascii"))
    assert main(["serve", "--served-model-name", "é", "--check-config"]) == 0
    assert b" \\xe9 " in sink.getvalue()


def test_module_and_script_are_the_same_command():
    done = subprocess.run([sys.executable, "-m", "sayfa", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


def test_json_is_a_settings_file(tmp_path):
    """`bench` hands settings to its own server as JSON, which is YAML."""
    values = {
        "model": "a: b # c",
        "port": 8001,
        "offline": True,
        "chat-template": "x\ny",
        "kv-cache-memory-share": 0.25,
    }
    found = from_file(tmp_path, json.dumps(values))
    assert found == load({}, {}, values, "s.yaml")
    assert found.model.model == "a: b # c"
    assert found.server.port == 8001


@pytest.mark.parametrize(("command", "word"), [("serve", "false"), ("chat", "True"), ("generate", "no")])
def test_a_word_behind_a_switch_is_told_as_such(capsys, command, word):
    """It was looked for as a model, or as a file of prompts."""
    code, _, err = run(capsys, command, "--offline", word)
    assert code == 2
    assert f"'{word}' is taken for a model or a file" in err
    assert f"--offline={word}" in err


@pytest.mark.parametrize(
    "flags", [["--model", "gr\udcf6.gguf"], ["--served-model-name", "gr\udcf6"], ["--uds", "\udcf6"]]
)
def test_what_is_no_utf_8_is_refused_by_name(capsys, flags):
    """A name from a disk of another encoding; it ended the start with a traceback, behind a check that passed."""
    code, _, err = run(capsys, "serve", "--check-config", *flags)
    assert code == 2
    assert err.startswith(f"sayfa: error: {flags[0]} ")
    assert "UTF-8" in err


def test_ctrl_c_while_the_command_is_imported_is_an_end_without_a_traceback():
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sayfa.cli.app': raise KeyboardInterrupt\n"
        "from sayfa.cli import main\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.exit(main(['--version']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
