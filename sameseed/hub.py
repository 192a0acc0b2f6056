"""One file of the hub. A hub that is silent is asked once: its own library goes on for half a minute, aloud."""

from __future__ import annotations

from pathlib import Path


def fetch(repository: str, file: str, kind: str = "model") -> Path:
    """Where a file is in the hub's cache, downloaded if need be; the one that is there, where the hub does not answer.

    Raises what the hub's library raises: errors of its own, and of the HTTP library that it is built on.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repository, file, repo_type=kind), timeout=10)
    except Exception as error:
        try:
            return Path(hf_hub_download(repository, file, repo_type=kind, local_files_only=True))
        except Exception:
            raise error from None
    return Path(hf_hub_download(repository, file, repo_type=kind))
