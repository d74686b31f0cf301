"""A file mapped read-only, and the one place that looks whether it is still as long as it was.

Used by the readers of weight files (`base.gguf`, `models.formats`). Knows no format.
"""

import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from sayfa.base.errors import WeightFileError
from sayfa.base.faults import fault


class MappedFile:
    """An open file of at least `min_bytes`. `name` is without its folder, since messages reach many people.

    Raises WeightFileError if it cannot be opened, is too short, or is no regular file.
    """

    def __init__(self, path: str | os.PathLike[str], min_bytes: int) -> None:
        self.name = Path(path).name
        self._fd = -1
        try:
            fault("load.open")
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            # The size is asked of the open descriptor, so that a file exchanged in between cannot deceive.
            self.size = os.fstat(self._fd).st_size
            if self.size < min_bytes:
                raise WeightFileError(self.name, "file", f"has {self.size} bytes, but its header alone has {min_bytes}")
            fault("load.map")
            self.view = memoryview(mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ))
        except OSError as error:
            self.close()
            raise WeightFileError(self.name, "file", f"cannot be opened ({error.strerror})") from None
        except BaseException:
            self.close()
            raise

    def data(self, field: str, start: int, num_bytes: int) -> memoryview:
        """Give bytes of the file, read-only and not copied; `field` names them if something is wrong.

        The size is looked at again each time: reading a map beyond the end of a file that shrank kills the process.
        """
        fault("load.tensor")
        if self._fd < 0 or os.fstat(self._fd).st_size < self.size:
            raise WeightFileError(self.name, field, "the file was closed, or became shorter while it was open")
        return self.view[start : start + num_bytes]

    def close(self) -> None:
        """Close the descriptor; the map lives on as long as somebody looks at it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def check_disjoint(ranges: Iterable[tuple[int, int, str]], error: Callable[[str, str], WeightFileError]) -> None:
    """Raise `error(name, problem)` if two of the half-open (start, end, name) ranges share a byte."""
    last_end, last_name = 0, ""
    for start, end, name in sorted(ranges):
        if start < last_end:
            raise error(name, f"lies over the bytes of {last_name}")
        last_end, last_name = end, name
