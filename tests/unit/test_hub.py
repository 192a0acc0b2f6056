"""A file of the hub: asked for once, and taken from the cache if the hub does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sameseed import hub


def test_a_silent_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def silent(url: str, **_: Any) -> None:
        asked.append(url)
        raise ConnectionError("no route")

    def nothing(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        assert local_files_only, "the library would ask again and again"
        raise OSError("not in the cache")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", silent)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", nothing)
    with pytest.raises(ConnectionError, match="no route"):
        hub.fetch("org/name", "config.json")
    assert len(asked) == 1 and asked[0].endswith("/org/name/resolve/main/config.json")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **_: "/".join(a))
    assert hub.fetch("org/name", "config.json") == Path("org/name/config.json")


def test_a_hub_that_answers_is_downloaded_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, repo_type: "/".join((*a, repo_type)))
    assert hub.fetch("org/name", "a.parquet", "dataset") == Path("org/name/a.parquet/dataset")
