"""Laws of the choice: the reference never runs in silence, and what cannot be had is refused with the reason."""

import subprocess
import sys

import pytest

from fakes.models import make_successor
from fakes.steps import open_model
from sayfa.base.errors import ConfigError, ModelError
from sayfa.runner import executors
from sayfa.runner.executors import StepLimits, make_executor

LIMITS = StepLimits(max_tokens=32, max_rows=32, page_size=16)


@pytest.fixture
def program(tmp_path):
    return open_model(make_successor(tmp_path, {1: 2}))[1]


def without_native(monkeypatch, reason):
    monkeypatch.setattr(executors, "_why_not_native", lambda program: reason)


def test_the_reference_says_why_it_runs(program, monkeypatch):
    asked = make_executor(program, LIMITS, kind="reference")
    assert (asked.executor.name, asked.why_not_native) == ("reference", "the reference executor was asked for")
    without_native(monkeypatch, "no compiler was there")
    automatic = make_executor(program, LIMITS, kind="auto")
    assert (automatic.executor.name, automatic.why_not_native) == ("reference", "no compiler was there")


def test_native_on_demand_is_refused_with_the_reason(program, monkeypatch):
    without_native(monkeypatch, "no compiler was there")
    with pytest.raises(ModelError, match="no compiler was there; use --executor auto or reference"):
        make_executor(program, LIMITS, kind="native")


def test_unknown_choices_are_refused_with_the_known_ones(program):
    with pytest.raises(ConfigError, match="'fast' is not known; choose auto, native or reference"):
        make_executor(program, LIMITS, kind="fast")
    with pytest.raises(ModelError, match="'int8' is not known to the reference executor; choose one of float32"):
        make_executor(program, StepLimits(32, 32, 16, "int8"), kind="reference")


def test_no_room_of_the_computing_wing_loads_torch_before_the_reference_is_chosen():
    rooms = (
        "sayfa.runner.executors, sayfa.runner.model_runner, sayfa.models.config, sayfa.models.gemma, sayfa.models.qwen"
    )
    code = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
