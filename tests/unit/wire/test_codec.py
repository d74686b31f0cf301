"""What is encoded decodes to the same; what is not one of our messages ends that message and nothing else."""

import random

import msgspec
import pytest

from sayfa.base.messages import Abort, Add, Drain, EngineOutput, Outputs, Ping, Refused, Request, ResetCache
from sayfa.base.sampling_params import SamplingParams
from sayfa.base.step import TokenLogprobs
from sayfa.wire.codec import MalformedMessageError, decode_from_engine, decode_to_engine, encode

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


GARBAGE = [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81" * 5000]
GARBAGE += [msgspec.msgpack.encode(value) for value in ("text", {"type": "unknown"}, [[]] * 100, None)]


@pytest.mark.parametrize("data", GARBAGE)
def test_what_is_no_message_at_all_is_refused(data):
    with pytest.raises(MalformedMessageError):
        decode_to_engine(data)
    with pytest.raises(MalformedMessageError):
        decode_from_engine(data)
