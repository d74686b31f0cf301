"""What is told of fields that nobody knows: each name once, few of them, and none kept that was not told."""

import logging

import pytest

from sayfa.server import body
from sayfa.server.openai.protocol import DetokenizeRequest


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(body, "_reported", set())
    caplog.set_level(logging.WARNING)
    return caplog


def report(*names: str) -> None:
    body.report_unknown(DetokenizeRequest(tokens=[], **dict.fromkeys(names, 1)), "/detokenize")


def test_a_name_that_found_no_place_in_a_line_is_told_by_the_next(log: pytest.LogCaptureFixture) -> None:
    names = [f"field_{number:02}" for number in range(30)]
    report(*names)
    report(*names)
    report(*names)
    told = [message.count("field_") for message in log.messages]
    assert told == [20, 10]
    assert all(sum(name in message for message in log.messages) == 1 for name in names)


def test_names_cost_bounded_memory_and_lines(log: pytest.LogCaptureFixture) -> None:
    for number in range(30):
        report(*(f"{number}-{place}-" + "x" * 5000 for place in range(300)))
    assert len(log.messages) == body.MAX_REPORTED_NAMES / body.MAX_NAMES_OF_REQUEST
    assert sum(map(len, body._reported)) <= body.MAX_REPORTED_NAMES * body.MAX_NAME_CHARS
