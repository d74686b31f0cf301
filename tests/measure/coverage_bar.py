"""Branch coverage of what decides, parses and lets in, by the cheap tests that belong to it: `make coverage`.

    python tests/measure/coverage_bar.py [pytest's flags …]

Prints lines and branches for each group and what is missed in it; fails below `BAR` of the branches of a group. It is
no goal to call every line: a test says what must hold, and a branch that nothing can reach is taken out.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "src/sayfa/"
BAR = 0.95


class Group(NamedTuple):
    """Files of the package, as patterns below it."""

    name: str
    files: tuple[str, ...]


GROUPS = (
    Group("allocator, cache and scheduler", ("core/*.py",)),
    Group(
        "model files",
        ("base/gguf.py", "base/json_file.py", "models/formats/*.py", "models/config*.py", "models/facts.py"),
    ),
    Group("tokenizer files and plain text", ("text/gguf_tokenizer.py", "text/hf_tokenizer.py", "text/tokenizer.py",
                                             "text/p*.py", "text/control_text.py")),
    Group("chat templates and their sandbox", ("text/chat_template.py", "text/template_*.py")),
    Group("settings, strict JSON, messages", ("base/settings.py", "cli/config_file.py", "server/strict_json.py",
                                              "wire/codec.py")),
    Group("keys, trust and the gate", ("server/auth.py", "server/trust.py", "server/gate.py")),
    Group("stop strings, detokenizer, event streams", ("text/stop_strings.py", "text/detokenizer.py", "text/utf8.py",
                                                       "server/sse.py", "server/openai/chunks.py")),
)  # fmt: skip
TESTS = (
    "tests/unit/core", "tests/unit/text", "tests/unit/models", "tests/unit/server", "tests/unit/wire/test_codec.py",
    "tests/unit/base/test_settings.py", "tests/unit/test_dequant.py", "tests/unit/test_gguf.py",
    "tests/unit/test_json_file.py", "tests/unit/test_safetensors.py", "tests/unit/cli/test_cli.py",
    "tests/property/test_core_trace.py", "tests/http/test_strict_json.py", "tests/http/test_trust.py",
    "tests/http/test_doors.py", "tests/http/test_connections.py",
    *(f"tests/property/test_core_scheduler.py::test_random_histories_leak_nothing_and_change_no_answer[{seed}]"
      for seed in range(6)),
)  # fmt: skip
LEFT_OUT = (
    "million", "every_flipped", "prefix_of_a_good", "random_damage", "damaged_anywhere", "generated", "wall_of_strings",
    "10_mib", "good_json", "any_bytes", "memory_is_bounded", "the_time_of", "no_step_wants_more", "does_not_grow",
    "decisions_do_not_depend", "a_crowd_beyond", "walking_a_vocabulary", "no_message_can_bring_in", "long_texts",
    "marking_changes_no_id", "what_a_user_wrote", "than_reservations_do", "long_conversations", "test_help",
    "what_ended", "leaves_early", "module_and_script", "test_version",
)  # fmt: skip
"""Parts of names of tests that cost much and reach nothing that the others do not: they run in `make test`."""
_BOMB = "tests/unit/text/test_template_sandbox.py::test_no_template_costs_more_than_its_budget"
ENDLESS = tuple(f"{_BOMB}[{begin}" for begin in ("{% for", "{% set", "{% macro", "source"))
"""Beginnings of names of tests that use up the time that a template may have."""


def measure() -> dict[str, Any]:
    """Run the tests; return coverage's report by file."""
    include = [str(ROOT / PACKAGE / pattern) for group in GROUPS for pattern in group.files]
    watch = coverage.Coverage(branch=True, include=include, data_file=None, config_file=False)
    watch.start()
    try:
        cheap = " and ".join(f"not {word}" for word in LEFT_OUT)
        flags = ["-q", "-p", "no:xdist", "-o", "timeout=0", "-k", cheap, *(f"--deselect={name}" for name in ENDLESS)]
        failed = pytest.main([*flags, *sys.argv[1:], *TESTS])
    finally:
        watch.stop()
    if failed:
        sys.exit("the tests fail: there is nothing to measure")
    with tempfile.TemporaryDirectory() as folder:
        watch.json_report(outfile=f"{folder}/report.json")
        report: dict[str, Any] = json.loads(Path(folder, "report.json").read_text())["files"]
    return report


def files_of(group: Group) -> list[str]:
    """The group's files, from the repository's root. Each pattern names one at least."""
    found = []
    for pattern in group.files:
        matched = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).glob(pattern))
        if not matched:
            sys.exit(f"{group.name}: {pattern} names no file")
        found += matched
    return found


def missed(report: dict[str, Any]) -> str:
    """Lines that never ran, and jumps that were never made from lines that did."""
    gone = set(report["missing_lines"])
    jumps = [f"{a}→{b if b > 0 else 'end'}" for a, b in report["missing_branches"] if a not in gone and b not in gone]
    return ", ".join([*map(str, sorted(gone)), *jumps])


def judge(group: Group, report: dict[str, Any]) -> bool:
    """Print a group's figures; return whether it stands."""
    files = {name: report[name] for name in files_of(group) if name in report}
    sums = {
        key: sum(file["summary"][key] for file in files.values())
        for key in ("num_statements", "covered_lines", "num_branches", "covered_branches")
    }
    branches = sums["covered_branches"] / max(1, sums["num_branches"])
    lines = sums["covered_lines"] / max(1, sums["num_statements"])
    good = branches >= BAR
    print(
        f"{'ok  ' if good else 'BAD '} {branches:6.1%} of {sums['num_branches']:4} branches, {lines:6.1%} of "
        f"{sums['num_statements']:4} lines: {group.name}"
    )
    for name, file in files.items():
        if told := missed(file):
            print(f"         {name.removeprefix(PACKAGE)}: {told}")
    return good


def main() -> None:
    """Measure and judge; exit with 1 if a group is below the bar."""
    report = measure()
    results = [judge(group, report) for group in GROUPS]
    if not all(results):
        sys.exit(f"{results.count(False)} groups are below {BAR:.0%} of their branches")


if __name__ == "__main__":
    main()
