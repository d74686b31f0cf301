"""F11: no parser that reads a stranger's bytes raises anything but its own errors, takes over 250 ms or over 100 MiB.

Random damage here; `make fuzz` runs the same targets guided by coverage.
"""

import random
import resource
import time

import pytest
from targets import TARGETS, Target

from fakes import needs

INPUT_LIMIT_S = 0.25
MAX_INPUTS = 1_000_000
LONGEST = ("gguf", "safetensors", "config", "template", "json-body", "events")
"""Attacked for 60 s or MAX_INPUTS where tests are complete: they read what anybody sends, or offers for download. The
others, which are parts of these or read what is our own, for 5 s."""
MEMORY_LIMIT_KIB = 100 << 10


def attack(target: Target, seed: int, limit_s: float) -> tuple[int, int]:
    """Run MAX_INPUTS damaged inputs, or what some seconds of CPU allow; give how many were accepted and refused."""
    rng, seeds = random.Random(seed), target.seeds()
    for data in seeds:
        target.run(data)  # warm, and the good ones are good
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = [0, 0]
    end_s = time.thread_time() + limit_s
    while time.thread_time() < end_s and sum(counts) < MAX_INPUTS:
        data = target.damage(rng, seeds, target.words)
        accepted, spent_s = one(target, data)
        for _ in range(3):  # a pause of the collector is no fault of the parser
            if spent_s < INPUT_LIMIT_S:
                break
            accepted, spent_s = one(target, data)
        assert spent_s < INPUT_LIMIT_S, f"{spent_s:.3f} s for {data[:300]!r}"
        counts[not accepted] += 1
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < MEMORY_LIMIT_KIB + target.keeps_kib * counts[0], f"{grown_kib} KiB after {counts} inputs"
    return counts[0], counts[1]


def one(target: Target, data: bytes) -> tuple[bool, float]:
    """Run one input; give whether it was accepted, and its CPU seconds."""
    start_s = time.thread_time()
    try:
        target.run(data)
        accepted = True
    except target.refusals:
        accepted = False
    except BaseException as error:
        error.add_note(f"the input: {data[:2000]!r}")
        raise
    return accepted, time.thread_time() - start_s


@pytest.mark.parametrize("name", TARGETS)
def test_f11_a_parser_refuses_or_reads(name: str) -> None:
    """Damaged inputs for some seconds: accepted ones keep the target's law, others get one of its own errors."""
    limit_s = (60.0 if name in LONGEST else 5.0) if needs.completeness() else 1.0
    accepted, refused = attack(TARGETS[name], seed=1, limit_s=limit_s)
    assert accepted, "no damaged input is accepted: the damage is too coarse to reach what lies behind the first check"
    assert refused or not TARGETS[name].refusals, "no damaged input is refused: the damage does nothing"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("seed", range(2, 6))
def test_f11_a_parser_refuses_or_reads_at_length(name: str, seed: int) -> None:
    attack(TARGETS[name], seed, limit_s=30.0)


@pytest.mark.parametrize("name", TARGETS)
def test_an_empty_input_and_the_target_s_own_words_are_no_surprise(name: str) -> None:
    """The plainest hostile inputs: nothing, and each word of the dictionary alone and doubled."""
    target = TARGETS[name]
    for data in (b"", *target.words, *(word * 2 for word in target.words)):
        one(target, data)
