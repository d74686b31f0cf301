"""Tests of the tests: each small break of the package is noticed by the test that is there for it.

All of them in `make test-all`; a handful in `make test`.
"""

from pathlib import Path

import pytest
from mutants import MUTANTS, QUICK, Mutant, break_package, notice


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


def test_each_break_still_fits_the_package(tmp_path: Path) -> None:
    """A break whose text is gone from the package would test nothing."""
    for number, mutant in enumerate(MUTANTS):
        break_package(mutant, tmp_path / str(number))
