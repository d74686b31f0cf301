"""What can go wrong at a point, by name. Used by all stages of F03."""

import errno
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from world.runner import DeathError


class Kind(NamedTuple):
    """action: what happens at the point. alter: what is made of the value that the point hands through."""

    action: Callable[[], None] | None = None
    alter: Callable[[Any], Any] | None = None


def _raising(error: BaseException) -> Kind:
    def action() -> None:
        raise error

    return Kind(action)


def _spoiled(value: float) -> Callable[[Any], Any]:
    def alter(logits: Any) -> Any:
        logits = np.array(logits)
        logits[-1, logits.shape[1] // 2] = value
        return logits

    return alter


KINDS: dict[str, Kind] = {
    "raise": _raising(RuntimeError("armed")),
    "memory": _raising(MemoryError("armed")),
    "die": _raising(DeathError()),
    "nan": Kind(alter=_spoiled(np.nan)),
    "infinite": Kind(alter=_spoiled(np.inf)),
    "drop": Kind(alter=lambda data: data[:0]),
    "double": Kind(alter=lambda data: data + data),
    "cut": Kind(alter=lambda data: data[: len(data) // 2]),
    "flip": Kind(alter=lambda data: bytes(data[:-1]) + bytes([data[-1] ^ 0x55])),
    "short": Kind(alter=lambda data: data[: max(1, len(data) // 2)]),
}

DISK = {name: OSError(getattr(errno, name), name) for name in ("ENOSPC", "EIO", "EROFS", "EPIPE")}
KINDS |= {name.lower(): _raising(error) for name, error in DISK.items()}
