"""F06: the embedded model answers greedily as the reference does, in each arithmetic that is served.

The reference reads prompt and answer at once: if each of its most likely ids is the next one of the answer, its own
greedy answer is the same, by induction. Where one is not, it goes on along the native answer, so that every id of it is
judged and not only those before the first difference.

Native products of float32 weights, and of bfloat16 ones where the processor has no product for them, round nothing
that the reference does not; only the order of additions differs, so an id may differ where two logits are as good as
equal, and nowhere else. The processor's own bfloat16 product takes rounded rows, products of 4-bit weights round what
they multiply to 8 bits: there ids differ, and the test bounds how many and by how much.
"""

import dataclasses
import statistics
from typing import NamedTuple

import numpy as np
import pytest

from fakes import needs
from fakes.steps import Driver, open_model, reference
from sayfa.hub import resolve_model
from sayfa.models.formats.dequant import dequantize
from sayfa.nn.program.native_library import isas
from sayfa.nn.program.program import Embed, Linear, Program, Weight, WeightPiece
from sayfa.runner.executors import Chosen, StepLimits, make_executor
from sayfa.text.tokenizer import load_tokenizer

NUM_PROMPTS, NUM_TOKENS, AT_ONCE = 200, 128, 25
NUM_PAGES, MAX_LEN = 300, 512
TASKS = (
    "Tell me about", "Write a short story about", "What is the use of", "Explain to a child", "List three facts on",
    "Why do people like", "Translate into French:", "def describe():  # about", "The history of", "1, 2, 3 and",
)  # fmt: skip
SUBJECTS = ("the sea", "bread", "a lighthouse", "prime numbers", "İstanbul", "old maps", "the moon", "rain in April",
            "bicycles", "a lost key", "honey bees", "chess", "tea", "glaciers", "the number seven", "paper", "owls",
            "salt and pepper", "a small town by the river where nobody locks a door", "C++ templates")  # fmt: skip


class Difference(NamedTuple):
    """At output `at` of a prompt the answer has `ours`; the reference prefers `theirs`, by `lead` in its logits."""

    prompt: int
    at: int
    ours: int
    theirs: int
    lead: float


def prompts_of(path) -> list[list[int]]:
    """200 prompts of 3 to 20 tokens."""
    tokenizer = load_tokenizer(path)
    return [tokenizer.encode(f"{task} {subject}", add_special=True) for task in TASKS for subject in SUBJECTS]


def with_weights(program: Program, kind: str) -> Program:
    """The same model with its matrices as float32 or bfloat16 (cut off, not rounded: any values will do)."""
    made: dict[int, WeightPiece] = {}

    def piece(old: WeightPiece) -> WeightPiece:
        if id(old) not in made:
            values = dequantize(old.data, old.type, (old.rows, old.columns))
            raw = values.view(np.uint8) if kind == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
            made[id(old)] = dataclasses.replace(old, type=kind, data=raw.view(np.uint8).reshape(-1))
        return made[id(old)]

    def weight(old: Weight) -> Weight:
        return Weight(tuple(piece(each) for each in old.pieces))

    ops = []
    for op in program.ops:
        if isinstance(op, Linear):
            op = dataclasses.replace(op, weight=weight(op.weight))
        elif isinstance(op, Embed):
            op = dataclasses.replace(op, table=weight(op.table))
        ops.append(op)
    return dataclasses.replace(program, ops=tuple(ops))


def greedy_answers(chosen: Chosen, config, prompts: list[list[int]]) -> list[list[int]]:
    answers = []
    for first in range(0, len(prompts), AT_ONCE):
        driver = Driver(chosen, config, num_pages=NUM_PAGES, seed=first)
        rows = dict(enumerate(prompts[first : first + AT_ONCE]))
        for row, prompt in rows.items():
            driver.add(row, prompt)
        for _ in range(NUM_TOKENS):
            driver.step(dict.fromkeys(rows, MAX_LEN))
            driver.logits = {row: {} for row in rows}
        answers += [driver.outputs[row] for row in rows]
    return answers


def differences(chosen: Chosen, config, number: int, prompt: list[int], answer: list[int]) -> list[Difference]:
    """Where the reference, having read the answer up to there, would say something else."""
    driver = Driver(chosen, config, num_pages=NUM_PAGES)
    driver.add(0, prompt + answer[:-1])
    if len(prompt) > 1:
        driver.step({0: len(prompt) - 1})
    driver.step({0: MAX_LEN}, all_logits=True)
    found = []
    for at, ours in enumerate(answer):
        logits = driver.logits[0][len(prompt) - 1 + at]
        theirs = int(logits.argmax())
        if theirs != ours:
            found.append(Difference(number, at, ours, theirs, float(logits[theirs] - logits[ours])))
    return found


def judged(weights: str | None, dtype: str, kv_type: str) -> list[Difference]:
    """All differences of 200 answers. weights: what the matrices are turned into, None for those of the file."""
    path = resolve_model("smollm2")
    config, program = open_model(path)
    if weights is not None:
        program = with_weights(program, weights)
    prompts = prompts_of(path)
    limits = StepLimits(MAX_LEN, MAX_LEN, 16, kv_type)
    fast = make_executor(program, limits, kind="native", threads=2, dtype=dtype)
    fast.executor.allocate_pages(NUM_PAGES)
    answers = greedy_answers(fast, config, prompts)
    assert len({tuple(answer) for answer in answers}) > len(answers) // 2, "the answers are all alike"
    slow = reference(program, num_pages=NUM_PAGES)
    found = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        found += differences(slow, config, number, prompt, answer)
    return found


def told(found: list[Difference]) -> str:
    """The figures, and each difference where they are few."""
    firsts = {each.prompt: each.lead for each in reversed(found)}
    if not found:
        return "0 differing ids"
    lines = [str(each) for each in found[:20]]
    return (
        f"{len(found)} of {NUM_PROMPTS * NUM_TOKENS} ids in {len(firsts)} answers; lead at the first difference of an "
        f"answer: median {statistics.median(firsts.values()):.4f}, largest {max(firsts.values()):.4f}; of all "
        f"{max(each.lead for each in found):.4f}\n" + "\n".join(lines)
    )


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("weights", "dtype", "kv_type", "largest_lead", "most"),
    [
        pytest.param("F32", "float32", "float32", 1e-3, 10, id="float32"),
        pytest.param("BF16", "bfloat16", "float32", 1e-3, 10, id="bfloat16"),
        pytest.param(None, "auto", "float32", 1.5, NUM_PROMPTS * NUM_TOKENS // 25, id="4 bits"),
    ],
)
def test_f06_200_greedy_answers_are_the_reference_s(weights, dtype, kv_type, largest_lead, most):
    """200 prompts × 128 ids. With floats, a difference by less than `largest_lead` is a tie, and there are few.

    With 4 bits 602 of the 25,600 ids differed, by 0.84 at most; with rows rounded to bfloat16 101, by 0.135.
    """
    needs.native_library()
    if dtype == "bfloat16" and isas()[0] == "avx512bf16":
        largest_lead, most = 0.3, NUM_PROMPTS * NUM_TOKENS // 100
    found = judged(weights, dtype, kv_type)
    print(told(found))
    assert len(found) <= most, told(found)
    assert all(each.lead < largest_lead for each in found), told(found)
