"""The times in a request's books, told on a clock of the test: each second belongs to one part, in every ending.

And what its line says of preemptions and of a failure.
"""

import logging

import pytest

from sayfa.base.clock import FakeClock
from sayfa.base.errors import EngineDead, EngineError, Overloaded
from sayfa.base.messages import EngineOutput, Outputs, RequestPreempted, RequestTimes
from sayfa.base.sampling_params import SamplingParams
from sayfa.server.books import Admissions, Record
from sayfa.server.errors import DeadlinePassedError
from sayfa.server.metrics import ServerMetrics

PARTS = ("queue_s", "prefill_s", "decode_s", "server_s")


class Books:
    """A record that took 1 s before its request went to the engine, and what it wrote."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "sayfa.server.request")
        self._caplog = caplog
        self.clock = FakeClock()
        self.metrics = ServerMetrics("m", False)
        self.record = Record(self.metrics, self.clock, "/v1/completions", "", "id-1", True)
        self.clock.advance(1.0)

    def begin(self) -> None:
        self.record.begin("cmpl-1", 3, SamplingParams(), 1)

    def token(self) -> None:
        self.record.note(0, 1, EngineOutput(id="cmpl-1", tokens=[1]))

    @property
    def line(self) -> dict[str, object]:
        [line] = [record for record in self._caplog.records if record.name == "sayfa.server.request"]
        return vars(line)

    @property
    def parts(self) -> list[object]:
        assert sum(self.line[name] for name in PARTS) == self.line["total_s"]  # type: ignore[misc]
        return [self.line[name] for name in PARTS]


ENDINGS = [None, DeadlinePassedError("late"), Overloaded("drained", code="draining"), EngineDead()]


@pytest.mark.parametrize("error", ENDINGS, ids=["left", "late", "drained", "dead"])
def test_who_never_got_a_place_has_waited(caplog: pytest.LogCaptureFixture, error: Exception | None) -> None:
    books = Books(caplog)
    books.begin()
    books.clock.advance(5.0)
    books.record.close("abort") if error is None else books.record.fail(error)
    assert books.parts == [5.0, 0.0, 0.0, 1.0]
    if not isinstance(error, Overloaded):  # who was refused has no place in the times of those who were served
        assert b'request_queue_time_seconds_sum{engine="0",model_name="m"} 5.0' in books.metrics.render()


@pytest.mark.parametrize("error", ENDINGS, ids=["left", "late", "drained", "dead"])
def test_who_got_a_place_and_no_token_was_prefilled(caplog: pytest.LogCaptureFixture, error: Exception | None) -> None:
    books = Books(caplog)
    books.begin()
    books.clock.advance(2.0)
    books.record.admitted("cmpl-1", 0)
    books.clock.advance(3.0)
    books.record.close("abort") if error is None else books.record.fail(error)
    assert books.parts == [2.0, 3.0, 0.0, 1.0]


def test_who_left_while_tokens_came_has_all_three_parts(caplog: pytest.LogCaptureFixture) -> None:
    books = Books(caplog)
    books.begin()
    books.clock.advance(2.0)
    books.record.admitted("cmpl-1", 0)
    books.clock.advance(3.0)
    books.token()
    books.clock.advance(4.0)
    books.token()
    books.clock.advance(0.5)
    books.record.close("abort")
    assert books.parts == [2.0, 3.0, 4.0, 1.5]


def test_what_never_went_to_the_engine_has_not_waited(caplog: pytest.LogCaptureFixture) -> None:
    books = Books(caplog)
    books.record.close("abort")
    assert books.parts == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("events_first", [True, False])
@pytest.mark.parametrize("ending", ["stop", "abort", *ENDINGS[1:]])
def test_preemptions_are_counted_in_every_ending(
    caplog: pytest.LogCaptureFixture, ending: str | Exception, events_first: bool
) -> None:
    """Two of one branch, one of another; only a request that ended well is told of them by its last outputs, too."""
    books = Books(caplog)
    books.begin()
    books.token()
    admissions = Admissions()
    admissions.watch("cmpl-1", books.record)
    events = Outputs(events=[RequestPreempted(name, branch) for name, branch in (
        ("cmpl-1", 0), ("cmpl-2", 0), ("cmpl-1", 1), ("cmpl-1", 0))])  # fmt: skip
    if events_first or ending != "stop":
        admissions.on_outputs(events)
    if ending == "stop":
        for branch, num_preempted in enumerate((2, 1)):
            times = RequestTimes(queue_s=0.0, prefill_s=1.0, decode_s=1.0, preempted=num_preempted)
            books.record.note(branch, 0, EngineOutput(id="cmpl-1", branch=branch, finish="stop", times=times))
    books.record.close(ending) if isinstance(ending, str) else books.record.fail(ending)
    assert books.line["preempted"] == 3
    assert b'request_num_preemptions_sum{engine="0",model_name="m"} 3.0' in books.metrics.render()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDead(), "engine_dead"),
        (EngineError("odd numbers", code="numerical_error"), "numerical_error"),
        (Overloaded("drained", code="draining"), "draining"),  # after tokens it is no refusal
        (KeyError("a bug"), "internal_error"),
    ],
)
def test_the_line_of_a_failure_says_which_and_the_metric_s_label_does_not(
    caplog: pytest.LogCaptureFixture, error: Exception, code: str
) -> None:
    books = Books(caplog)
    books.begin()
    books.token()
    books.record.fail(error)
    assert caplog.messages == [f"/v1/completions error:{code} cmpl-1"]
    page = books.metrics.render()
    assert b'request_success_total{engine="0",finished_reason="error",model_name="m"} 1.0' in page
    assert f'finished_reason="{code}"'.encode() not in page
