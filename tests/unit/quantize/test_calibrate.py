"""Calibration text: what is read, how rows are cut, and the errors for bad files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lawkit import write_tokenizer

from sameseed.errors import ConfigError
from sameseed.quantize._calibrate import pack, read_calibration
from sameseed.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(r)}\n" for r in rows), encoding="utf-8")
    return path


def test_every_kind_of_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the sum"}, {"role": "assistant", "content": "is a whole"}]
    path = write(tmp_path / "a.jsonl", {"text": "the list is empty"}, {"prompt": "the loop"}, {"messages": messages})
    found = read_calibration(path, tokenizer, 1, 8, seed=0)
    assert found.rows.shape == (1, 8) and len(found.held_out) == 0
    all_tokens = read_calibration(path, tokenizer, 99, 8, seed=0).rows.flatten().tolist()
    text = tokenizer.decode(all_tokens)
    assert "user: the loop" in text or "user: the sum" in text, "the chat template wrote it"


def test_a_plain_text_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("the end of the list " * 50)
    found = read_calibration(tmp_path / "a.txt", tokenizer, 4, 16, seed=0)
    assert found.rows.shape == (4, 16)
    assert found.source == "a.txt: 4 rows of 16 tokens"
    ids = tokenizer.encode("the end of the list " * 50)
    assert found.rows[0].tolist() == ids[:16]
    assert found.rows[1].tolist() == ids[16:32]


def test_later_pieces_open_with_the_begin_token() -> None:
    documents = [[1, *range(10, 30)], [1, 40, 41]]
    assert pack(documents, 8, 9, [1]) == [
        [1, 10, 11, 12, 13, 14, 15, 16],
        [1, 17, 18, 19, 20, 21, 22, 23],
        [1, 24, 25, 26, 27, 28, 29, 1],
    ]


def test_rows_follow_the_seed_and_held_out_rows_are_others(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": f"the list number {i} is empty, return {i * 7}"} for i in range(60)))
    first, again, other = (read_calibration(path, tokenizer, 6, 16, seed=s, held_out=2) for s in (1, 1, 2))
    assert first.rows.equal(again.rows) and not first.rows.equal(other.rows)
    assert first.held_out.shape == (2, 16) and first.rows.shape == (6, 16)
    assert not any(row.equal(kept) for row in first.rows for kept in first.held_out)


def test_a_short_text_gives_what_it_has(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "the list"})
    assert read_calibration(path, tokenizer, 128, 512, seed=0).rows.tolist() == [tokenizer.encode("the list")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"\n \n", "give lines"),
        ("a.jsonl", b'{"text": "fine"}\n{"txt": "not"}\n', "a.jsonl:2"),
        ("a.jsonl", b'{"text": "open\n', "a.jsonl:1"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "a.jsonl:1"),
        ("a.parquet", b"x", ".jsonl or a .txt"),
        ("a.txt", b"\xff\xfe\x00", "UTF-8"),
        ("missing.jsonl", None, "give"),
    ],
)
def test_bad_files(tmp_path: Path, tokenizer: Tokenizer, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_calibration(tmp_path / name, tokenizer, 4, 16, seed=0)
