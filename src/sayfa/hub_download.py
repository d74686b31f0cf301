"""Fetch a model from the hub with huggingface_hub; loaded by `hub` only when the user named a hub id.

Fetches data files and nothing that could run: no Python, no pickles. Progress bars are the library's own.
"""

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from sayfa.base.errors import ModelError
from sayfa.base.faults import fault

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_UNWANTED = ["*/*", "*.py", "*.bin", "*.pt", "*.pth", "*.onnx", "*.h5", "*.msgpack"]


def download(repository: str, file: str | None, revision: str | None, offline: bool) -> Path:
    """Return the local path of a repository's snapshot, or of one `file` in it.

    With `offline` only what was fetched before is found. Raises ModelError with a sentence for the user.
    """
    try:
        fault("hub.fetch")
        if file is not None:
            return Path(hf_hub_download(repository, file, revision=revision, local_files_only=offline))
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                local_files_only=offline,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except GatedRepoError:
        raise ModelError(
            f"{repository}: its owner asks you to accept a licence on the hub first; then log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{repository}: there is no such model on the hub, or it is private; check the spelling, or `hf auth login`"
        ) from None
    except LocalEntryNotFoundError as error:
        if offline:
            raise ModelError(
                f"{repository}: not on this machine, and asking the hub is forbidden (--offline or HF_HUB_OFFLINE); "
                f"fetch it once where there is a network with: hf download {repository}"
            ) from error
        raise ModelError(f"{repository}: the hub cannot be reached, and no copy is on this machine") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"{repository}: fetching it failed: {error}") from error
