"""What is encoded decodes to the same; what is not one of our messages ends that message and nothing else."""

import random
import typing

import msgspec
import pytest

from sayfa.base.config import CacheOptions, SchedulerOptions, Tokens
from sayfa.base.messages import (
    Abort,
    Add,
    Drain,
    EngineOutput,
    Outputs,
    PageDropped,
    PagesReleased,
    Ping,
    Refused,
    Request,
    RequestFinished,
    ResetCache,
    StepMade,
    StepStats,
)
from sayfa.base.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from sayfa.base.step import TokenLogprobs
from sayfa.engine.build import MAX_SCORED
from sayfa.wire import codec
from sayfa.wire.codec import (
    LONG_BYTES,
    MalformedMessageError,
    decode_from_engine,
    decode_to_engine,
    encode,
    encode_in_parts,
)
from sayfa.wire.sockets import MAX_FRAME_BYTES

TO_ENGINE = [
    Add(Request(id="a", prompt=[1, 2, 3], params=SamplingParams(logit_bias={5: -1.5}, stop=["x"], seed=7), salt="s")),
    Abort(["a", "b"]),
    Drain(2.5),
    Ping(9),
    ResetCache(),
]
FROM_ENGINE = [
    Outputs(outputs=[EngineOutput(id="a", tokens=[4], logprobs=[TokenLogprobs(-0.5, 1, [4, 5], [-0.5, -1.0])])]),
    Refused(id="a", kind="overloaded", message="full", retry_after_s=3),
]
STATS = StepStats(
    step=1, decide_s=0.1, compute_s=0.2, update_s=0.3, parts={}, num_rows=1, tokens_prompt=1, tokens_decode=0,
    running=1, waiting=0, waiting_tokens=0, pages_total=9, pages_used=1, pages_cached=0, slots_used=1, preemptions=0,
    prefix_queries=0, prefix_hits=0,
)  # fmt: skip


def test_messages_survive_the_wire():
    assert [decode_to_engine(encode(message)) for message in TO_ENGINE] == TO_ENGINE
    assert [decode_from_engine(encode(message)) for message in FROM_ENGINE] == FROM_ENGINE


@pytest.mark.parametrize("seed", range(200))
def test_damaged_messages_decode_or_are_refused_and_never_do_anything_else(seed):
    rng = random.Random(seed)
    for message in TO_ENGINE:
        data = bytearray(encode(message))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        try:
            decoded = decode_to_engine(bytes(data))
        except MalformedMessageError:
            continue
        assert isinstance(decoded, Add | Abort | Drain | Ping | ResetCache)


def test_a_request_of_the_wrong_shape_still_tells_its_id():
    good = msgspec.msgpack.decode(encode(TO_ENGINE[0]))
    good["request"]["prompt"] = "not numbers"
    with pytest.raises(MalformedMessageError, match="prompt") as error:
        decode_to_engine(msgspec.msgpack.encode(good))
    assert error.value.request_id == "a"


@pytest.mark.parametrize("seed", range(60))
def test_a_long_message_is_cut_into_short_ones_that_say_the_same_in_the_same_order(seed, monkeypatch):
    rng = random.Random(seed)
    events = [PageDropped(n, "f" * rng.randrange(60)) for n in range(rng.choice([0, 1, 2, 40]))]
    outputs = [EngineOutput(id="x" * rng.randrange(60), tokens=[n]) for n in range(rng.choice([0, 1, 2, 40]))]
    stats = rng.choice([None, STATS])
    whole = Outputs(outputs=outputs, stats=stats, first_event=rng.randrange(9), events=events)
    most_bytes = rng.choice([10, 700, 1000, 1 << 20])
    monkeypatch.setattr(codec, "LONG_BYTES", most_bytes)
    payloads = list(encode_in_parts(whole))
    parts = [decode_from_engine(payload) for payload in payloads]
    assert [output for part in parts for output in part.outputs] == outputs
    assert [event for part in parts for event in part.events] == events
    assert [part.stats for part in parts] == [None] * (len(parts) - 1) + [stats]
    number = whole.first_event
    for payload, part in zip(payloads, parts, strict=True):
        assert part.first_event == number
        number += len(part.events)
        assert len(payload) <= most_bytes or len(part.outputs) + len(part.events) <= 1
    told = [bool(part.outputs) for part in parts]
    assert len(parts) == 1 or told == sorted(told), "an output is told before an event"
    if len(encode(whole)) <= most_bytes:
        assert payloads == [encode(whole)]


def test_the_end_of_a_full_queue_of_requests_with_many_branches_fits_in_frames():
    """All of the 400,000 that wait may end in one step, by their deadline or with the server."""
    sentence = "the server shut down before the answer was complete"
    ends = [EngineOutput(id=f"chatcmpl-{n:032x}", finish="error", error=sentence) for n in range(2000)]
    events = [RequestFinished(f"chatcmpl-{n:032x}", 0, "error") for n in range(2000)]
    whole = Outputs(outputs=ends * 200, stats=STATS, events=events * 200)
    payloads = list(encode_in_parts(whole))
    assert sum(map(len, payloads)) > MAX_FRAME_BYTES
    assert max(map(len, payloads)) <= LONG_BYTES


def test_the_longest_thing_that_cannot_be_cut_fits_in_a_frame():
    """With the largest settings: the pages of the longest context, a step of the most rows, the most scores."""
    [unit] = Tokens.__metadata__
    smallest_page = min(typing.get_args(typing.get_type_hints(CacheOptions)["block_size"]))
    [rows] = typing.get_type_hints(SchedulerOptions, include_extras=True)["max_num_seqs"].__metadata__
    name, high = "x" * 256, 2**31 - 1
    num_pages = -(-int(unit.high) // smallest_page)
    step = StepMade(high, [(name, 127, high, high)] * int(rows.high))
    score = TokenLogprobs(-1.5, high, [high] * MAX_TOP_LOGPROBS, [-1.5] * MAX_TOP_LOGPROBS)
    output = EngineOutput(id=name, tokens=[high], logprobs=[score], prompt_logprobs=[score] * MAX_SCORED)
    for message in (Outputs(events=[PagesReleased([high] * num_pages, name, 127)], stats=STATS),
                    Outputs(events=[step], stats=STATS), Outputs(outputs=[output], stats=STATS)):  # fmt: skip
        assert len(encode(message)) <= MAX_FRAME_BYTES


GARBAGE = [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81" * 5000]
GARBAGE += [msgspec.msgpack.encode(value) for value in ("text", {"type": "unknown"}, [[]] * 100, None)]


@pytest.mark.parametrize("data", GARBAGE)
def test_what_is_no_message_at_all_is_refused(data):
    with pytest.raises(MalformedMessageError):
        decode_to_engine(data)
    with pytest.raises(MalformedMessageError):
        decode_from_engine(data)
