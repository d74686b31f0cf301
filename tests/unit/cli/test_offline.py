"""`sayfa generate` and `sayfa chat`: files are checked before work, results keep their order, errors their line."""

import io
import json
from itertools import chain, product

import msgspec
import pytest

from fakes.models import make_tiny
from sayfa import LLM, SamplingParams
from sayfa.base.errors import ConfigError, EngineError, LostStateError
from sayfa.cli import offline
from sayfa.cli.chat import talk
from sayfa.cli.offline import answer_all, read_tasks
from sayfa.cli.output import take_any_text
from sayfa.llm import Answer, RequestOutput, Usage

WISHES = {"max_tokens": 5, "temperature": 0.0}


def tasks_of(tmp_path, *lines):
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_tasks(file, WISHES)


def test_lines_may_be_text_prompts_or_conversations(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    tasks = tasks_of(tmp_path, '"plain"', "", {"prompt": "p", "max_tokens": 9, "id": 7}, {"messages": chat, "top_k": 3})
    assert [task.prompt for task in tasks] == ["plain", "p", None]
    assert [task.params.max_tokens for task in tasks] == [5, 9, 5]
    assert (tasks[1].id, tasks[2].messages, tasks[2].params.top_k) == (7, chat, 3)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"), ("3", "neither text"), ({"promt": "x"}, "did you mean 'prompt'"), ({}, "needs `prompt`"),
        ({"prompt": "a", "messages": []}, "not both"), ({"prompt": 3}, "Expected"), ({"prompt": "a", "n": 0}, "`n`"),
        ({"prompt": "a", "max_completion_tokens": 3}, "here it is `max_tokens`"),
        ({"prompt": "a", "logprobs": 1, "top_logprobs": 2}, "here it is `logprobs`"),
        ({"prompt": "a", "logprobs": True}, "`logprobs` is true or false; here it is a number"),
        ({"prompt": "a", "temperature": "hot"}, "Expected"), ({"prompt": "a", "eos_token_ids": [1]}, "unknown field"),
    ],
)  # fmt: skip
def test_a_wrong_line_stops_everything_before_any_work_and_is_named(tmp_path, line, words):
    with pytest.raises(ConfigError, match="line 2") as caught:
        tasks_of(tmp_path, '"good"', line)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["id", "custom_id"])
@pytest.mark.parametrize("value", ["\ud800", ["a", "x\udfff"], {"\udc00": 1}, float("nan"), {"a": float("inf")}])
def test_an_id_that_no_result_file_could_hold_is_refused_before_any_work(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"line 2: `{name}` holds"):
        tasks_of(tmp_path, '"good"', {"prompt": "hi", name: value})


@pytest.mark.parametrize("value", ["é \U0001f600", "", 0, -1.5, None, True, ["x"], {"a": {"b": "é"}}])
def test_any_other_id_comes_back_as_it_was(tmp_path, value):
    [task] = tasks_of(tmp_path, {"prompt": "hi", "id": value})
    assert task.id == value


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("from_file", [False, True])
def test_results_reach_a_standard_output_of_any_encoding(tmp_path, monkeypatch, encoding, from_file):
    file = tmp_path / "in.jsonl"
    file.write_text('"é \u263a"', "utf-8")
    sink = io.BytesIO()
    monkeypatch.setattr(offline.log, "setup", lambda *level: None)
    monkeypatch.setattr(offline, "make_llm", lambda settings: FakeModel())
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(sink, encoding))
    take_any_text()
    given = ([], file) if from_file else (["é \u263a"], None)
    assert offline.run_generate(None, *given, None, {}) == 0
    offline.sys.stdout.flush()
    written = sink.getvalue().decode(encoding)
    if from_file:
        assert json.loads(written)["text"] == "é \u263a"
    else:
        assert (
            written
            == ("é \u263a" if encoding == "utf-8" else {"ascii": "\\xe9", "latin-1": "é"}[encoding] + " \\u263a") + "\n"
        )


class FakeModel:
    """Answers each prompt with its own text, of up to ten characters."""

    def generate(self, prompts, params, on_output, errors):
        for place, text in enumerate(prompts):
            on_output(place, self._output(text, errors))

    def chat(self, conversations, params, on_output, errors):
        self.generate(["chat " + messages[-1]["content"] for messages in conversations], params, on_output, errors)

    def _output(self, text, errors):
        assert errors == "return"
        answer = Answer(index=0, text=text, token_ids=[1], finish_reason="stop")
        if not 0 < len(text) < 10:
            answer = Answer(index=0, text="", token_ids=[], finish_reason="error", error=f"{len(text)} characters")
        usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
        return RequestOutput(prompt=text, prompt_token_ids=[1], outputs=[answer], usage=usage)


@pytest.mark.parametrize("broken", [(), (0,), (1,), (0, 2)])
@pytest.mark.parametrize("way", ["prompt", "file", "output"])
def test_each_answer_that_failed_is_in_the_exit_code_and_on_stderr(tmp_path, monkeypatch, capsys, broken, way):
    class Several(FakeModel):
        def _output(self, text, errors):
            said = {"finish_reason": "error", "error": "broken"}
            answers = [
                Answer(index=i, text="x", token_ids=[1], **(said if i in broken else {"finish_reason": "stop"}))
                for i in range(3)
            ]
            return msgspec.structs.replace(super()._output(text, errors), outputs=answers)

    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a", "n": 3}')
    monkeypatch.setattr(offline.log, "setup", lambda *level: None)
    monkeypatch.setattr(offline, "make_llm", lambda settings: Several())
    given = (["a"], None, None) if way == "prompt" else ([], file, tmp_path / "out" if way == "output" else None)
    assert offline.run_generate(None, *given, {}) == int(bool(broken))
    assert capsys.readouterr().err == "".join(f"sayfa: prompt 0, answer {i}: broken\n" for i in broken)


def test_results_keep_the_order_and_a_prompt_that_cannot_be_served_does_not_stop_the_others(tmp_path):
    chat = {"messages": [{"role": "user", "content": "c"}], "custom_id": "mine"}
    long = {"messages": [{"role": "user", "content": "x" * 10}]}
    tasks = tasks_of(tmp_path, '"a"', chat, json.dumps("x" * 10), '"b"', {"prompt": ""}, long)
    results = answer_all(FakeModel(), tasks)
    assert [result["index"] for result in results] == [0, 1, 2, 3, 4, 5]
    assert [result["text"] for result in results] == ["a", "chat c", "", "b", "", ""]
    assert results[1]["id"] == "mine"
    errors = [result.get("error") for result in results]
    assert errors == [None, None, "10 characters", None, "0 characters", "15 characters"]
    assert msgspec.json.encode(results)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_a_result_is_written_as_soon_as_it_and_all_before_it_are_there(tmp_path, monkeypatch, capsys, order):
    """What ends the process after that, be it the kernel, takes none of them along."""
    written = []

    class Slow(FakeModel):
        def generate(self, prompts, params, on_output, errors):
            for place in order:
                on_output(place, self._output(prompts[place], errors))
                written.append(capsys.readouterr().out)
            raise KeyboardInterrupt

    file = tmp_path / "in.jsonl"
    file.write_text("".join(f'"{place}"\n' for place in range(4)))
    monkeypatch.setattr(offline.log, "setup", lambda *level: None)
    monkeypatch.setattr(offline, "make_llm", lambda settings: Slow())
    with pytest.raises(KeyboardInterrupt):
        offline.run_generate(None, [], file, None, {})
    shown = [[json.loads(line)["index"] for line in text.splitlines()] for text in written]
    assert list(chain(*shown)) == [0, 1, 2, 3]
    for number, place in enumerate(order):
        there = set(order[: number + 1])
        assert place in list(chain(*shown[: number + 1])) or not there.issuperset(range(place))


@pytest.mark.parametrize("case", [*product(["file", "output"], [LostStateError("the table is lost"), KeyError()])])
def test_an_engine_that_is_lost_costs_no_result_that_was_complete(tiny_folder, tmp_path, monkeypatch, capsys, case):
    """Also those of later conversations have a line, which says why."""
    way, error = case
    made = LLM(tiny_folder, max_model_len=128, max_num_seqs=2, kv_cache_memory="4MiB", executor="reference", seed=1)
    step, steps = made.engine.step, []

    def failing():
        steps.append(1)
        if len(steps) > 12:
            raise error
        return step()

    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = '{"messages": [{"role": "user", "content": "hi"}]}'
    file.write_text("\n".join([chat, *(f'{{"prompt": "a", "n": {1 + i % 2}}}' for i in range(9))]))
    monkeypatch.setattr(offline.log, "setup", lambda *level: None)
    monkeypatch.setattr(offline, "make_llm", lambda settings: made)
    wishes = {"max_tokens": 5, "ignore_eos": True, "temperature": 0.0}
    monkeypatch.setattr(made.engine, "step", failing)
    assert offline.run_generate(None, [], file, output if way == "output" else None, wishes) == 1
    out, err = capsys.readouterr()
    results = [json.loads(line) for line in (output.read_text() if way == "output" else out).splitlines()]
    assert [result["index"] for result in results] == list(range(10))
    ends = [result["finish_reason"] for result in results]
    assert ends[0] == ends[-1] == "error"
    assert ends.count("length") >= 2
    for result in results:
        assert ("error" in result) == (result["finish_reason"] == "error")
        if result["finish_reason"] == "length":
            assert result["usage"]["completion_tokens"] == 5 * (1 + (result["index"] - 1) % 2)
    said = "the table is lost" if isinstance(error, LostStateError) else "KeyError"
    assert any(said in result.get("error", "") for result in results)
    assert err.count("sayfa: prompt") >= ends.count("error")


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("llama"), seed=3, vocab_size=260))


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return LLM(tiny_folder, max_model_len=128, max_num_seqs=4, kv_cache_memory="4MiB", executor="reference", seed=1)


def test_what_a_line_asks_for_is_in_its_result_in_the_form_of_the_api(tiny, tmp_path):
    asks = {"logprobs": 2, "prompt_logprobs": 1, "n": 2, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    chat = [{"role": "user", "content": "hi"}]
    tasks = tasks_of(tmp_path, {"prompt": "hello", **asks}, {"messages": chat, "logprobs": 0}, '"plain"',
                     {"prompt": "", **asks})  # fmt: skip
    many, scored, plain, failed = msgspec.json.decode(msgspec.json.encode(answer_all(tiny, tasks)))
    expected = tiny.generate("hello", SamplingParams(**asks, max_tokens=5))[0]
    assert [(each["index"], each["text"]) for each in many["choices"]] == [
        (i, expected.outputs[i].text) for i in (0, 1)
    ]
    assert {**many["choices"][0], "index": 0} == {
        name: many[name] for name in ("index", "text", "finish_reason", "logprobs")
    }
    for shown, answer in zip(many["choices"], expected.outputs, strict=True):
        content = shown["logprobs"]["content"]
        assert [token["logprob"] for token in content] == [choice.logprob for choice in answer.logprobs]
        assert [list(token) for token in content] == [["token", "logprob", "bytes", "top_logprobs"]] * 5
        assert {len(token["top_logprobs"]) for token in content} == {2}
    first, *rest = many["prompt_logprobs"]
    assert first is None
    assert [
        position[str(token)]["logprob"] for position, token in zip(rest, expected.prompt_token_ids[1:], strict=True)
    ] == [choice.logprob for choice in expected.prompt_logprobs]
    assert len(scored["logprobs"]["content"]) == scored["usage"]["completion_tokens"] > 0
    assert "prompt_logprobs" not in scored
    assert set(plain) == {"index", "text", "finish_reason", "usage"}
    assert "empty" in failed["error"]
    assert "choices" not in failed


def test_sampling_fields_are_written_as_in_the_api(tmp_path):
    [task] = tasks_of(tmp_path, {"prompt": "p", "stop": "is", "logit_bias": {"5": 1, "260": -2.5}})
    assert task.params.stop == ["is"]
    assert task.params.logit_bias == {5: 1.0, 260: -2.5}


def test_null_is_a_field_left_out_as_in_the_api(tmp_path):
    names = [field.name for field in msgspec.structs.fields(SamplingParams) if field.name != "eos_token_ids"]
    nulls, plain = tasks_of(tmp_path, {"prompt": "p", **dict.fromkeys(names)}, '"p"')
    assert nulls == msgspec.structs.replace(plain, params=msgspec.structs.replace(plain.params, max_tokens=None))


def test_a_conversation_remembers_clears_and_survives_errors():
    seen = []

    def answerer(messages):
        seen.append([message["content"] for message in messages])
        if messages[-1]["content"] == "boom":
            raise EngineError("broken")
        yield from ("yes", " ", messages[-1]["content"])

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    sink = Terminal()
    assert talk(answerer, Terminal("one\nboom\n\ntwo\n/clear\nthree\n/exit\nnever\n"), sink, "be kind") == 0
    assert seen == [
        ["be kind", "one"],
        ["be kind", "one", "yes one", "boom"],
        ["be kind", "one", "yes one", "two"],
        ["be kind", "three"],
    ]
    assert "yes three" in sink.getvalue()


def test_a_script_that_talks_learns_of_a_failure_by_the_exit_code():
    def answerer(messages):
        raise EngineError("broken")
        yield ""

    assert talk(answerer, io.StringIO("one\ntwo\n"), io.StringIO(), None) == 1
