"""The engine's loop over a connection that is a list."""

import signal

import pytest

from fakes.fake_engine import make_engine
from sayfa.base.clock import SystemClock
from sayfa.base.messages import Add, Refused, Request
from sayfa.base.sampling_params import SamplingParams
from sayfa.engine.process import EngineLoop
from sayfa.wire import codec, sockets
from sayfa.wire.codec import decode_from_engine, encode


class Line:
    """What has come and what was sent."""

    unsent_bytes = 0

    def __init__(self) -> None:
        self.coming: list[bytes] = []
        self.sent: list[bytes] = []
        self.waits: list[float | None] = []

    def receive(self, wait_s: float | None) -> list[bytes]:
        self.waits.append(wait_s)
        come, self.coming = self.coming, []
        return come

    def send(self, payload: bytes) -> None:
        self.sent.append(payload)


def test_a_request_that_lies_there_when_the_engine_ends_is_told_that_it_was_not_taken() -> None:
    line = Line()
    loop = EngineLoop(make_engine(), line, SystemClock())  # type: ignore[arg-type]
    assert loop.turn()
    line.coming = [encode(Add(Request(id="late", prompt=[7], params=SamplingParams(max_tokens=5))))]
    loop.on_signal(signal.SIGTERM, None)
    assert not loop.turn()
    [answer] = [decode_from_engine(payload) for payload in line.sent]
    assert isinstance(answer, Refused)
    assert (answer.id, answer.kind) == ("late", "draining")


def test_a_step_with_too_much_to_tell_for_one_message_is_told_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame has a bound; a crowd that ends in one step must not end the engine with it."""
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 6000)
    monkeypatch.setattr(codec, "LONG_BYTES", 5000)
    line = Line()
    loop = EngineLoop(make_engine(), line, SystemClock())  # type: ignore[arg-type]
    params = SamplingParams(n=128, max_tokens=5)
    line.coming = [encode(Add(Request(id=f"{n}", prompt=[7], params=params, deadline_s=1e-9))) for n in range(3)]
    loop.turn()
    assert len(line.sent) > 5
    assert all(sockets.frame(payload) for payload in line.sent)
    told = [output for payload in line.sent for output in decode_from_engine(payload).outputs]  # type: ignore[union-attr]
    assert [(output.id, output.branch) for output in told] == [(f"{n}", k) for n in range(3) for k in range(128)]
    assert {output.finish for output in told} == {"deadline"}


def test_idle_work_is_done_without_work_only_a_piece_between_two_looks_at_what_came() -> None:
    done = []
    line = Line()
    loop = EngineLoop(make_engine(idle_work=(done.append(n) for n in range(3))), line, SystemClock())  # type: ignore[arg-type]
    loop.turn()
    assert done == [0]
    line.coming = [encode(Add(Request(id="first", prompt=[7], params=SamplingParams(max_tokens=3, ignore_eos=True))))]
    for _ in range(3):
        loop.turn()
    assert done == [0], "a request waits for no idle work"
    while line.waits[-1] is not None:
        loop.turn()
    assert done == [0, 1, 2]
    assert len(line.waits) < 15, "it waits for what comes as soon as nothing is left to do"
