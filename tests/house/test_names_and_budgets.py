"""Budgets and names: the core is read in one sitting, the public face is what is promised, no setting is idle."""

import ast
import inspect
import re
import subprocess
import sys

import pytest

import sayfa
from house.source import ROOT, SOURCE
from sayfa.base.config import PARTS
from sayfa.base.settings import fields

READING_PATH_LINES = 2400
MODEL_FILE_LINES = 150
PUBLIC = {
    "LLM", "Answer", "ConfigError", "EngineError", "InvalidRequest", "ModelError", "Overloaded", "RequestOutput",
    "SamplingParams", "SayfaError", "TokenChoice", "Usage", "__version__",
}  # fmt: skip


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout (an unpacked archive): only git can tell what was committed")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_library_s_folder_holds_sources_only():
    strange = [name for name in tracked() if name.startswith("csrc/") and not name.endswith((".cpp", ".h"))]
    assert not strange, f"{strange}: no sources, was a listing left there?"


def test_the_reading_path_exists_and_stays_within_one_sitting():
    named = re.findall(r"\| \d+ \| `(src/[^`]+)`", (ROOT / "docs/reading-path.md").read_text())
    assert len(named) == 12
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in named)
    assert lines <= READING_PATH_LINES, f"the twelve files have {lines} lines together"


def test_each_model_family_reads_like_a_paper():
    for path in (SOURCE / "models").glob("*.py"):
        if re.search(r"^def build\(", path.read_text(), re.MULTILINE):
            assert len(path.read_text().splitlines()) <= MODEL_FILE_LINES, path.name


def test_the_public_face_is_what_is_promised_and_every_name_works():
    assert set(sayfa.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(sayfa, name) is not None
    for name in PUBLIC - {"__version__"}:
        assert inspect.getdoc(getattr(sayfa, name))


def test_importing_the_face_loads_nothing_heavy():
    program = "import sys, sayfa; print([m for m in ('numpy', 'torch', 'tokenizers', 'fastapi') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_setting_is_read_by_somebody():
    """A knob that does nothing is worse than none."""
    read = set()
    for path in SOURCE.rglob("*.py"):
        if path.name not in ("config.py", "settings.py"):
            tree = ast.parse(path.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    idle = [name for name in fields() if name not in read]
    assert not idle, f"nobody reads {idle}"


def test_the_parts_are_frozen_and_few():
    assert len(fields()) <= 50
    for part in PARTS.values():
        assert part.__struct_config__.frozen


# A folder of somebody's own: what works there works nowhere else.
HOMES = re.compile(r"(?<![\w.-])/(?:home|Users)/\w+")


def test_no_file_names_a_folder_of_one_machine():
    found = []
    for name in tracked():
        if name.startswith(("tests/house/", "LICENSE")):
            continue
        try:
            text = (ROOT / name).read_text("utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if HOMES.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["see /home/me/x", "open('/Users/me/model')"])
def test_that_rule_finds_what_it_looks_for(text):
    assert HOMES.search(text)


def test_the_floors_are_checked_by_make_check():
    makefile = (ROOT / "Makefile").read_text()
    assert "lint-imports" in makefile
    assert "mypy" in makefile
