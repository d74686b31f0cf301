"""R15: a log that cannot be written loses lines, counts them and says so once; who logs notices nothing.

And a bug that floods: of each place in the code a few tracebacks are written, and the others counted.
"""

import json
import logging
import random
from io import StringIO

import pytest

from sayfa.base.log import MAX_PLACES, MAX_TRACEBACKS, TRACEBACK_SPAN_S, JsonFormatter, SinkHandler, TextFormatter


class Sink(StringIO):
    """A stream that fails for a while."""

    error: Exception | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def log_to(sink: Sink, form: logging.Formatter | None = None) -> tuple[logging.Logger, SinkHandler]:
    handler = SinkHandler(sink)
    handler.setFormatter(form or TextFormatter())
    log = logging.Logger("sayfa.test")
    log.addHandler(handler)
    return log, handler


@pytest.mark.parametrize(
    "error", [OSError(28, "full"), BrokenPipeError(), OSError(5, "EIO"), ValueError("closed file")]
)
def test_lost_lines_are_counted_and_told_once(error: Exception) -> None:
    sink = Sink()
    log, handler = log_to(sink)
    log.warning("before")
    sink.error = error
    for _ in range(5):
        log.error("lost")
    sink.error = None
    log.warning("after")
    log.warning("and on")
    lines = sink.getvalue().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        "before",
        "(5 log lines could not be written)",
        "after",
        "and on",
    ]
    assert handler.lost == 5


def test_the_news_is_not_lost_when_the_disk_fills_again() -> None:
    sink = Sink()
    log, handler = log_to(sink)
    for count in (2, 3):
        sink.error = OSError(28, "full")
        for _ in range(count):
            log.error("lost")
        sink.error = None
        log.warning("kept")
    told = [line.rpartition(": ")[2] for line in sink.getvalue().splitlines() if "could not be" in line]
    assert told == ["(2 log lines could not be written)", "(3 log lines could not be written)"]
    assert handler.lost == 5


def test_a_record_that_cannot_be_formatted_harms_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    log, handler = log_to(Sink())
    log.warning("%d", "no number")
    assert "TypeError" in capsys.readouterr().err
    assert handler.lost == 0


def test_a_collector_gets_the_news_of_lost_lines_as_json_too() -> None:
    sink = Sink()
    log, _ = log_to(sink, JsonFormatter())
    sink.error = OSError(28, "full")
    log.error("lost")
    sink.error = None
    log.warning("after")
    told = [json.loads(line)["message"] for line in sink.getvalue().splitlines()]
    assert told == ["(1 log lines could not be written)", "after"]


# ------------------------------------------------------------------------------------------- tracebacks


def failing(place: int) -> Exception:
    """An exception as raised at one of many places in the code; its text is another one each time."""
    lines = "\n" * place
    try:
        exec(compile(f"{lines}raise ValueError({random.random()})", "of_ours.py", "exec"))
    except ValueError as error:
        return error
    raise AssertionError


class Flooded:
    """A log in JSON whose records bear times of our own."""

    def __init__(self) -> None:
        self._sink = Sink()
        self.log, self.handler = log_to(self._sink, JsonFormatter())

    def fail(self, now_s: float, place: int = 0, words: str = "request failed") -> None:
        error = failing(place)
        told = (type(error), error, error.__traceback__)
        self.handle(now_s, words, told)

    def handle(self, now_s: float, words: str, exc_info: object = None) -> None:
        record = logging.makeLogRecord(
            {"name": "sayfa.test", "msg": words, "exc_info": exc_info, "levelno": logging.ERROR}
        )
        record.created = now_s
        self.log.handle(record)

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._sink.getvalue().splitlines()]

    def count(self, words: str) -> int:
        return sum(words in str(line["message"]) for line in self.lines)


@pytest.mark.parametrize("seed", range(5))
def test_of_a_flood_of_tracebacks_the_first_are_kept_and_all_are_counted(seed: int) -> None:
    rng = random.Random(seed)
    flooded = Flooded()
    now_s = 1e9
    num_failed, num_other = rng.randrange(500, 1500), 0
    for number in range(num_failed):
        flooded.fail(now_s, words=f"failed {number}")
        if rng.random() < 0.1:
            flooded.handle(now_s, "of other things")
            num_other += 1
        now_s += rng.choice((0.0, 0.01, 1.0))
    flooded.handler.close()
    told = [line["left_out"] for line in flooded.lines if "left_out" in line]
    assert flooded.count("failed ") + sum(told) == num_failed  # type: ignore[arg-type]
    assert flooded.count("of other things") == num_other
    assert [line["message"] for line in flooded.lines if "traceback" in line][:MAX_TRACEBACKS] == [
        f"failed {number}" for number in range(MAX_TRACEBACKS)
    ]
    assert flooded.count("failed ") <= MAX_TRACEBACKS * ((now_s - 1e9) / TRACEBACK_SPAN_S + 1)
    assert all("ValueError at of_ours.py:1: " in str(line["message"]) for line in flooded.lines if "left_out" in line)


def test_a_bug_that_floods_hides_no_other_one() -> None:
    flooded = Flooded()
    for _ in range(100):
        flooded.fail(1e9)
    flooded.fail(1e9, place=7, words="another bug")
    assert flooded.count("another bug") == 1


def test_bugs_at_any_number_of_places_fill_no_disk_and_no_memory() -> None:
    flooded = Flooded()
    for place in range(1000):
        flooded.fail(1e9, place)
    flooded.handle(1e9 + TRACEBACK_SPAN_S, "later")
    written = MAX_PLACES + MAX_TRACEBACKS
    assert flooded.count("request failed") == written
    [told] = [line["left_out"] for line in flooded.lines if "left_out" in line]
    assert told == 1000 - written


def test_a_clock_that_jumps_back_ends_the_span() -> None:
    flooded = Flooded()
    for now_s in (1e9, 1e9 - 1000):
        for _ in range(10):
            flooded.fail(now_s)
    assert flooded.count("request failed") == 2 * MAX_TRACEBACKS
    assert flooded.count("left out") == 1
