"""Harm that a world can do: a disk that is full under the log, and what armed fault points do."""

import logging
from io import StringIO

from sayfa.base.log import SinkHandler, TextFormatter
from world.runner import DeathError


class Disk(StringIO):
    """What the log is written to. While it is full nothing can be written."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.num_refused = 0

    def write(self, text: str) -> int:
        if self.is_full:
            self.num_refused += 1
            raise OSError(28, "No space left on device")
        return len(text)

    def empty(self) -> None:
        self.is_full = False


class LogOnDisk:
    """Puts the package's log on a disk while a history plays."""

    def __init__(self) -> None:
        self.disk = Disk()

    def __enter__(self) -> "LogOnDisk":
        handler = SinkHandler(self.disk)
        handler.setFormatter(TextFormatter())
        self._log = logging.getLogger("sayfa")
        self._before = (self._log.handlers[:], self._log.propagate, self._log.level)
        self._log.handlers[:] = [handler]
        self._log.propagate = False
        self._log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.handlers[:], self._log.propagate, level = self._before
        self._log.setLevel(level)


def _raise() -> None:
    raise RuntimeError("armed")


def _raise_os_error() -> None:
    raise OSError("armed")


def _die() -> None:
    raise DeathError


ACTIONS = {
    **{("raise", part): _raise for part in ("engine", "runner", "proces")},
    **{("die", part): _die for part in ("engine", "runner", "proces")},
    ("raise", "client"): _raise_os_error,
    ("die", "client"): _raise_os_error,
}
