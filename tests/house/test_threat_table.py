"""F40: the table of docs/threat-model.md is true: tests and breaks exist, and each break is for a test of its row."""

import ast
import re
import runpy

import pytest

from house.source import ROOT

CLASSES = [f"T{number:02d}" for number in range(1, 37)]
NO_BREAK = {"T26", "T27", "T30", "T32"}
"""Three are no features yet; what T32 is about is no part of the package, its tests are fed with bad lines."""
BREAKS = {each.name: each for each in runpy.run_path(str(ROOT / "tests/hostile/breaks.py"))["MUTANTS"]}


def rows():
    """Class → the cells of its tests and of its breaks."""
    text = (ROOT / "docs/threat-model.md").read_text()
    found = re.findall(r"^\| (T\d\d) [^|]+\| ([^|]*)\| ([^|]*)\|$", text, re.MULTILINE)
    return {name: (tests.strip(), breaks.strip()) for name, tests, breaks in found}


ROWS = rows()


def named_tests(cell):
    return re.findall(r"`tests/([\w/]+\.py::\w+)`", cell)


def breaks_of(cell):
    return [name.strip() for name in cell.split(";") if name.strip()]


def test_every_class_has_its_row():
    assert list(ROWS) == CLASSES


@pytest.mark.parametrize("name", CLASSES)
def test_the_tests_of_a_class_exist(name):
    cell = ROWS[name][0]
    assert named_tests(cell) or cell == "no such feature yet"
    assert cell.count("`") == 2 * len(named_tests(cell)), "a test is spelled in another way"
    for test in named_tests(cell):
        path, _, function = test.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert function in {getattr(node, "name", None) for node in tree.body}, f"{test} does not exist"


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_a_break_that_one_of_its_tests_notices(name):
    tests, breaks = ROWS[name]
    assert bool(breaks_of(breaks)) != (name in NO_BREAK)
    for each in breaks_of(breaks):
        assert each in BREAKS, f"{each} is no break of tests/hostile/breaks.py"
        assert BREAKS[each].test.partition("[")[0] in named_tests(tests), f"{each} is noticed by {BREAKS[each].test}"


def test_no_break_is_left_out_of_the_table():
    named = {each for _, breaks in ROWS.values() for each in breaks_of(breaks)}
    assert set(BREAKS) == named
