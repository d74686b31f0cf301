"""R15: a log that cannot be written loses lines, counts them and says so once; who logs notices nothing."""

import logging
from io import StringIO

import pytest

from sayfa.base.log import SinkHandler, TextFormatter


class Sink(StringIO):
    """A stream that fails for a while."""

    error: Exception | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def log_to(sink: Sink) -> tuple[logging.Logger, SinkHandler]:
    handler = SinkHandler(sink)
    handler.setFormatter(TextFormatter())
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
    told = [line for line in sink.getvalue().splitlines() if "could not be" in line]
    assert told == ["(2 log lines could not be written)", "(3 log lines could not be written)"]
    assert handler.lost == 5


def test_a_record_that_cannot_be_formatted_harms_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    log, handler = log_to(Sink())
    log.warning("%d", "no number")
    assert "TypeError" in capsys.readouterr().err
    assert handler.lost == 0
