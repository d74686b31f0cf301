"""Lines of the request log for those who were turned away before any books were open: a few a second, the rest counted.

Called by the edge, by `app` for what the router refuses, and by `connection`. A flood of bad requests must not fill the
disk, nor hide that somebody knocks with wrong keys: one line tells how many others there were, by code. No header and
no query is looked at, since they may hold keys. Knows no reasons, only their codes.
"""

import asyncio
import logging
import re
from collections import Counter
from typing import NamedTuple

from starlette.types import Scope

from sayfa.server.errors import to_answer

log = logging.getLogger("sayfa.server.request")

MAX_LINES = 5
"""Of refusals, within SPAN_S; one more tells of those that were left out."""
SPAN_S = 1.0
MAX_PATH_CHARS = 100
MAX_METHOD_CHARS = 16
_PATH = re.compile(rb"/[^?#]*")
_UNPRINTABLE = re.compile(rb"[^!-~]")


class Attempt(NamedTuple):
    """What is known of a refused request; of one that was refused with its connection only `client`, its address.

    target: as it was sent, as far as it came.
    """

    client: str = "-"
    method: bytes = b""
    target: bytes = b""
    request_id: str = "-"

    @classmethod
    def of(cls, scope: Scope) -> "Attempt":
        """The attempt that a request of the application is."""
        client = scope["client"][0] if scope.get("client") else "-"
        target = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
        return cls(client, scope["method"].encode(), target, scope.get("sayfa.request_id", "-"))


class Refusals:
    """Writes their lines. write_lines: whether requests are logged at all.

    Invariant: a span begins with a refusal; in each are at most MAX_LINES lines, and one at its end.
    """

    def __init__(self, write_lines: bool) -> None:
        self._write_lines = write_lines
        self._span: asyncio.TimerHandle | None = None
        self._num_lines = 0
        self._left_out: Counter[str] = Counter()

    def note(self, attempt: Attempt, error: Exception) -> None:
        """Write the line of a refusal, or count it. Only within a running event loop."""
        if not self._write_lines:
            return
        if self._span is None:
            self._span = asyncio.get_running_loop().call_later(SPAN_S, self._end_span)
        answer = to_answer(error, attempt.request_id)
        code = answer.error.code or answer.error.type
        if self._num_lines == MAX_LINES:
            self._left_out[code] += 1
            return
        self._num_lines += 1
        log.info(
            # A long word behind `api_key` or `bearer` is hidden as a key: behind the code no such word may stand, and
            # behind the path, which may end like that, one that can be spared.
            "refused:%s %d %s",
            code,
            answer.status,
            _shown_path(attempt.target),
            extra={
                "method": _printable(attempt.method[:MAX_METHOD_CHARS]) or "-",
                "client": attempt.client,
                "request_id": attempt.request_id,
            },
        )

    def _end_span(self) -> None:
        left_out, self._left_out = self._left_out, Counter()
        self._span, self._num_lines = None, 0
        if left_out:
            by_code = ", ".join(f"{code}: {count}" for code, count in sorted(left_out.items()))
            log.info("refused within a second besides: %s", by_code, extra={"left_out": left_out.total()})


def _shown_path(target: bytes) -> str:
    """The path of a target, cut short. "-" if it does not begin with one: a whole address may hold a password."""
    found = _PATH.match(target)
    if found is None:
        return "-"
    path = found[0]
    return _printable(path[:MAX_PATH_CHARS]) + ("…" if len(path) > MAX_PATH_CHARS else "")


def _printable(data: bytes) -> str:
    return _UNPRINTABLE.sub(b"?", data).decode("ascii")
