"""Sampling wishes: each field has its type and its range, told by name, whoever put them in."""

import timeit

import msgspec
import pytest

from sayfa.base.errors import InvalidRequest
from sayfa.base.sampling_params import SamplingParams

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "allowed_token_ids")
SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "eos_token_ids")
WRONG = [
    *((name, value) for name in NUMBERS for value in ("1", True, [1.0], 1j, b"1", {})),
    *((name, value) for name in WHOLE for value in ("1", 1.5, 1.0, True, [1])),
    *((name, value) for name in SWITCHES for value in (0, 1, "yes")),
    *((name, value) for name in LISTS for value in (3, {"a"}, {"a": 1}, b"is", iter(()))),
    *((name, value) for name in LISTS[1:] for value in ("12", [1, "2"], [1.0], [True], [None])),
    *(("stop", value) for value in (["a", 3], [None], [b"a"], [["a"]])),
    *(("logit_bias", value) for value in ([1], "5", {"5": 1.0}, {1.0: 1.0}, {5: "1"}, {5: True}, {5: None})),
    *((field.name, None) for field in msgspec.structs.fields(SamplingParams) if field.name not in OPTIONAL),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_of_another_type_is_refused_by_name_and_type(name, value):
    with pytest.raises(InvalidRequest, match=f"`{name}` (is|holds) .*\\(.*\\), but ") as caught:
        SamplingParams(**{name: value}).check()
    assert caught.value.param == name
    assert len(str(caught.value)) < 250


def test_every_field_is_tried():
    assert {name for name, _ in WRONG} == {field.name for field in msgspec.structs.fields(SamplingParams)}


@pytest.mark.parametrize("fields", [
    {}, dict.fromkeys(OPTIONAL), dict.fromkeys(NUMBERS, 1), {"stop": ("a", "b"), "stop_token_ids": (1,)},
    {"logit_bias": {5: 1, 6: 0.5}, "allowed_token_ids": [5, 6], "eos_token_ids": [7]},
])  # fmt: skip
def test_what_a_field_promises_is_taken(fields):
    SamplingParams(**fields).check()


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), 101, -101.0, 10**400])
def test_a_bias_out_of_range_is_refused_whatever_its_size(bias):
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias={5: bias}).check()


def test_a_lone_text_is_one_stop_string_however_it_comes_in():
    made = SamplingParams(stop="is")
    assert made.stop == ["is"]
    assert msgspec.structs.replace(made, n=2).stop == ["is"]
    assert msgspec.convert({"stop": "is"}, SamplingParams).stop == ["is"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made
    with pytest.raises(InvalidRequest, match="empty string"):
        SamplingParams(stop="").check()


def test_a_check_costs_the_engine_microseconds():
    params = SamplingParams(
        temperature=0.7, seed=3, max_tokens=100, stop=["a", "b"], stop_token_ids=[1], eos_token_ids=[1, 2],
        logit_bias={5: 1.0}, allowed_token_ids=[1, 2, 3],
    )  # fmt: skip
    best_s = min(timeit.repeat(params.check, number=200, repeat=30)) / 200
    assert best_s < 30e-6, f"{best_s * 1e6:.1f} us"


@pytest.mark.parametrize(
    ("fields", "contradicts"),
    [
        ({"stop_token_ids": [5]}, True),
        ({"stop_token_ids": [5, 6]}, True),
        ({"eos_token_ids": [5]}, True),
        ({"eos_token_ids": [5], "ignore_eos": True}, False),
        ({"stop_token_ids": [6]}, False),
        ({"stop_token_ids": [5], "min_tokens": 0}, False),
    ],
)
def test_allowed_tokens_that_all_end_the_answer_contradict_min_tokens(fields, contradicts):
    """It was computed and answered as a failure of the engine, with a traceback in the log."""
    params = SamplingParams(**{"allowed_token_ids": [5], "min_tokens": 1, **fields})
    if not contradicts:
        params.check()
        return
    with pytest.raises(InvalidRequest, match="allow another one") as refusal:
        params.check()
    assert refusal.value.param == "allowed_token_ids"


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "eos_token_ids", "allowed_token_ids"])
def test_a_tuple_is_a_list_to_all_who_read_it(name):
    values = ["a", "b"] if name == "stop" else [5, 6]
    params = SamplingParams(**{name: tuple(values)})
    params.check()
    assert getattr(params, name) == values
    assert params == SamplingParams(**{name: values})


@pytest.mark.parametrize("nothing", [[], ()])
def test_a_list_of_allowed_tokens_that_allows_none_is_refused(nothing):
    """Offline it failed in the step, as if the engine had."""
    with pytest.raises(InvalidRequest, match="is empty") as refusal:
        SamplingParams(allowed_token_ids=nothing).check()
    assert refusal.value.param == "allowed_token_ids"
