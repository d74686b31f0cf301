"""Event streams, message by message, on virtual time: what is sent when, and how each kind of end looks outside."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from sayfa.base.clock import AwakeClock
from sayfa.base.errors import Overloaded
from sayfa.server.errors import ErrorAnswer, to_answer
from sayfa.server.sse import DONE, KEEP_ALIVE, SLOW_SEND_LIMIT_S, START_WAIT_S, EventStream, sweep, wait_until_gone
from world.loop import VirtualClock, VirtualLoop

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
END = {"type": "http.response.body", "body": b"", "more_body": False}
Step = bytes | float | Exception
"""What a scripted stream does: give an event, wait so many seconds, fail."""


def event(data: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": True}


class Stage:
    """A stream with its client. sent: (seconds since the start, message). A client that `leaves_s` is gone then.

    stops_after: how many messages the client takes before it stops reading. breaks: what sending raises from then on.
    """

    def __init__(self, *script: Step, leaves_s: float = 1e6, stops_after: int = 99, breaks: Exception | None = None):
        self._script, self._leaves_s, self._stops_after, self._breaks = script, leaves_s, stops_after, breaks
        self._num_received = 0
        self._gone = asyncio.Event()
        self.clock = VirtualClock(start_s=1000.0)
        self.awake = AwakeClock(self.clock)
        self.sent: list[tuple[float, dict[str, Any]]] = []
        self.streams: set[EventStream] = set()
        self.explained: list[Exception] = []
        self.closed_s: float | None = None
        self.told: list[str] = []
        self.expected_log: set[str] = set()
        self.hang_ups: list[float] = []
        self.scope: dict[str, Any] = {}
        self.stream = EventStream(self._events(), self._explain, self.streams, self.awake)

    def now_s(self) -> float:
        return round(self.clock.monotonic() - 1000.0, 3)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            for step in self._script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, bytes):
                    yield step
                else:
                    await asyncio.sleep(step)
        finally:
            self.closed_s = self.now_s()

    def _explain(self, error: Exception) -> ErrorAnswer:
        self.explained.append(error)
        return to_answer(error, "r")

    async def receive(self) -> dict[str, Any]:
        """Something that is no end comes first."""
        self._num_received += 1
        if self._num_received > 1:
            await self._gone.wait()
        return {"type": "http.request" if self._num_received == 1 else "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.sent) >= self._stops_after:
            if self._breaks is not None:
                raise self._breaks
            await asyncio.Event().wait()
        self.sent.append((self.now_s(), message))

    def hang_up(self) -> None:
        self.hang_ups.append(self.now_s())
        self._gone.set()

    async def serve(self) -> None:
        before = asyncio.all_tasks()
        await self.stream(self.scope, self.receive, self.send)
        assert not self.streams
        assert self.closed_s is not None, "the events are not closed"
        assert asyncio.all_tasks() <= before, "somebody still waits for a client that is gone"

    def play(self, main: Callable[[], Awaitable[None]] | None = None, keep_alive_s: float | None = None) -> None:
        """Serve the stream to its end (or run `main`), under a sweep if `keep_alive_s` is given."""
        loop = VirtualLoop(self.clock)
        log, told = logging.getLogger("sayfa.server"), self.told
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        log.addHandler(handler)

        async def body() -> None:
            loop.call_later(self._leaves_s, self._gone.set)
            if keep_alive_s is not None:
                sweeping = sweep(self.streams, keep_alive_s, self.awake)
                self.sweeper = asyncio.create_task(sweeping, name="sweep")
            try:
                await (main or self.serve)()
            finally:
                if keep_alive_s is not None:
                    assert not self.sweeper.done()
                    self.sweeper.cancel()

        try:
            loop.run_until_complete(body())
            loop.run_until_complete(loop.shutdown_asyncgens())
            assert loop.complaints == []
            assert set(self.told) == self.expected_log, "the sweep failed at a stream"
        finally:
            log.removeHandler(handler)
            loop.close()


def test_events_go_out_as_they_come_between_one_start_and_one_end() -> None:
    stage = Stage(b"data: 1\n\n", 3.0, b"data: 2\n\n", b"data: 3\n\n", 2.0)
    stage.play()
    assert stage.sent == [
        (0.0, START), (0.0, event(b"data: 1\n\n")), (3.0, event(b"data: 2\n\n")), (3.0, event(b"data: 3\n\n")),
        (5.0, END),
    ]  # fmt: skip
    assert (stage.closed_s, stage.explained, stage.stream.sending_since_s) == (5.0, [], None)


@pytest.mark.parametrize(
    ("first_s", "start_s"), [(0.5, 0.5), (0.999, 0.999), (1.5, START_WAIT_S), (40.0, START_WAIT_S)]
)
def test_the_status_waits_for_the_first_event_but_not_long(first_s: float, start_s: float) -> None:
    stage = Stage(first_s, b"data: 1\n\n")
    stage.play()
    assert stage.sent == [(start_s, START), (first_s, event(b"data: 1\n\n")), (first_s, END)]


def test_a_stream_without_events_is_an_empty_answer() -> None:
    stage = Stage()
    stage.play()
    assert stage.sent == [(0.0, START), (0.0, event(b"")), (0.0, END)]


def test_an_error_before_the_start_is_a_plain_refusal() -> None:
    error = Overloaded("full", code="queue_full", retry_after_s=7)
    stage = Stage(0.5, error)
    stage.play()
    (at_s, start), (_, body) = stage.sent
    answer = to_answer(error, "r")
    headers = dict(start["headers"])
    assert (at_s, start["type"], start["status"]) == (0.5, "http.response.start", 503)
    assert headers == {
        b"content-type": b"application/json",
        b"content-length": str(len(body["body"])).encode(),
        b"retry-after": str(answer.retry_after_s).encode(),
    }
    assert json.loads(body["body"])["error"]["message"] == "full"
    assert (body["type"], body["more_body"], stage.explained) == ("http.response.body", False, [error])


@pytest.mark.parametrize("script", [(b"data: 1\n\n", ValueError("x")), (START_WAIT_S + 1, ValueError("x"))])
def test_an_error_after_the_start_is_one_event_and_the_end_mark(script: tuple[Step, ...]) -> None:
    stage = Stage(*script)
    stage.play()
    assert [message for _, message in stage.sent if message == START] == [START]
    told = stage.sent[-2][1]
    assert (told["type"], told["more_body"]) == ("http.response.body", True)
    data, end = told["body"].split(b"\n\n", 1)
    assert data.startswith(b"data: ")
    assert json.loads(data[6:])["error"]["code"] == "internal_error"
    assert end == DONE == b"data: [DONE]\n\n"
    assert stage.sent[-1][1] == END


def test_a_client_that_leaves_ends_the_events_at_once() -> None:
    stage = Stage(b"data: 1\n\n", 60.0, b"data: 2\n\n", leaves_s=10.0)
    stage.play()
    assert stage.sent == [(0.0, START), (0.0, event(b"data: 1\n\n"))]
    assert (stage.closed_s, stage.explained) == (10.0, [])


def test_a_client_that_leaves_before_the_first_event_ends_the_events_too() -> None:
    stage = Stage(60.0, b"data: 1\n\n", leaves_s=10.0)
    stage.play()
    assert (stage.sent, stage.closed_s, stage.explained) == ([(START_WAIT_S, START)], 10.0, [])


@pytest.mark.parametrize("turns", range(10))
@pytest.mark.parametrize("at_s", [0.5, 10.0])
def test_an_error_in_the_moment_of_leaving_is_seen_by_somebody(at_s: float, turns: int) -> None:
    """Whichever comes first, by a few turns of the loop: the client's leaving or the error before any event."""
    stage = Stage(at_s, *[0.0] * turns, ValueError("x"), leaves_s=at_s)
    stage.play()  # which fails if an exception was left to the garbage collector
    assert stage.closed_s == at_s
    assert len(stage.explained) <= 1


def test_an_error_that_nobody_can_be_told_comes_out() -> None:
    """A connection that breaks takes no explanation either; the server's log is to have it."""
    stage = Stage(b"data: 1\n\n", b"data: 2\n\n", stops_after=2, breaks=OSError("broken pipe"))
    with pytest.raises(OSError, match="broken pipe"):
        stage.play()
    assert stage.sent == [(0.0, START), (0.0, event(b"data: 1\n\n"))]
    assert len(stage.explained) == 1
    assert stage.closed_s == 0.0
    assert not stage.streams


def test_who_is_cancelled_leaves_nothing_behind() -> None:
    stage = Stage(b"data: 1\n\n", 60.0)

    async def main() -> None:
        serving = asyncio.create_task(stage.serve())
        await asyncio.sleep(5.0)
        assert stage.streams == {stage.stream}
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    stage.play(main)
    assert (stage.closed_s, stage.streams, len(stage.sent)) == (5.0, set(), 2)


def test_waiting_for_the_end_of_a_client_passes_over_all_else() -> None:
    told = [{"type": "http.request"}, {"type": "http.request"}, {"type": "http.disconnect"}, {"type": "too far"}]

    async def receive() -> Any:
        return told.pop(0)

    asyncio.run(wait_until_gone(receive))
    assert told == [{"type": "too far"}]


# ------------------------------------------------------------------------------------------------ the sweep


def test_a_quiet_stream_is_kept_alive_every_so_often_and_a_busy_one_not() -> None:
    stage = Stage(b"a", *[2.0, b"b"] * 5, 20.5, b"c")
    stage.play(keep_alive_s=4.0)
    comments = [at_s for at_s, message in stage.sent if message == event(KEEP_ALIVE)]
    assert KEEP_ALIVE == b": keep-alive\n\n"
    assert comments == [14.0, 18.0, 22.0, 26.0, 30.0]
    assert stage.stream.last_sent_s == pytest.approx(stage.awake.monotonic(), abs=1.0)


def test_no_comment_goes_before_the_status() -> None:
    """Before the first event a refusal is still possible. (The status itself does not wait as long as a comment.)"""
    stage = Stage(0.9, b"a")

    async def main() -> None:
        serving = asyncio.create_task(stage.serve())
        await asyncio.sleep(0.5)
        stage.stream.keep_alive()
        assert stage.sent == []
        await serving

    stage.play(main)
    assert [message for _, message in stage.sent] == [START, event(b"a"), END]


def test_a_stream_that_has_not_begun_is_looked_at_without_harm() -> None:
    """It stands among the streams from its first moment on."""
    stage = Stage(b"a", 3.0, b"b")
    waiting = EventStream(stage._events(), stage._explain, stage.streams, stage.awake)
    stage.streams.add(waiting)

    async def main() -> None:
        await stage.stream(stage.scope, stage.receive, stage.send)

    stage.play(main, keep_alive_s=1.0)
    assert (waiting.sending_since_s, waiting.last_sent_s) == (None, 0.0)


def test_keeping_alive_can_be_off() -> None:
    stage = Stage(b"a", 500.0, b"b")
    stage.play(keep_alive_s=0.0)
    assert [at_s for at_s, _ in stage.sent] == [0.0, 0.0, 500.0, 500.0]


@pytest.mark.parametrize("can_hang_up", [False, True])
def test_a_reader_that_stops_is_given_up_after_the_limit_and_gets_no_comment(can_hang_up: bool) -> None:
    stage = Stage(b"a", b"b", b"c", stops_after=2)
    if can_hang_up:
        stage.scope["sayfa.hang_up"] = stage.hang_up
    stage.play(keep_alive_s=3.0)
    given_up_s = SLOW_SEND_LIMIT_S + 1.0  # the first look after the limit
    assert stage.hang_ups == ([given_up_s] if can_hang_up else [])
    assert stage.closed_s == given_up_s
    assert (stage.sent, stage.explained) == ([(0.0, START), (0.0, event(b"a"))], [])


def test_the_limit_counts_from_where_the_reader_stopped() -> None:
    """Not from the stream's beginning, nor from its last event that went out."""
    stage = Stage(b"a", 20.0, b"b", stops_after=2)
    stage.play(keep_alive_s=0.0)
    assert stage.closed_s == 20.0 + SLOW_SEND_LIMIT_S + 1.0


def test_a_reader_that_stops_at_a_comment_holds_up_no_other_stream() -> None:
    """The sweep waited for it, and with it the clock and every other stream that had to be given up."""
    stage = Stage(b"a", 500.0, b"b", stops_after=2)
    stage.play(keep_alive_s=3.0)
    assert stage.closed_s == pytest.approx(3.0 + SLOW_SEND_LIMIT_S + 1.0, abs=1.0)
    assert (stage.sent, stage.explained) == ([(0.0, START), (0.0, event(b"a"))], [])


def test_a_stream_that_nobody_serves_yet_can_be_given_up() -> None:
    stage = Stage(b"a")

    async def main() -> None:
        stage.stream.give_up()
        stage.stream.keep_alive()
        await stage.serve()

    stage.play(main)
    assert [message for _, message in stage.sent] == [START, event(b"a"), END]


def test_one_stream_that_fails_does_not_stop_the_sweep(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        sending_since_s, last_sent_s = None, 0.0

        def keep_alive(self) -> None:
            raise RuntimeError("of this one")

    stage = Stage(b"a", 10.5, b"b")
    stage.streams.add(Broken())  # type: ignore[arg-type]

    stage.expected_log = {"looking after a stream failed"}

    async def main() -> None:
        await stage.stream(stage.scope, stage.receive, stage.send)

    with caplog.at_level(logging.ERROR, logger="sayfa.server"):
        stage.play(main, keep_alive_s=5.0)
    assert [at_s for at_s, message in stage.sent if message == event(KEEP_ALIVE)] == [5.0, 10.0]
    assert "looking after a stream failed" in caplog.text
    assert "of this one" in caplog.text


def test_the_sweep_moves_the_clock_that_leaves_stalls_out() -> None:
    """It is what says that the process runs: without it the clock would stand still after three seconds."""
    stage = Stage(b"a", 50.0, b"b")
    stage.play(keep_alive_s=0.0)
    assert stage.awake.monotonic() == pytest.approx(50.0, abs=0.01)
