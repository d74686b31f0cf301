"""Docs and examples are true: links lead somewhere, flags and commands exist, examples are short and run."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from house.source import ROOT
from sayfa.base.metrics import METRICS
from sayfa.base.settings import fields
from sayfa.cli.app import make_app

DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OWN_FLAGS = {"url", "config", "check-config", "system", "prompt", "output", "workload", "runs", "requests", "tokens",
             "help", "version", "max-tokens", "temperature", "top-p", "top-k", "api-key"}  # fmt: skip
NOT_OURS = {"no-deps", "unix-socket", "widths", "workloads", "peers", "rounds", "cpu-time"}  # of pip, curl, benchmarks


def relative(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), f"{target} does not exist"


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_flags_settings_and_metrics_that_are_named_exist(path):
    text = path.read_text()
    known = {field.key for field in fields().values()} | OWN_FLAGS | NOT_OURS
    for flag in re.findall(r"(?<![\w/-])--([a-z][a-z-]+[a-z])", text):
        assert flag in known or flag.removeprefix("no-") in known, f"--{flag} is no flag of ours"
    for name in re.findall(r"`sayfa:(\w+)`", text):
        assert name in METRICS or name.removesuffix("_total") in METRICS, f"sayfa:{name} is no metric of ours"


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_files_that_are_named_exist(path):
    for name in re.findall(r"`((?:src|csrc|tests|docs|benchmarks|examples)/[\w./-]+)`", path.read_text()):
        assert (ROOT / name).exists(), f"{name} does not exist"
    rooms = "base|core|nn|models|runner|engine|wire|text|server|bench|cli"
    for name in re.findall(rf"`((?:{rooms})/[\w./]+)`", path.read_text()):
        here = ROOT / "src/sayfa" / name
        assert here.exists() or here.with_suffix(".py").exists(), f"{name} does not exist"


def readme_commands():
    text = (ROOT / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if line.strip()]


def test_every_command_of_the_readme_is_one_we_have():
    commands = readme_commands()
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in commands:
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "sayfa":
            assert words[1] in list(make_app()), line
        else:
            assert words[0] == "curl"
            body = json.loads(words[words.index("-d") + 1])
            assert body["model"] == "smollm2"
    assert sum(line.startswith("sayfa") for line in commands) >= 6


def test_python_in_the_readme_is_valid():
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        compile(block, "README.md", "exec")


@pytest.mark.parametrize("path", EXAMPLES, ids=relative)
def test_an_example_fits_on_a_screen_and_says_how_it_is_run(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 40
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")


def run(*command, timeout=100):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SAYFA_")}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=clean, check=False
    )


@pytest.mark.real_model
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name != "chat_stream.py"], ids=relative)
def test_an_example_runs(path):
    done = run(str(path))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3


@pytest.mark.real_model
def test_the_example_batch_gives_one_result_a_line_in_order():
    done = run("-m", "sayfa", "generate", "examples/prompts.jsonl")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["index"] for result in results] == [0, 1, 2]
    assert [result.get("id") for result in results] == [None, "water", "hello"]
    assert all(result["text"] for result in results)


def test_the_example_settings_are_valid():
    done = run("-m", "sayfa", "serve", "--config", "examples/settings.yaml", "--check-config")
    assert done.returncode == 0, done.stderr
    assert re.search(r"max-model-len +4096 +settings\.yaml", done.stdout)


def test_the_example_for_openais_client_is_a_test_of_the_server():
    """It needs a running server: tests/e2e runs it."""
    assert Path(ROOT / "tests/e2e/test_serve.py").exists()


def test_the_reference_pages_are_what_the_definitions_make():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import reference
    finally:
        sys.path.pop(0)
    for path, text in reference.pages():
        assert path.read_text("utf-8") == text, f"{path.name} is old: run python tools/reference.py"
