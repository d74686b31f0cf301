"""One logger for the package, for people or for collectors.

`setup` is called once a process, by `cli` and `engine.process`. Every line goes to stderr. Fields given with `extra=`
are part of a JSON line and follow a text line as `key=value`. Prompts, answers and keys are never handed to a logger;
what looks like a key is hidden all the same, and control characters are escaped, so that a line stays a line. Of one
bug a few tracebacks a minute are written and the others counted.
"""

import json
import logging
import math
import os
import re
import select
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO, TypeVar

from sayfa.base.faults import altered

Text = TypeVar("Text", str, bytes)
NAME = "sayfa"
STDERR = 2
PIPE_WAIT_MS = 50
"""How long a line may wait for a reader of the log who is behind; the next ones do not wait at all."""
MAX_TRACEBACKS = 5
"""Of one place in the code, within TRACEBACK_SPAN_S: a bug that a caller can meet at will must not fill the disk."""
MAX_PLACES = 20
"""Within TRACEBACK_SPAN_S; further places count as one. A bug that floods hides no other one."""
TRACEBACK_SPAN_S = 60.0
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
# The report of a start shows the shell's variable in a key's place; that is no secret.
_SECRET = re.compile(r"(?i)(bearer\s+|api[_-]?key\W{1,3}|\bsk-)(?!\$)[^\s\"'\\,]{6,}")


def logger(room: str = "") -> logging.Logger:
    """The package's logger, or that of one room, e.g. `logger("server")`."""
    return logging.getLogger(f"{NAME}.{room}" if room else NAME)


class TextFormatter(logging.Formatter):
    """`12:01:02 INFO  server: text key=value …` for a person at a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback set in below it if there is one. Control characters are escaped."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        room = record.name.removeprefix(NAME).removeprefix(".") or NAME
        fields = "".join(f" {key}={value}" for key, value in _extras(record))
        line = hide_secrets(f"{clock} {record.levelname:<7} {room}: {_escape(record.getMessage() + fields)}")
        if not record.exc_info:
            return line
        # An exception's own text may hold line ends; set in, none of its lines can pass for one of the log.
        below = hide_secrets(self.formatException(record.exc_info)).split("\n")
        return "\n".join([line, *(f"  {_escape(part)}" for part in below)])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, room, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; values that JSON does not know are shown as text."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        data: dict[str, object] = {"time": stamp, "level": record.levelname.lower(), "logger": record.name,
                "message": hide_secrets(record.getMessage())}  # fmt: skip
        data.update((key, hide_secrets(value) if isinstance(value, str) else value) for key, value in _extras(record))
        if record.exc_info:
            data["traceback"] = hide_secrets(self.formatException(record.exc_info))
        line = json.dumps(data, default=str, ensure_ascii=False)
        # Terminals obey C1 controls, and many readers end a line at U+2028; JSON lets both stand as they are.
        return line if line.isprintable() else json.dumps(data, default=str)


class _Tracebacks:
    """Tells which records with a traceback are written, and keeps count of the others.

    Time is that of the records, which may jump: then a span is longer or shorter, once.
    """

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._seen: Counter[str] = Counter()

    def news(self, now_s: float) -> logging.LogRecord | None:
        """Begin a new span if the last one is over; tell of what that one left out, if anything."""
        if abs(now_s - self._begun_s) < TRACEBACK_SPAN_S:
            return None
        self._begun_s = now_s
        left_out = {place: count - MAX_TRACEBACKS for place, count in self._seen.items() if count > MAX_TRACEBACKS}
        self._seen.clear()
        if not left_out:
            return None
        by_place = ", ".join(f"{place}: {count}" for place, count in left_out.items())
        text = f"tracebacks left out within {TRACEBACK_SPAN_S:.0f} s: {by_place}"
        return _own_record(logging.ERROR, text, left_out=sum(left_out.values()))

    def admits(self, record: logging.LogRecord) -> bool:
        """Whether to write this record."""
        if not record.exc_info or record.exc_info[0] is None:
            return True
        place = _place(record.exc_info[0], record.exc_info[2])
        if place not in self._seen and len(self._seen) >= MAX_PLACES:
            place = "others"
        self._seen[place] += 1
        return self._seen[place] <= MAX_TRACEBACKS


def _place(kind: type[BaseException], trace: TracebackType | None) -> str:
    """Where an exception was raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
    return f"{kind.__name__}{where}"


def _own_record(level: int, text: str, **fields: object) -> logging.LogRecord:
    """A record that the log itself writes."""
    standard = {"name": NAME, "levelno": level, "levelname": logging.getLevelName(level), "msg": text}
    return logging.makeLogRecord({**standard, **fields})


class SinkHandler(logging.StreamHandler[TextIO]):
    """Drops and counts lines that cannot be written (disk full, pipe closed); before the next one it says how many.

    Nobody who logs ever notices: a request must not fail because of a line about it, nor wait for a pipe that nobody
    reads. Of a line that was cut off the rest is lost, and the next one begins a line of its own.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.lost = 0
        self._lost_now = 0
        self._torn = False
        self._poll = _poll_of(stream)
        self._tracebacks = _Tracebacks()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, behind the news of lost ones and of tracebacks that were left out."""
        self._tell_left_out(record.created)
        if self._tracebacks.admits(record):
            self._emit(record)

    def close(self) -> None:
        """Tell what only a next line would have told."""
        self._tell_left_out(math.inf)
        super().close()

    def _tell_left_out(self, now_s: float) -> None:
        news = self._tracebacks.news(now_s)
        if news is not None:
            self._emit(news)

    def _emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record) + self.terminator
        except Exception:  # a record that cannot be formatted is our own mistake, and is shown
            self.handleError(record)
            return
        if self._lost_now:
            news = _own_record(logging.WARNING, f"({self._lost_now} log lines could not be written)")
            text = self.format(news) + self.terminator + text
        try:
            self._put(self.terminator + text if self._torn else text)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.lost += 1
            self._lost_now += 1
        else:
            self._lost_now = 0
            self._torn = False

    def _put(self, text: str) -> None:
        """Write all of `text`, or raise OSError or ValueError. To a descriptor it goes in pieces that cannot block."""
        if self._poll is None:
            self.stream.write(self._pass_on(text))
            self.flush()
            return
        rest = text.encode("utf-8", "backslashreplace")
        begun = self._torn
        while rest:
            if not self._poll.poll(0 if self._lost_now else PIPE_WAIT_MS):
                self._torn = begun
                raise BlockingIOError("nobody reads the log")
            written = os.write(STDERR, self._pass_on(rest[: select.PIPE_BUF]))
            begun = self._torn = written < len(rest)
            rest = rest[written:]

    @staticmethod
    def _pass_on(data: Text) -> Text:
        return altered("log.write", data)


def _poll_of(stream: TextIO) -> "select.poll | None":
    """Make what tells whether stderr takes a piece without waiting; None for any other stream."""
    try:
        if stream.fileno() != STDERR:
            return None
    except (AttributeError, OSError, ValueError):  # no stream at all, or one in memory
        return None
    poll = select.poll()
    poll.register(STDERR, select.POLLOUT)
    return poll


def keep_standard_descriptors() -> None:
    """Open /dev/null in the place of each standard descriptor that is closed, as `2>&-` leaves it.

    The next file or socket would get its number otherwise, and what is said on stderr would go into it.
    """
    for number in (0, 1, STDERR):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(STDERR, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115


def setup(level: str = "info", form: str = "text") -> None:
    """Send this process's log lines to stderr, in place of earlier handlers. form: "text" or "json"."""
    handler = SinkHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING if level != "debug" else logging.INFO)
    logger().setLevel(level.upper())


def always(room: str, text: str, fields: Mapping[str, object]) -> None:
    """Write a line of level info whatever `--log-level` is: what was asked for, not what happened on the way."""
    log = logger(room)
    log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None, extra=fields))


def hide_secrets(text: str) -> str:
    """The text with everything that looks like an API key replaced."""
    return _SECRET.sub(lambda match: match[1] + "(hidden)", text)


def _escape(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _extras(record: logging.LogRecord) -> Iterable[tuple[str, object]]:
    return ((key, value) for key, value in vars(record).items() if key not in _STANDARD)
