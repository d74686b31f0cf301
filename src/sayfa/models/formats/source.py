"""Where a model lies → its tensors, whatever the format. Reads and checks headers; loads nothing.

Called by `engine.build` and by the model loader. Only formats that cannot carry code are opened: GGUF and safetensors.
"""

import logging
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sayfa.base.errors import ModelError
from sayfa.models.formats.checksum import check_digest
from sayfa.models.formats.gguf import GgufSource
from sayfa.models.formats.safetensors import INDEX_NAME, WHOLE_NAME, SafetensorsSource, open_sharded

log = logging.getLogger(__name__)

_UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".h5", ".msgpack")


class TensorSource(Protocol):
    """An open weight file, or several that belong together. Unknown names raise KeyError."""

    def names(self) -> list[str]:
        """Name all tensors."""
        ...

    def info(self, name: str) -> tuple[tuple[int, ...], str]:
        """Give shape (rows first) and type name, for example `((576, 1536), "Q4_1")`."""
        ...

    def read(self, name: str) -> NDArray[np.uint8]:
        """Give the raw bytes, a read-only view of the file's map."""
        ...


def open_weights(path: str | Path) -> TensorSource:
    """Open a .gguf or .safetensors file or a model folder. Raises ModelError with the reason and the way out."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        check_digest(path)
    if path.suffix == ".gguf":
        return GgufSource(path)
    if path.suffix == ".safetensors":
        return SafetensorsSource([path])
    if path.suffix in _UNSAFE:
        raise ModelError(_refusal(path.name))
    raise ModelError(f"{path.name}: is neither a .gguf nor a .safetensors file nor a model folder.")


def _open_folder(folder: Path) -> TensorSource:
    """Read the whole file if there is one, else those of the index, as transformers does; without both, all files."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        unsafe = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _UNSAFE)
        if unsafe:
            raise ModelError(_refusal(unsafe[0]))
        hint = "name the .gguf file itself" if any(folder.glob("*.gguf")) else "the weights are missing"
        raise ModelError(f"{folder.name}: has no .safetensors file; {hint}.")
    whole = folder / WHOLE_NAME
    if whole.is_file():
        others = ", ".join(path.name for path in paths if path != whole)
        if others:
            log.warning("%s: %.300s lie beside %s and are not read", folder.name, others, WHOLE_NAME)
        paths = [whole]
    elif (folder / INDEX_NAME).is_file():
        return open_sharded(folder, lambda path: _check_file(folder, path))
    for path in paths:
        _check_file(folder, path)
    return SafetensorsSource(paths)


def _check_file(folder: Path, path: Path) -> None:
    _check_inside(folder, path)
    if path.is_file():  # what is missing is told by who opens it
        check_digest(path)


def _check_inside(folder: Path, path: Path) -> None:
    """Refuse a link that leads out of the folder, except into the blob store of the hub's own cache layout."""
    root = folder.resolve()
    target = path.resolve()
    blobs = root.parent.parent / "blobs"
    inside = target.is_relative_to(root) or (root.parent.name == "snapshots" and target.is_relative_to(blobs))
    if not inside:
        raise ModelError(f"{path.name}: is a link that leads out of the model's folder; put the file itself there.")


def _refusal(name: str) -> str:
    return (
        f"{name}: this format can carry code and is never opened. Save the model as safetensors "
        "(`model.save_pretrained(FOLDER, safe_serialization=True)`) or convert it to GGUF."
    )
