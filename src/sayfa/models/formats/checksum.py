"""Compares weight files with the SHA-256 that lies beside them, where one does.

Called by `formats.source`. Without such a file nothing is read: the cost (about a second for each GiB) is paid only by
those who asked for the certainty.
"""

import hashlib
import re
from pathlib import Path

from sayfa.base.errors import WeightFileError
from sayfa.base.faults import fault

_LINE = re.compile(r"([0-9a-fA-F]{64})(?:\s+\*?(.+))?")
_MAX_LIST_BYTES = 1 << 20


def check_digest(path: Path) -> None:
    """Raise WeightFileError if `FILE.sha256` or `SHA256SUMS` in its folder names another digest than the file has."""
    wanted = _wanted(path)
    if wanted is None:
        return
    fault("load.checksum")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise WeightFileError(path.name, "sha256", f"is {found[:16]}…, but {wanted[:16]}… is promised; fetch it again")


def _wanted(path: Path) -> str | None:
    for listing in (path.with_name(path.name + ".sha256"), path.with_name("SHA256SUMS")):
        if not listing.is_file():
            continue
        with open(listing, "rb") as file:
            lines = file.read(_MAX_LIST_BYTES).decode("utf-8", "replace").splitlines()
        for line in lines:
            match = _LINE.fullmatch(line.strip())
            if match is None:
                if listing.name != "SHA256SUMS" and line.strip():
                    raise WeightFileError(listing.name, "sha256", "holds no digest in the form of `sha256sum`")
                continue
            if (match[2] or path.name).removeprefix("./") == path.name:
                return match[1].lower()
    return None
