from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from fixtures_quality import write_rows

from sameseed.errors import ConfigError
from sameseed.measure.quality import data
from sameseed.measure.quality.data import GSM8K, HUMANEVAL, TEXT

ROW = {"question": "1?", "answer": "#### 1"}


def test_wikitext_is_joined_as_published(tmp_path: Path) -> None:
    # The set's rows are lines with their line ends, blank lines are empty; published figures join rows by blank lines.
    (tmp_path / "wiki.test.raw").write_text(" \n = A = \n \n first \n second \n")
    text, name = data.wikitext(tmp_path)
    assert name == "wiki.test.raw"
    assert text == "\n\n".join(["", " = A = \n", "", " first \n", " second \n"])


def test_packed_and_plain_files_read_alike(tmp_path: Path) -> None:
    (tmp_path / "wikitext2-test.txt.gz").write_bytes(gzip.compress("für\r\nüber\n".encode()))
    assert data.wikitext(tmp_path)[0] == "für\r\n\n\nüber\n"
    write_rows(tmp_path / "gsm8k-test.jsonl.gz", [ROW, {**ROW, "question": "a\u2028b"}])
    assert [r["question"] for r in data.rows(GSM8K, tmp_path)] == ["1?", "a\u2028b"]


def test_text_of_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.jsonl.gz", [{"text": "one\n"}, {"text": "two"}])
    assert data.text_of(tmp_path / "x.jsonl.gz") == "one\n\ntwo"
    (tmp_path / "x.txt").write_text("three")
    assert data.text_of(tmp_path / "x.txt") == "three"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "no rows"),
        (b"{", "no JSON"),
        (b"[1]\n", "no JSON object"),
        (b'{"question": 3, "answer": "x"}\n', "lacks 'question'"),
        (b'{"question": "x"}\n', "lacks 'answer'"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100_000, "no JSON"),
    ],
)
def test_odd_files_are_refused(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "gsm8k-test.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=match):
        data.rows(GSM8K, tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"humaneval\.jsonl"):
        data.rows(HUMANEVAL, tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        data.wikitext(tmp_path / "nowhere")


def test_without_the_hub_the_error_tells_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> Path:
        raise ConnectionError("no route to host\nat all")

    monkeypatch.setattr("sameseed.hub.fetch", unreachable)
    with pytest.raises(ConfigError, match=r"no route to host; give a folder .* --data"):
        data.rows(HUMANEVAL, None)


def test_the_hub_s_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    asked: list[tuple[Any, ...]] = []

    def download(repository: str, file: str, kind: str) -> Path:
        asked.append((repository, file, kind))
        rows = [{"text": ""}, {"text": " = A = \n"}] if repository == "Salesforce/wikitext" else [ROW]
        path = tmp_path / f"{len(asked)}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path

    monkeypatch.setattr("sameseed.hub.fetch", download)
    assert data.rows(GSM8K, None) == [ROW]
    assert data.wikitext(None)[0] == "\n\n = A = \n"
    assert asked[0] == ("openai/gsm8k", "main/test-00000-of-00001.parquet", "dataset")
    assert TEXT.hub is not None and asked[1][:2] == TEXT.hub
