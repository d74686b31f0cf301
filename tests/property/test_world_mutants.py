"""Tests of the tests: each small break of the package is noticed by the worlds. The table is `world.mutants`."""

from pathlib import Path

import pytest

from world.mutants import MUTANTS, PACKAGE, Mutant, break_package, notice

QUICK = (
    "a release is skipped", "an abort is forgotten", "a wake-up is lost", "a death is not told",
    "a refusal is not booked", "a stall is the others' silence",
)  # fmt: skip
HANDFUL = [
    pytest.param(mutant, id=mutant.name, marks=() if mutant.name in QUICK else pytest.mark.slow) for mutant in MUTANTS
]
SEEDS = {"overload": 1, "fairness": 1}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", HANDFUL)
def test_the_worlds_notice(mutant: Mutant, tmp_path: Path) -> None:
    said = notice(mutant, tmp_path, SEEDS.get(mutant.check, 300))
    assert said.startswith("seed "), f"{mutant.name}: {said or 'nobody noticed'}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_still_fits_the_source(mutant: Mutant) -> None:
    """A mutant whose place is gone would test nothing in the long runs."""
    assert (PACKAGE / mutant.file).read_text("utf-8").count(mutant.old) == 1


def test_an_unbroken_package_passes_in_the_same_way(tmp_path: Path) -> None:
    same = Mutant("nothing", "base/clock.py", "class AwakeClock:", "class AwakeClock:")
    assert notice(same, tmp_path, 20) == ""


def test_a_mutant_whose_place_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 times"):
        break_package(Mutant("gone", "base/clock.py", "no such text", ""), tmp_path)
