"""The measures name files and tests that exist, and see what is below their bar."""

import json
from pathlib import Path
from typing import Any

import pytest

from measure import coverage_bar, mutation
from measure.coverage_bar import GROUPS, PACKAGE, ROOT, TESTS, Group, files_of, judge, missed
from measure.mutation import Mutant, score


def report(num_branches: int, covered: int) -> dict[str, Any]:
    summary = {"num_statements": 4, "covered_lines": 2, "num_branches": num_branches, "covered_branches": covered}
    return {"summary": summary, "missing_lines": [7, 3], "missing_branches": [[2, 3], [4, -1], [5, 9], [7, 8]]}


def test_every_pattern_names_files_and_no_file_is_counted_twice() -> None:
    named = [file for group in GROUPS for file in files_of(group)]
    assert len(named) == len(set(named))
    assert f"{PACKAGE}core/planner.py" in named
    with pytest.raises(SystemExit, match="names no file"):
        files_of(Group("gone", ("core/gone.py",)))


@pytest.mark.parametrize("name", sorted({test.partition("::")[0] for test in [*TESTS, *mutation.TESTS]}))
def test_the_tests_that_are_run_exist(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize(("covered", "good"), [(94, False), (95, True), (100, True)])
def test_a_group_below_the_bar_is_seen(covered: int, good: bool, capsys: pytest.CaptureFixture[str]) -> None:
    group = Group("codec", ("wire/codec.py",))
    assert judge(group, {"src/sayfa/wire/codec.py": report(100, covered)}) == good
    told = capsys.readouterr().out
    assert told.startswith("ok" if good else "BAD")
    assert "wire/codec.py: 3, 7, 4→end, 5→9" in told


def test_a_line_that_never_ran_is_told_once() -> None:
    """Not once more for each jump to it and from it."""
    assert missed(report(4, 0)) == "3, 7, 4→end, 5→9"


def test_the_files_to_break_exist() -> None:
    for files in mutation.GROUPS.values():
        for file in files:
            assert (ROOT / PACKAGE / file).is_file()


def test_a_score_counts_what_was_tried_and_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A test that fails and one that runs on have noticed; one that passes, and none at all, have not."""
    monkeypatch.setattr(mutation, "PLACE", tmp_path)
    monkeypatch.setattr(mutation, "GROUPS", {"one": ("text/a.py",)})
    place = tmp_path / "mutants/src/sayfa/text"
    place.mkdir(parents=True)
    codes = {"a.x_f__mutmut_1": 1, "a.x_f__mutmut_2": 0, "a.x_f__mutmut_3": 36, "a.x_f__mutmut_4": 33, "a.y": None}
    (place / "a.py.meta").write_text(json.dumps({"exit_code_by_key": codes}))
    (place / "a.py").write_text(
        "def x_f__mutmut_orig(n):\n    m = 0\n    return n + 1\n\n\n"
        "def x_f__mutmut_2(n):\n    m = 0\n    return n - 1\n"
    )
    found = mutation.results()
    assert [mutant.how for mutant in found] == ["failed", "", "ran on", "", None]
    assert score(found) == 0.5
    assert list(mutation.change(found[1])) == ["-    return n + 1", "+    return n - 1"]
    assert score([Mutant("a", "a.py", None)]) == 0.0


def test_the_bars_are_those_of_the_figure() -> None:
    assert (coverage_bar.BAR, mutation.BAR) == (0.95, 0.85)
