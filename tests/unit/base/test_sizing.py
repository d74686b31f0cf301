"""Laws of sizing: formulas equal what files and executors really take, and a plan's parts add up within the budget."""

import random

import pytest

from fakes.models import FAMILIES, make_tiny
from fakes.steps import open_model
from sayfa.base.errors import ModelError
from sayfa.base.sizing import (
    kv_bytes_per_page,
    kv_bytes_per_token,
    num_parameters,
    pages_budget_bytes,
    pages_for,
    plan_memory,
    weight_bytes,
    weights_lower_bound_bytes,
)
from sayfa.runner.executors import StepLimits, make_executor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_type", ["float32", "bfloat16"])
def test_bytes_of_a_page_are_those_of_the_executor(tmp_path, family, kv_type):
    config, program = open_model(make_tiny(family, tmp_path))
    executor = make_executor(program, StepLimits(16, 16, 16, kv_type), kind="reference").executor
    assert kv_bytes_per_page(config, kv_type, 16) == executor.bytes_per_page
    assert executor.weights_bytes == 4 * num_parameters(config)
    assert weights_lower_bound_bytes(config, 32) == executor.weights_bytes


def test_int8_pages_hold_almost_twice_as_many_tokens(tmp_path):
    config, _ = open_model(make_tiny("llama", tmp_path))
    assert kv_bytes_per_token(config, "int8") == 2 * 3 * 2 * (16 + 4)
    with pytest.raises(ModelError, match="'int4' is not known; known: float32"):
        kv_bytes_per_token(config, "int4")


@pytest.mark.parametrize(
    ("name", "expected"), [("F32", 4096), ("BF16", 2048), ("Q4_0", 576), ("Q4_1", 640), ("Q6_K", 840)]
)
def test_bytes_of_a_weight_follow_the_blocks_of_its_type(name, expected):
    assert weight_bytes(4, 256, name) == expected
    with pytest.raises(ModelError, match="'Q9' is not known"):
        weight_bytes(1, 1, "Q9")


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_stays_within_its_budget_and_takes_no_more_than_can_be_used(seed):
    rng = random.Random(seed)
    for _ in range(50):
        page_size, bytes_per_page = rng.choice([16, 32, 64]), rng.randint(100, 100_000)
        budget, most = rng.randint(2 * bytes_per_page, 10**8), rng.randint(1, 10**6)
        plan = plan_memory(
            weights_bytes=7, buffers_bytes=5, bytes_per_page=bytes_per_page, page_size=page_size, pages_bytes=budget,
            most_tokens=most,
        )  # fmt: skip
        assert plan.pages_bytes == plan.num_pages * bytes_per_page <= budget
        assert plan.num_pages >= 2
        enough = pages_for(most, page_size) + 1
        assert plan.num_pages == enough or (plan.num_pages < enough and plan.pages_bytes + bytes_per_page > budget)


def test_a_budget_below_two_pages_is_refused_with_the_way_out():
    with pytest.raises(ModelError, match=r"hold 1 pages .* raise --kv-cache-memory"):
        plan_memory(
            weights_bytes=0, buffers_bytes=0, bytes_per_page=1000, page_size=16, pages_bytes=1999, most_tokens=100
        )


def test_more_slots_than_32_bits_can_number_are_refused_with_the_way_out():
    """One page more would give its tokens negative slots, which name other sequences' pages."""

    def plan(page_size: int, num_pages: int):
        return plan_memory(
            weights_bytes=0, buffers_bytes=0, bytes_per_page=640, page_size=page_size, pages_bytes=640 * num_pages,
            most_tokens=2**40,
        )  # fmt: skip

    for page_size in (16, 32, 64):
        most = (2**31 - 1) // page_size
        assert plan(page_size, most).num_pages == most
        with pytest.raises(ModelError, match=rf"{most + 1} pages of {page_size} .* --kv-cache-memory to {640 * most} "):
            plan(page_size, most + 1)


def test_the_budget_counts_buffers_and_margin_and_is_never_negative():
    assert pages_budget_bytes(1000, 0.5, 100, margin_bytes=50) == 350
    assert pages_budget_bytes(1000, 0.5, 600, margin_bytes=50) == 0
