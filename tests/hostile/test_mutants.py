"""Tests of the tests: each small break of the package is noticed by the test that is there for it, for its own reason.

All of them in `make test-all`; a handful in `make test`.
"""

from pathlib import Path

import pytest
from breaks import MUTANTS, Mutant
from mutants import WALL_LIMIT_S, broken_text, notice

QUICK = ("a GGUF file may end anywhere", "the salt is forgotten")
"""Those that `make test` tries; the others take a server or a model each."""


@pytest.mark.timeout(WALL_LIMIT_S + 60)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.name, marks=() if m.name in QUICK else pytest.mark.slow) for m in MUTANTS],
)
def test_a_break_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    verdict = notice(mutant, tmp_path)
    assert not verdict.passed, f"{mutant.test} did not notice"
    assert verdict.noticed, f"{mutant.test} failed, but for another reason than {mutant.told!r}: {verdict.said}"


@pytest.mark.timeout(WALL_LIMIT_S + 60)
def test_an_unbroken_copy_passes(tmp_path: Path) -> None:
    """The machinery itself breaks nothing: a break that changes nothing is not noticed."""
    [salt] = [mutant for mutant in MUTANTS if mutant.name == "the salt is forgotten"]
    verdict = notice(salt._replace(new=salt.old), tmp_path)
    assert verdict.passed, verdict.said
    assert not verdict.noticed


@pytest.mark.timeout(WALL_LIMIT_S + 60)
@pytest.mark.slow
def test_a_test_that_fails_for_another_reason_has_not_noticed(tmp_path: Path) -> None:
    """A file that cannot be imported fails every test."""
    [salt] = [mutant for mutant in MUTANTS if mutant.name == "the salt is forgotten"]
    verdict = notice(salt._replace(new="nobody_knows_this, request.salt)"), tmp_path)
    assert not verdict.passed
    assert not verdict.noticed


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_break_still_fits_the_package(mutant: Mutant) -> None:
    """A break whose place is gone from the package would test nothing; one that is no Python would break too much."""
    compile(broken_text(mutant), mutant.file, "exec")
