"""T32: what is installed is what was tried: every package is pinned, and nothing is run that was fetched by hand."""

import re
import tomllib
from collections.abc import Iterator

import pytest

from house.source import ROOT

PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.!+]*")
PIPED = re.compile(r"\b(?:curl|wget)\b[^\n]*\|\s*(?:ba|z|da)?sh\b")
BUILD_FILES = ("Makefile", ".ci/run")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(text: str) -> Iterator[str]:
    """Lines that say something, without their comments."""
    for line in text.splitlines():
        said = line.partition("#")[0].strip()
        if said:
            yield said


def loose(text: str) -> list[str]:
    """Lines of a list of constraints that leave a choice."""
    return [line for line in lines(text) if not PIN.fullmatch(line)]


def unguarded(text: str) -> list[str]:
    """Lines that install without a list of pins, or run what they fetch."""
    installs = [line for line in text.splitlines() if "pip install" in line]
    return [line for line in installs if not re.search(r"-[cr] constraints[\w-]*\.txt", line)] + PIPED.findall(text)


def wanted() -> set[str]:
    """All packages that the project names: to run, to build, to test."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = project["project"]["dependencies"] + project["build-system"]["requires"]
    named += lines((ROOT / "requirements-dev.txt").read_text())
    return {normal(re.split(r"[<>=!~;\[ ]", each)[0]) for each in named}


def pinned() -> set[str]:
    return {normal(line.partition("==")[0]) for line in lines((ROOT / "constraints.txt").read_text())}


@pytest.mark.parametrize("path", sorted(ROOT.glob("constraints*.txt")), ids=lambda path: path.name)
def test_each_line_is_one_version(path):
    assert not loose(path.read_text())


def test_every_package_that_is_named_is_pinned():
    assert len(wanted()) > 30
    assert wanted() <= pinned(), f"not in constraints.txt: {sorted(wanted() - pinned())}"


@pytest.mark.parametrize("name", BUILD_FILES)
def test_the_build_installs_by_the_pins_and_runs_nothing_fetched(name):
    assert not unguarded((ROOT / name).read_text())


@pytest.mark.parametrize(
    "line", ["torch", "torch>=2.13", "torch==2.*", "-e .", "git+https://a.example/torch", "a == 1"]
)
def test_a_loose_pin_is_found(line):
    assert loose(f"# pins\nnumpy==2.4.6\n{line}\n") == [line]


@pytest.mark.parametrize(
    "line",
    ["\t@$(BIN)/pip install torch", "pip install -U pip", "curl -sSf https://a.example/x | sh", "wget -O- u |bash"],
)
def test_an_unguarded_install_is_found(line):
    assert unguarded(f"setup:\n{line}\n")
