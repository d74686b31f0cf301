"""Where results go: files, whole or not at all, and standard streams that take any text. Knows no format.

Called by `main` and by the commands that write. A file is written beside its place and then put there, so that a full
disk, a lost mount or a killed command leaves what was there before, and never half a line. What is no plain file (a
pipe, a device) is written to as it is.
"""

import io
import os
import sys
from pathlib import Path

from sayfa.base.errors import ConfigError
from sayfa.base.faults import altered


def take_any_text() -> None:
    """Let no character end a command: what stdout's encoding lacks is escaped there, and bytes on stdin that are no
    text become lone surrogates, which whoever is given them refuses in words.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def check_output(path: Path | None) -> None:
    """Raise ConfigError if nothing can be written there; to be asked before hours of work, not after them."""
    if path is None or _is_special(path):
        return
    beside = _beside(path)
    try:
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT, 0o666))
        beside.unlink()
    except OSError as error:
        raise _cannot(path, error) from None


def write_output(path: Path, data: bytes) -> None:
    """Make `path` hold exactly `data`. Raises ConfigError, and then what was there before is there still."""
    try:
        if _is_special(path):
            _write(path, data)
            return
        beside = _beside(path)
        try:
            _write(beside, data)
            beside.replace(path.resolve())
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot(path, error) from None


def tell(text: str) -> None:
    """Write to stderr for whoever may be there; that nobody is, or a full disk, is no reason to stop."""
    try:
        sys.stderr.write(altered("progress.write", text))
        sys.stderr.flush()
    except (OSError, ValueError):  # ValueError: the stream is closed
        pass


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (0 if _is_special(path) else os.O_TRUNC), 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, altered("output.write", rest)) :]
        if not _is_special(path):
            os.fsync(descriptor)  # some disks tell only now that they are full
    finally:
        os.close(descriptor)


def _is_special(path: Path) -> bool:
    """Whether the path is there and no plain file; a folder counts, and fails when it is opened."""
    return path.exists() and not path.is_file()


def _beside(path: Path) -> Path:
    place = path.resolve()
    return place.with_name(f".{place.name}.{os.getpid()}.part")


def _cannot(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--output {path} cannot be written: {error.strerror}")
