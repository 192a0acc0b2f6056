"""Fetches a file from the Hugging Face hub.

A hub that does not answer is tried only once: the hub's own library would retry for half a minute, with messages.
"""

from __future__ import annotations

from pathlib import Path


def fetch(repository: str, file: str, kind: str = "model") -> Path:
    """The path of a file in the hub's cache, downloaded if needed. If the hub does not answer, the cached file is used.

    Raises what the hub's library raises: its own errors, and those of the HTTP library that it uses.
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
