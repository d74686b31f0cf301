"""The protocol that every executor of programs keeps, and nothing else.

`runner.model_runner` makes one executor and calls it once a step; it does not know which one it has.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sayfa.nn.program.program import InputBatch


class Executor(Protocol):
    """Runs one program on one device; owns packed weights, activation buffers and the K/V pages."""

    name: str
    """ "native" or "reference"."""

    def op_notes(self) -> dict[str, str]:
        """Op kind → "native", or the sentence why it runs on the reference."""
        ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def buffers_bytes(self) -> int: ...

    @property
    def bytes_per_page(self) -> int:
        """K and V of all layers for one page."""
        ...

    def allocate_pages(self, num_pages: int) -> None:
        """Make the page tensors; page 0 is reserved (never handed out by the pool)."""
        ...

    def populate_pages(self) -> Iterator[None]:
        """Have the system give memory to the pages that are used first, a piece of milliseconds for each item."""
        ...

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in all layers."""
        ...

    def run(self, batch: InputBatch) -> NDArray[np.float32]:
        """Execute one step. Returns logits [L, V] float32: a view, valid until the next run, that may be changed."""
        ...
