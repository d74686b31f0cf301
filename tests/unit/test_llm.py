"""The offline door: text in, text out, in the order of the prompts, whatever the engine does underneath."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from fakes.models import make_tiny
from sayfa import LLM, ConfigError, EngineError, InvalidRequest, ModelError, SamplingParams

OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16,
           "kv_cache_memory": "4MiB", "executor": "reference", "seed": 1}  # fmt: skip

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(str(make_tiny("llama", tmp_path_factory.mktemp("llama"), seed=3, vocab_size=260)), **OPTIONS)


def test_importing_the_public_face_loads_nothing_heavy():
    code = (
        "import sys\nfrom sayfa import LLM, SamplingParams, RequestOutput\n"
        "print([name for name in ('torch', 'numpy', 'fastapi', 'zmq', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_outputs_come_in_the_order_of_the_prompts_however_long_each_takes(llm):
    prompts = [f"prompt number {i} " * (1 + i % 3) for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + (7 * i) % 19, ignore_eos=True) for i in range(20)]
    done = []
    outputs = llm.generate(prompts, params, on_progress=lambda *counts: done.append(counts))
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [wish.max_tokens for wish in params]
    assert done == [(i, 20) for i in range(1, 21)]
    singles = [llm.generate(prompt, wish)[0].outputs for prompt, wish in zip(prompts, params, strict=True)]
    assert [output.outputs for output in outputs] == singles


def test_calls_from_several_threads_give_what_each_gives_alone(llm):
    """As in the handlers of a web framework: unguarded, a step within another's step cost both their answers."""
    wish = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def generate(i):
        return llm.generate([f"thread {i}", f"and {i}"], wish)[0].text

    def stream(i):
        return "".join(llm.stream_chat([{"role": "user", "content": f"thread {i}"}], wish))

    alone = [ask(i) for i in range(6) for ask in (generate, stream)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(12) as threads:
            together = [threads.submit(ask, i) for i in range(6) for ask in (generate, stream)]
            assert [each.result(60) for each in together] == alone
    finally:
        sys.setswitchinterval(interval)
    assert not llm.engine.has_work


def test_what_another_thread_s_step_brings_last_is_not_lost(llm, monkeypatch):
    """It came between the look at the text and the look whether that was all."""
    from sayfa.llm_jobs import Job

    wish = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    ask = partial(llm.stream_chat, [{"role": "user", "content": "thread"}], wish)
    alone = "".join(ask())

    def failure_after_others_step(job):
        if not llm._open.turn._is_owned():  # nobody's turn: whoever looks now may miss what others do
            with llm._open.turn:
                while not job.done:
                    llm._open.step()

    monkeypatch.setattr(Job, "failure", property(failure_after_others_step))
    assert "".join(ask()) == alone


def test_text_and_token_ids_as_prompts_are_the_same(llm):
    wish = SamplingParams(temperature=0.0, max_tokens=8)
    ids = llm.tokenizer.encode("same")
    text, tokens = llm.generate("same", wish)[0], llm.generate(ids, wish)[0]
    several = llm.generate([ids, "same"], wish)
    assert text.outputs == tokens.outputs == several[0].outputs == several[1].outputs
    assert tokens.prompt is None
    assert text.usage.prompt_tokens == len(ids)
    assert text.usage.completion_tokens == len(text.outputs[0].token_ids)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_one_answer_and_not_its_siblings(llm, length, include):
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "n": 3, "ignore_eos": True}
    free = llm.generate("x", SamplingParams(**fields))[0]
    stop = free.outputs[1].text[4 : 4 + length]
    fields |= {"stop": [stop], "include_stop_str_in_output": include}
    stopped = llm.generate("x", SamplingParams(**fields))[0]
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        at = before.text.find(stop)
        expected = before.text if at < 0 else before.text[: at + (length if include else 0)]
        assert after.text == expected
        assert after.finish_reason == ("length" if at < 0 else "stop")
        assert after.stop_reason == (None if at < 0 else stop)
    assert not llm.engine.has_work


def test_logprobs_name_each_token_of_the_answer(llm):
    answer = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, prompt_logprobs=1))[0]
    choices = answer.outputs[0].logprobs
    assert [choice.token_id for choice in choices] == answer.outputs[0].token_ids
    assert all(choice.rank == 1 and choice.top[0][2] == choice.logprob and len(choice.top) == 2 for choice in choices)
    assert [choice.token_id for choice in answer.prompt_logprobs] == answer.prompt_token_ids[1:]


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_only_tokens_that_begin_in_the_text_have_logprobs_where_a_stop_string_cut_it(llm, length, include):
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
    [free] = llm.generate("x", SamplingParams(**fields))[0].outputs
    stop = free.text[4 : 4 + length]
    [cut] = llm.generate("x", SamplingParams(**fields, stop=[stop], include_stop_str_in_output=include))[0].outputs
    assert cut.stop_reason == stop
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    starts = [len(llm.tokenizer.decode(cut.token_ids[:i])) for i in range(len(cut.token_ids))]
    told = [choice for choice, start in zip(free.logprobs, starts, strict=False) if start < len(cut.text)]
    assert cut.logprobs == told
    assert include == (len(told) == len(cut.token_ids))


def test_chat_is_the_template_then_generate(llm):
    messages = [{"role": "user", "content": "hi"}]
    wish = SamplingParams(temperature=0.0, max_tokens=8)
    chat = llm.chat(messages, wish)[0]
    assert chat.prompt == "<|begin|><|user|>user: hi<|turn_end|><|user|>assistant: "
    assert chat.outputs == llm.generate(chat.prompt_token_ids, wish)[0].outputs
    both = llm.chat([messages, messages], wish)
    assert [output.outputs for output in both] == [chat.outputs, chat.outputs]
    assert "".join(llm.stream_chat(messages, wish)) == chat.text


def test_leaving_a_stream_early_leaves_nothing_behind(llm):
    stream = llm.stream_chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=60, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    llm.engine.audit()


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda llm: llm.generate(["a", "b"], [SamplingParams()]), "2 prompts but 1 params"),
    (lambda llm: llm.generate("a" * 500), "shorten the prompt"),
    (lambda llm: llm.generate([[]]), "empty"),
    (lambda llm: llm.generate([[99999]]), r"outside \[0, 259\]"),
    (lambda llm: llm.generate("a", SamplingParams(temperature=-1)), "temperature"),
    (lambda llm: llm.generate("a", SamplingParams(logit_bias={5000: 1.0})), "logit_bias"),
    (lambda llm: llm.chat([[]]), "messages"),
    (lambda llm: llm.generate("a", SamplingParams(temperature="1")), r"`temperature` is '1' \(str\)"),
    (lambda llm: llm.generate("a", SamplingParams(n="2")), r"`n` is '2' \(str\)"),
    (lambda llm: next(llm.stream_chat(USER, SamplingParams(max_tokens=1.5))), r"`max_tokens` is 1.5 \(float\)"),
])  # fmt: skip
def test_what_cannot_be_served_is_said_and_harms_nothing(llm, call, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        call(llm)
    assert not llm.engine.has_work
    assert llm.generate("fine", SamplingParams(max_tokens=2))[0].text is not None


def test_wishes_of_a_wrong_type_are_errors_in_their_place_and_a_lone_stop_text_is_one_string(llm):
    wishes = [SamplingParams(temperature="1"), SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(n=None)]
    outputs = llm.generate(["a", "b", "c"], wishes, errors="return")
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "error"]
    free = llm.generate("x", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0].text
    stop = free[6:9]
    fields = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, "stop": stop}
    answer = llm.generate("x", SamplingParams(**fields))[0].outputs[0]
    assert (answer.text, answer.stop_reason) == (free[: free.index(stop)], stop)


@pytest.mark.parametrize(("prompts", "sentence"), [
    ([28, "hello", 4], "holds at place 1 a value of type str"),
    (["hello", 4], "holds at place 0 a value of type str"),
    ([1, True], "at place 1 a value of type bool"),
    ([[1, 2.0]], "prompt 0 holds at place 1 a value of type float"),
    (["fine", [3, None]], "prompt 1 holds at place 1 a value of type NoneType"),
    (["fine", None], "prompt 1 is of type NoneType"),
    ([b"hello"], "prompt 0 is of type bytes"),
    ([1.5], "prompt 0 is of type float"),
    ([["hello"]], "prompt 0 holds at place 0 a value of type str"),
    (b"hello", "the prompts are of type bytes"),
    (bytearray(b"hello"), "the prompts are of type bytearray"),
    (np.array([1, 2]), "the prompts are of type ndarray"),
    ([np.array([1, 2])], "prompt 0 is of type ndarray"),
    ({"prompt": "x"}, "the prompts are of type dict"),
    (None, "the prompts are of type NoneType"),
    (7, "the prompts are of type int"),
])  # fmt: skip
def test_prompts_of_a_wrong_type_are_named_with_their_place(llm, prompts, sentence):
    before = steps_of(llm)
    with pytest.raises(InvalidRequest, match=sentence):
        llm.generate(prompts)
    assert steps_of(llm) == before


def test_ids_may_be_tuples_and_numpy_integers(llm):
    wish = SamplingParams(temperature=0.0, max_tokens=4)
    [expected] = llm.generate([1, 2, 3], wish)
    for one in ((1, 2, 3), [np.int64(1), 2, np.uint8(3)], range(1, 4), [(1, 2, 3)], [[np.int32(1), 2, 3]]):
        [output] = llm.generate(one, wish)
        assert output == expected
        assert set(map(type, output.prompt_token_ids)) == {int}


def test_a_prompt_of_a_wrong_type_may_be_an_error_in_its_place(llm):
    outputs = llm.generate(["a", None, [1, "b"], b"c"], SamplingParams(max_tokens=2), errors="return")
    assert [output.outputs[0].error is None for output in outputs] == [True, False, False, False]
    outputs = llm.chat([USER, "hello", [None]], SamplingParams(max_tokens=2), errors="return")
    assert [output.outputs[0].error is None for output in outputs] == [True, False, False]


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda llm: llm.chat("hello"), "the messages are of type str"),
    (lambda llm: llm.chat(USER[0]), "the messages are of type dict"),
    (lambda llm: llm.chat(["hello"]), "a conversation is a list of messages"),
    (lambda llm: next(llm.stream_chat("hello")), "a conversation is a list of messages"),
    (lambda llm: next(llm.stream_chat(USER, {"n": 1})), "params of type dict were given"),
    (lambda llm: llm.generate("a", {"max_tokens": 3}), "params of type dict were given"),
    (lambda llm: llm.generate("a", [{"max_tokens": 3}]), "params of type dict were given"),
])  # fmt: skip
def test_messages_and_params_of_a_wrong_type_are_named(llm, call, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        call(llm)


def steps_of(llm):
    return llm.engine.pong(0).steps


def test_one_prompt_in_hundreds_that_cannot_be_served_is_known_before_any_work(llm):
    before = steps_of(llm)
    with pytest.raises(InvalidRequest, match="shorten the prompt"):
        llm.generate(["fine"] * 300 + ["a" * 500])
    with pytest.raises(InvalidRequest, match="shorten the prompt"):
        llm.chat([[{"role": "user", "content": text}] for text in ["fine"] * 20 + ["a" * 500]])
    assert steps_of(llm) == before


def test_what_cannot_be_served_may_be_an_error_in_its_place_and_the_others_are_served(llm):
    wish = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    done = []
    prompts = ["a" * 500, "one", "", "two"]
    outputs = llm.generate(prompts, wish, errors="return", on_progress=lambda *counts: done.append(counts))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "error", "length"]
    assert "shorten the prompt" in outputs[0].outputs[0].error
    assert "empty" in outputs[2].outputs[0].error
    assert [output.outputs for output in (outputs[1], outputs[3])] == [
        output.outputs for output in llm.generate(["one", "two"], wish)
    ]
    assert done == [(3, 4), (4, 4)]
    chats = [[{"role": "user", "content": text}] for text in ("a" * 500, "one")] + [[]]
    outputs = llm.chat(chats, wish, errors="return")
    assert [output.outputs[0].error is None for output in outputs] == [False, True, False]
    with pytest.raises(ConfigError, match="errors is 'ignore'; choose one of raise, return"):
        llm.generate("one", wish, errors="ignore")


def test_more_prompts_than_the_queue_holds_are_all_answered(tmp_path):
    narrow = OPTIONS | {"max_num_seqs": 2, "max_num_queued_reqs": 1, "max_num_queued_tokens": 8}
    small = LLM(str(make_tiny("llama", tmp_path, seed=3, vocab_size=260)), **narrow)
    outputs = small.generate([f"prompt {i}" for i in range(12)], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3] * 12


def test_ids_that_only_pad_the_embedding_are_empty_text(tmp_path):
    padded = LLM(str(make_tiny("llama", tmp_path, seed=3, vocab_size=320)), **OPTIONS)
    only = SamplingParams(temperature=1.0, max_tokens=5, allowed_token_ids=[300, 310, 319], logprobs=3)
    answer = padded.generate("x", only)[0].outputs[0]
    assert set(answer.token_ids) <= {300, 310, 319}
    assert len(answer.token_ids) == 5
    assert answer.text == ""


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_unknown_options_and_models_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM("smollm2", max_model_length=4)
    with pytest.raises(ModelError, match="no such file"):
        LLM(str(tmp_path / "nothing.gguf"))


# ---------------------------------------------------------------------------------------------- calls that take turns

OTHER = [{"role": "user", "content": "something else"}]
WISH = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def bound_steps(llm, monkeypatch):
    """Let the engine end a test that would step for ever."""
    made, step = [], llm.engine.step

    def counting():
        made.append(1)
        assert len(made) < 500, "the engine is made to step for ever"
        return step()

    monkeypatch.setattr(llm.engine, "step", counting)


@pytest.fixture
def counted(llm, monkeypatch):
    """The model, with an engine that ends a test that would step for ever, and is at rest afterwards."""
    bound_steps(llm, monkeypatch)
    yield llm
    assert not llm.engine.has_requests
    llm.engine.audit()


def test_generate_while_a_stream_is_open_ends_and_neither_loses_a_word(counted):
    alone, generated = "".join(counted.stream_chat(USER, WISH)), counted.generate(["x", "y"], WISH)
    stream = counted.stream_chat(USER, WISH)
    first = next(stream)
    between = counted.generate(["x", "y"], WISH)
    assert [output.outputs for output in between] == [output.outputs for output in generated]
    assert first + "".join(stream) == alone


def test_streams_may_be_read_in_turns_and_each_says_what_it_says_alone(counted):
    chats = [USER, OTHER, USER]
    wishes = [WISH, WISH, SamplingParams(temperature=1.0, seed=5, max_tokens=31, ignore_eos=True)]
    alone = ["".join(counted.stream_chat(*pair)) for pair in zip(chats, wishes, strict=True)]
    streams = [counted.stream_chat(*pair) for pair in zip(chats, wishes, strict=True)]
    texts = ["", "", ""]
    going = set(range(3))
    while going:
        for index in sorted(going):
            piece = next(streams[index], None)
            if piece is None:
                going.remove(index)
            else:
                texts[index] += piece
    assert texts == alone


def test_on_progress_may_call_generate_and_read_streams(counted):
    stream = counted.stream_chat(USER, WISH)
    inner, pieces, done = [], [], []

    def progress(num_done, total):
        done.append((num_done, total))
        inner.append(counted.generate("inner", WISH)[0].outputs)
        pieces.append(next(stream, ""))  # the other steps may have brought all of it

    outputs = counted.generate(["a", "b", "c"], WISH, on_progress=progress)
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert [output.outputs for output in outputs] == [counted.generate(text, WISH)[0].outputs for text in "abc"]
    assert inner == [counted.generate("inner", WISH)[0].outputs] * 3
    assert "".join([*pieces, *stream]) == "".join(counted.stream_chat(USER, WISH))


@pytest.mark.parametrize("give_up", ["close", "forget"])
def test_a_stream_that_is_given_up_frees_its_request_and_others_go_on(counted, give_up):
    alone = "".join(counted.stream_chat(OTHER, WISH))
    left, kept = counted.stream_chat(USER, WISH), counted.stream_chat(OTHER, WISH)
    text = [next(left), next(kept)][1]
    if give_up == "close":
        left.close()
    del left
    assert len(counted.engine.describe().split("unfinished: ")[1].split(", ")) == 1
    assert text + "".join(kept) == alone


def test_a_stream_that_garbage_collection_closes_inside_a_step_is_freed_after_it(counted, monkeypatch):
    alone = "".join(counted.stream_chat(OTHER, WISH))
    left, kept = counted.stream_chat(USER, WISH), counted.stream_chat(OTHER, WISH)
    text = [next(left), next(kept)][1]
    execute, inside = counted.engine._runner.execute, []

    def collecting(plan):
        if not inside:
            inside.append(1)
            left.close()
            assert "2" in counted.engine.describe().split("; ")[1], "the engine was asked for something inside its step"
        return execute(plan)

    monkeypatch.setattr(counted.engine._runner, "execute", collecting)
    text += next(kept)
    next_one = next(kept)
    assert len(counted.engine.describe().split("unfinished: ")[1].split(", ")) == 1
    assert text + next_one + "".join(kept) == alone


def test_a_full_queue_is_waited_for_while_streams_are_open(tmp_path, monkeypatch):
    narrow = OPTIONS | {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    small = LLM(str(make_tiny("llama", tmp_path, seed=3, vocab_size=260)), **narrow)
    bound_steps(small, monkeypatch)
    streams = [small.stream_chat(USER, WISH) for _ in range(4)]
    first = [next(stream) for stream in streams]
    assert len(small.generate(["a", "b", "c"], WISH)) == 3
    assert len({start + "".join(stream) for start, stream in zip(first, streams, strict=True)}) == 1


@pytest.mark.parametrize("call", [lambda llm: llm.generate("x", WISH), lambda llm: list(llm.stream_chat(USER, WISH))])
def test_what_no_step_can_bring_on_is_an_error_and_no_endless_loop(counted, monkeypatch, call):
    add = counted.engine.add

    def lost(request):
        add(request)
        while counted.engine.has_work:
            counted.engine.step()

    with monkeypatch.context() as patch:
        patch.setattr(counted.engine, "add", lost)
        with pytest.raises(EngineError, match="has no work"):
            call(counted)
    assert counted.generate("x", WISH)[0].outputs[0].finish_reason == "length"


def test_an_answer_never_lacks_what_a_failed_step_lost(counted, monkeypatch):
    stream = counted.stream_chat(USER, WISH)
    next(stream)
    step = counted.engine.step
    monkeypatch.setattr(counted.engine, "step", lambda: (step(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        counted.generate("x", WISH)
    monkeypatch.setattr(counted.engine, "step", step)
    with pytest.raises(EngineError, match="has no work"):
        list(stream)
    assert counted.generate("x", WISH)[0].outputs[0].finish_reason == "length"
