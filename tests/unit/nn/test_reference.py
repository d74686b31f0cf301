"""Laws of the reference executor's own edges: bounds of a step, types of pages, and what it counts as its memory."""

import numpy as np
import pytest

from fakes.models import make_tiny
from fakes.steps import Driver, open_model, reference
from sayfa.runner.executors import StepLimits, make_executor


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return open_model(make_tiny("llama", tmp_path_factory.mktemp("tiny")))


def test_a_step_over_the_bounds_is_refused(tiny):
    config, program = tiny
    driver = Driver(reference(program, max_tokens=8), config)
    driver.add(0, list(range(9)))
    with pytest.raises(ValueError, match="9 tokens and 1 logit rows; the executor was made for 8 and 8"):
        driver.step({0: 9})


def test_pages_in_bfloat16_give_nearly_the_same_logits_and_half_the_bytes(tiny):
    """8 bits of mantissa in K and V: close, but not equal, or nothing was rounded."""
    config, program = tiny
    tokens = np.random.default_rng(0).integers(0, 256, 40).tolist()
    found = {}
    for kv_type in ("float32", "bfloat16"):
        chosen = make_executor(program, StepLimits(64, 64, 16, kv_type), kind="reference")
        chosen.executor.allocate_pages(64)
        driver = Driver(chosen, config, num_pages=64)
        driver.add(0, tokens)
        driver.step({0: 64}, all_logits=True)
        found[kv_type] = (np.stack(list(driver.logits[0].values())), chosen.executor.bytes_per_page)
    difference = np.abs(found["float32"][0] - found["bfloat16"][0])
    assert 1e-4 < difference.max() < 0.1
    assert found["float32"][1] == 2 * found["bfloat16"][1]


def test_a_slot_that_was_never_written_shows_as_not_a_number(tiny):
    """The poison that other laws rely on works: a wrong page is seen at once."""
    config, program = tiny
    driver = Driver(reference(program), config)
    driver.add(0, list(range(20)))
    driver.step({0: 20})
    driver.table.pages[0, 0] = 77
    result = driver.step({0: 1})[0]
    assert result.error_code == "numerical_error"
