"""The tensors of a GGUF file as a `TensorSource`. Called by `formats.source`; the checks are in `base.gguf`."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sayfa.base.errors import ModelError
from sayfa.base.gguf import read_gguf
from sayfa.base.quoting import quoted


class GgufSource:
    """An open GGUF file. Raises WeightFileError as `base.gguf` does."""

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        parts = self._file.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise ModelError(
                f"{path.name}: is one of {quoted(parts, 20)} parts of a model; join them first "
                "(`llama-gguf-split --merge`)."
            )

    def names(self) -> list[str]:
        return list(self._file.tensors)

    def info(self, name: str) -> tuple[tuple[int, ...], str]:
        tensor = self._file.tensors[name]
        return tensor.shape, tensor.type_name

    def read(self, name: str) -> NDArray[np.uint8]:
        return np.frombuffer(self._file.data(self._file.tensors[name]), np.uint8)
