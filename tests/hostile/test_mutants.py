"""Tests of the tests: each small break of the package is noticed by the test that is there for it.

All of them in `make test-all`; a handful in `make test`.
"""

from pathlib import Path

import pytest
from mutants import MUTANTS, QUICK, Mutant, broken_text, notice


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.name, marks=() if m.name in QUICK else pytest.mark.slow) for m in MUTANTS],
)
def test_a_break_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    failed, told = notice(mutant, tmp_path)
    assert failed, f"{mutant.test} did not notice: {told}"
    assert "passed" not in told or "failed" in told or "error" in told, told


def test_an_unbroken_copy_passes(tmp_path: Path) -> None:
    """The machinery itself breaks nothing: a break that changes nothing is not noticed."""
    [salt] = [mutant for mutant in MUTANTS if mutant.name == "the salt is forgotten"]
    failed, told = notice(salt._replace(new=salt.old), tmp_path)
    assert not failed, told
    assert "1 passed" in told, told


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_break_still_fits_the_package(mutant: Mutant) -> None:
    """A break whose place is gone from the package would test nothing; one that is no Python would break too much."""
    compile(broken_text(mutant), mutant.file, "exec")
