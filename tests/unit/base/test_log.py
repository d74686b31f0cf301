"""Log lines: one event is one line, keys never show, JSON can be parsed whatever is in it."""

import json
import logging
import random

import pytest

from sayfa.base.log import JsonFormatter, TextFormatter, hide_secrets


def record(message, **extra):
    made = logging.makeLogRecord({"name": "sayfa.server", "levelname": "INFO", "levelno": 20, "msg": message})
    vars(made).update(extra)
    return made


@pytest.mark.parametrize("seed", range(20))
def test_any_text_stays_one_line_in_both_forms(seed):
    rng = random.Random(seed)
    text = "".join(
        chr(rng.choice([rng.randrange(0x20), rng.randrange(0x7F, 0xA0), rng.randrange(0x2000, 0x2100), 10, 13, 27]))
        for _ in range(40)
    )
    line = TextFormatter().format(record("x" + text, note=text))
    assert line.isprintable()
    data = json.loads(JsonFormatter().format(record(text, note=text)))
    assert data["note"] == hide_secrets(text)
    assert JsonFormatter().format(record(text, note=text)).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "Bearer abcdef123456", "api_key=abcdef123456", "api-key: abcdef123456", "sk-abcdef123456",
        "Bearer a!b@c#abcdef123456", f"Bearer {'a' * 600}abcdef123456",
    ],
)  # fmt: skip
def test_what_looks_like_a_key_is_hidden(text):
    for form in (TextFormatter(), JsonFormatter()):
        assert "abcdef123456" not in form.format(record(f"got {text}", header=text))


def test_fields_are_part_of_the_line():
    assert "num_prompt=3" in TextFormatter().format(record("done", num_prompt=3))
    assert json.loads(JsonFormatter().format(record("done", num_prompt=3)))["num_prompt"] == 3


def test_a_traceback_is_kept():
    try:
        raise ValueError("odd")
    except ValueError as error:
        made = record("failed", exc_info=(type(error), error, error.__traceback__))
    assert "ValueError: odd" in TextFormatter().format(made)
    assert "ValueError: odd" in json.loads(JsonFormatter().format(made))["traceback"]


def test_no_line_of_a_traceback_passes_for_one_of_the_log():
    try:
        raise ValueError("odd\n12:00:00 INFO    server: forged\x1b[2J\r\x9b")
    except ValueError as error:
        made = record("failed", exc_info=(type(error), error, error.__traceback__))
    lines = TextFormatter().format(made).split("\n")
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if not line.startswith("  ")] == lines[:1]
    assert "forged" in lines[-1]


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_a_key_in_a_traceback_is_hidden_too(form):
    try:
        raise ValueError("got Bearer abcdef123456")
    except ValueError as error:
        made = record("failed", exc_info=(type(error), error, error.__traceback__))
    assert "abcdef123456" not in form.format(made)
