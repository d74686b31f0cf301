"""What a start tells a person: every fact is there, and the curl line works when it is pasted into a shell."""

import json
import logging
import shlex
import subprocess

import msgspec
import pytest

from sayfa import __version__
from sayfa.base import log
from sayfa.base.config import ServerOptions
from sayfa.base.messages import EngineInfo, MemoryPlan
from sayfa.cli.serve import show_start
from sayfa.cli.show import ProgressLine, StartTimes, curl_line, start_facts, start_report

INFO = EngineInfo(
    model="Tiny", architecture="llama", dtype="Q4_1", kv_dtype="bfloat16", vocab_size=10, max_model_len=1000,
    max_num_seqs=64, max_num_batched_tokens=512, max_queued_requests=1, max_queued_tokens=1, prefix_caching=True,
    memory=MemoryPlan(weights_bytes=100 << 20, pages_bytes=200 << 20, buffers_bytes=30 << 20, margin_bytes=40 << 20,
                      num_pages=101, page_size=32, bytes_per_page=1),
    threads=2, isa="avx2", ops={"Linear": "native", "Attention": "native"}, phases=[("read", 0.5)], pid=1,
)  # fmt: skip


def report(info):
    times = StartTimes(1.25, [("command", 0.25)])
    return "\n".join(start_report(info, ["tiny"], "http://127.0.0.1:1", times, num_keys=0, version="1"))


def test_the_report_has_plan_concurrency_phases_and_address():
    text = report(INFO)
    for fact in ("100 MiB", "200 MiB", "30 MiB", "40 MiB", "3,200 tokens", "3.20x", "1.25 s: command 0.25", "curl ",
                 "the engine: read 0.50", "http://127.0.0.1:1", "all 2 kinds of operation native"):  # fmt: skip
        assert fact in text


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
@pytest.mark.parametrize("num_keys", [0, 1, 2])
def test_a_collector_gets_the_same_facts_as_one_line(capsys, num_keys, level):
    """`--log-format json`: nothing else stands on stderr, and no field is lost to a name that the log uses itself.

    A person gets them at any `--log-level`, too; without them nobody would know the port behind `--port 0`.
    """
    info = msgspec.structs.replace(INFO, ops={"Linear": "no kernel for Q9", "Rope": "native"})
    times = StartTimes(1.25, [("command", 0.25)])
    options = ServerOptions(log_format="json", api_key=["k"] * num_keys)
    handlers = logging.getLogger().handlers[:]
    log.setup(level, "json")
    try:
        show_start(info, ["tiny", "other"], "http://127.0.0.1:1", times, options)
    finally:
        logging.getLogger().handlers[:] = handlers
    [line] = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    facts = start_facts(info, ["tiny", "other"], "http://127.0.0.1:1", times, num_keys=num_keys, version=__version__)
    assert told["message"] == f"Sayfa {__version__} serves tiny, other"
    assert {name: told[name] for name in facts} == facts
    assert told["curl"] == curl_line("http://127.0.0.1:1", "tiny", num_keys=num_keys)
    assert (told["num_tokens"], told["max_concurrency"], told["start_s"]) == (3200, 3.2, 1.25)
    assert told["ops_not_native"] == {"Linear": "no kernel for Q9"}
    assert told["engine_phases_s"] == {"read": 0.5}


def test_a_person_gets_the_report(capsys):
    show_start(INFO, ["tiny"], "http://127.0.0.1:1", StartTimes(1.25, []), ServerOptions())
    assert capsys.readouterr().err.startswith(f"Sayfa {__version__} serves tiny\n  model ")


def test_an_op_that_is_not_native_is_named_with_the_reason():
    text = report(msgspec.structs.replace(INFO, ops={"Linear": "no kernel for Q9", "Rope": "native"}))
    assert "1 of 2" in text
    assert "Linear: no kernel for Q9" in text


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://[::1]:8000", "http+unix:///tmp/a b.sock"])
@pytest.mark.parametrize("model", ["smollm2", 'it\'s "odd" $HOME'])
def test_the_curl_line_survives_the_shell(url, model):
    words = shlex.split(curl_line(url, model, num_keys=1))
    assert words[0] == "curl"
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == model
    assert body["max_tokens"] <= 100, "whoever pastes it waits for the whole answer"
    assert "Authorization: Bearer $SAYFA_API_KEY" in words


@pytest.mark.parametrize(
    ("num_keys", "given"), [(0, ""), (1, "first"), (2, "first,second"), (2, "first, second"), (2, "first")]
)
def test_the_curl_line_sends_one_key_of_those_in_the_variable(num_keys, given):
    line = curl_line("http://127.0.0.1:8000", "tiny", num_keys=num_keys).replace("curl", "printf '%s\\n'", 1)
    done = subprocess.run(["sh", "-c", line], env={"SAYFA_API_KEY": given}, capture_output=True, text=True, check=True)
    sent = [word for word in done.stdout.splitlines() if word.startswith("Authorization")]
    assert sent == (["Authorization: Bearer first"] if num_keys else [])


def test_progress_is_silent_where_nobody_looks(capsys):
    line = ProgressLine("loading")
    line.show("half", 0.5)
    line.show("whole", 1.0)
    line.clear()
    assert capsys.readouterr().err == ""


def test_a_progress_line_is_taken_away_when_ctrl_c_ends_the_work(monkeypatch):
    told = []
    monkeypatch.setattr("sayfa.cli.show.tell", told.append)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)

    def work():
        with ProgressLine("generate") as line:
            line.show("1 of 2", 0.5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert told[-1] == "\r\x1b[K"
