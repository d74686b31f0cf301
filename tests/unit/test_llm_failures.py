"""The offline door when the engine fails a request or dies: no answer ends short without a word."""

import signal

import pytest

from fakes.models import make_tiny
from sayfa import LLM, EngineError, SamplingParams
from sayfa.base.errors import LostStateError, ModelError
from sayfa.base.faults import armed

OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory": "4MiB", "executor": "reference", "seed": 1}
USER = [{"role": "user", "content": "hi"}]
WISH = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("llama"), seed=3, vocab_size=260))


@pytest.fixture
def llm(folder):
    return LLM(folder, **OPTIONS)


@pytest.mark.parametrize("phase", ["read", "pack", "pages", "warm-up"])
def test_a_start_without_memory_says_what_to_lower(folder, phase):
    point = {"read": "load.config", "pack": "load.pack", "pages": "load.pages", "warm-up": "load.warm_up"}[phase]

    def refuse():
        raise MemoryError

    words = f"not enough memory .*{phase}.*--max-num-batched-tokens"
    with armed(point, refuse), pytest.raises(ModelError, match=words):
        LLM(folder, **OPTIONS)


def fail(llm, monkeypatch, *, good_steps, error, row=None):
    """Let the runner raise `error` after so many steps; where a row is named, only for rows that hold it."""
    runner = llm.engine._runner._runner
    prepare, made = runner._prepare, []

    def failing(rows):
        made.append(1)
        assert len(made) < 500, "the engine is made to step for ever"
        if len(made) > good_steps and (row is None or any(each.row == row for each in rows)):
            raise error
        return prepare(rows)

    monkeypatch.setattr(runner, "_prepare", failing)


def read(stream):
    """The pieces of a stream, and the error that ended it."""
    pieces = []
    with pytest.raises(EngineError) as caught:
        pieces.extend(stream)
    return "".join(pieces), caught.value


@pytest.mark.parametrize("good_steps", [0, 5])
def test_a_stream_gives_what_came_and_then_raises_what_the_engine_failed_at(llm, monkeypatch, good_steps):
    whole = "".join(llm.stream_chat(USER, WISH))
    fail(llm, monkeypatch, good_steps=good_steps, error=ZeroDivisionError())
    text, error = read(llm.stream_chat(USER, WISH))
    assert whole.startswith(text)
    assert (text != "") == (good_steps > 0)
    assert "ZeroDivisionError" in str(error)
    assert error.code == "step_failed"
    assert not llm.engine.has_requests


def test_an_answer_that_others_steps_saw_fail_raises_in_its_own_stream(llm, monkeypatch):
    stream = llm.stream_chat(USER, WISH)
    assert next(stream)
    fail(llm, monkeypatch, good_steps=2, error=ZeroDivisionError(), row=0)
    assert llm.generate("x", WISH)[0].outputs[0].finish_reason == "length"
    text, error = read(stream)
    assert error.code == "step_failed"
    assert text, "what came before the failure is given"


@pytest.mark.parametrize(("name", "prompts"), [("generate", ["x", "y"]), ("chat", [USER, USER])])
def test_an_answer_that_the_engine_fails_raises_or_is_an_error_in_its_place(llm, monkeypatch, name, prompts):
    call = getattr(llm, name)
    good = call(prompts, WISH)
    fail(llm, monkeypatch, good_steps=3, error=ZeroDivisionError(), row=0)
    with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
        call(prompts, WISH)
    assert caught.value.code == "step_failed"
    assert not llm.engine.has_requests
    answers = [output.outputs[0] for output in call(prompts, WISH, errors="return")]
    assert sorted(answer.finish_reason for answer in answers) == ["error", "length"]
    for answer, whole in zip(answers, good, strict=True):
        if answer.finish_reason == "error":
            assert "ZeroDivisionError" in answer.error
        else:
            assert answer == whole.outputs[0]


def test_an_answer_that_was_aborted_behind_the_back_of_its_caller_is_no_whole_one(llm):
    stream = llm.stream_chat(USER, WISH)
    next(stream)
    llm.engine.abort(["offline-1"])
    _, error = read(stream)
    assert error.code == "abort"
    assert llm.generate("x", WISH)[0].outputs[0].finish_reason == "length"


def test_an_engine_that_dies_is_an_error_in_every_open_stream_and_in_calls_after_it(llm, monkeypatch):
    one, two = llm.stream_chat(USER, WISH), llm.stream_chat(USER, WISH)
    assert next(one)
    assert next(two)
    fail(llm, monkeypatch, good_steps=2, error=LostStateError("the table is lost"))
    _, error = read(one)
    assert str(error) == "the table is lost"
    assert "make a new one" in str(read(two)[1])
    with pytest.raises(EngineError, match="make a new one"):
        llm.generate("x", WISH)


@pytest.mark.parametrize(("name", "prompts"), [("generate", ["x"] * 9), ("chat", [USER] * 9)])
@pytest.mark.parametrize("good_steps", [0, 21, 25])
def test_an_engine_that_dies_costs_no_answer_that_was_done(llm, monkeypatch, name, prompts, good_steps):
    """With errors="return" each has its place; whoever watches was told of each once."""
    wish = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    whole = getattr(llm, name)(prompts, wish)[0].outputs[0]
    fail(llm, monkeypatch, good_steps=good_steps, error=LostStateError("the table is lost"))
    told, counted = {}, []
    outputs = getattr(llm, name)(
        prompts, wish, errors="return", on_output=told.setdefault, on_progress=lambda done, total: counted.append(done)
    )
    answers = [output.outputs[0] for output in outputs]
    num_done = sum(answer.error is None for answer in answers)
    assert num_done >= good_steps // 10 * 2
    for answer in answers:
        assert answer == whole if answer.error is None else answer.error == "the table is lost"
    assert told == dict(enumerate(outputs))
    assert counted == list(range(1, 10))
    for answer in (output.outputs[0] for output in getattr(llm, name)(prompts, wish, errors="return")):
        assert "make a new one" in answer.error


def interrupted(llm, monkeypatch, *, good_steps):
    """Let Ctrl-C come inside of one step."""
    runner = llm.engine._runner._runner
    prepare, made = runner._prepare, []

    def prepared(rows):
        made.append(1)
        if len(made) == good_steps + 1:
            signal.raise_signal(signal.SIGINT)
        return prepare(rows)

    monkeypatch.setattr(runner, "_prepare", prepared)


@pytest.mark.parametrize("good_steps", [0, 1, 5, 19])
def test_who_stops_an_answer_with_ctrl_c_can_ask_on(llm, monkeypatch, good_steps):
    whole = "".join(llm.stream_chat(USER, WISH))
    outputs = llm.generate(["x"] * 9, WISH)
    interrupted(llm, monkeypatch, good_steps=good_steps)
    pieces = []
    with pytest.raises(KeyboardInterrupt):
        pieces.extend(llm.stream_chat(USER, WISH))
    assert whole.startswith("".join(pieces))
    assert not llm.engine.has_requests
    for errors in ("raise", "return"):
        interrupted(llm, monkeypatch, good_steps=good_steps)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["x"] * 9, WISH, errors=errors)
        assert not llm.engine.has_requests
    assert "".join(llm.stream_chat(USER, WISH)) == whole
    assert [output.outputs for output in llm.generate(["x"] * 9, WISH)] == [output.outputs for output in outputs]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
