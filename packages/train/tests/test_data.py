"""Documents become token rows without loss, and bad data names its line."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer

from sameseed.errors import SameseedError
from sameseed_train import data as corpus
from sameseed_train.made import FIRST, LAST, made_texts
from sameseed_train.recipe import load_recipe
from sameseed_train.tokenizer import ASSISTANT, BEGIN, END, USER

PAD = 0


@given(st.lists(st.integers(1, 150), max_size=400), st.integers(8, 64))
def test_packing_keeps_every_piece_once(lengths: list[int], row: int) -> None:
    documents = [[1, *([7 + i] * (n - 1))] for i, n in enumerate(lengths)]
    rows = corpus.pack(documents, row, PAD)
    expected = Counter(t for ids in documents for piece in corpus.pieces(ids, row) for t in piece)
    found = Counter(rows.flatten().tolist())
    found.pop(PAD, None)
    assert found == expected
    if len(rows):
        assert rows.shape[1] == row
        assert (rows[:, 0] == 1).all(), "every row starts where a document or a piece of one starts"


def test_pieces_of_a_long_document_cover_it() -> None:
    ids = [1, *range(100, 400)]
    parts = list(corpus.pieces(ids, 64))
    assert [t for part in parts for t in part if t != 1][: 300 - 32] == list(range(100, 400))[: 300 - 32]
    assert all(part[0] == 1 and len(part) <= 64 for part in parts)


def test_chat_documents_become_role_tokens(tokenizer: Tokenizer) -> None:
    row = {"text": "User: What?\n\nAssistant: That: User: x\n", "source": "s", "answer_start": 24}
    turns = corpus.question_and_answer({**row, "answer_start": row["text"].index("That")})  # type: ignore[attr-defined]
    assert turns == (("user", "What?"), ("assistant", "That: User: x"))
    ids = corpus.encode(tokenizer, corpus.Document("d", "s", str(row["text"]), turns))
    special = [tokenizer.id_to_token(i) for i in ids if i < 6]
    assert special == [BEGIN, USER, END, ASSISTANT, END]
    assert ids[-1] == tokenizer.token_to_id(END), "an answer ends with the token that stops the model"
    turns = corpus.question_and_answer({"text": "User: a\n\nb\n\nAssistant: c\n"})
    assert turns == (("user", "a\n\nb"), ("assistant", "c")), "an answer is found without its offset"


def test_dialogs_split_at_line_starts_only() -> None:
    turns = corpus.split_turns("User: say User: twice\nAssistant: ok\nUser: bye\nAssistant: bye\n")
    assert [role for role, _ in turns] == ["user", "assistant", "user", "assistant"]
    assert turns[0][1] == "say User: twice"
    assert corpus.split_turns("A: no roles\nB: here\n") == ()


def test_batches_go_through_all_rows_before_any_comes_again() -> None:
    rows = torch.arange(10, dtype=torch.int32)[:, None].expand(10, 3)
    seen = [int(x) for step in range(5) for x in corpus.next_rows(rows, 4 * step, 4, seed=1)[:, 0]]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:], "each pass has an order of its own"


def test_padding_is_no_target() -> None:
    inputs, targets = corpus.inputs_and_targets(torch.tensor([[1, 5, 6, PAD, PAD]]), PAD)
    assert inputs.tolist() == [[1, 5, 6, PAD]]
    assert targets.tolist() == [[5, 6, -1, -1]]


def test_standard_library_split_shares_no_file() -> None:
    kept = {d.source for d in corpus.stdlib_documents("code", held_out=False)}
    held_out = {d.source for d in corpus.stdlib_documents("code", held_out=True)}
    assert kept and held_out and not kept & held_out
    assert not any("/test/" in name or "/site-packages/" in name for name in kept | held_out)


def test_held_out_documents_are_not_trained_on(data: Path, recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path)
    held_out = {d.text for d in corpus.held_out_documents(recipe, data)}
    assert held_out and not held_out & {d.text for d in corpus.training_order(recipe, data)}


@pytest.mark.parametrize("line", ["no json", '{"text": 3, "source": "made-x"}', '{"text": "a"}', "[1]"])
def test_bad_rows_name_their_line(data: Path, recipe_path: Path, line: str) -> None:
    with gzip.open(data / "sums.jsonl.gz", "at", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(SameseedError, match=r"sums\.jsonl\.gz:151"):
        corpus.training_order(load_recipe(recipe_path), data)


def test_damaged_archive_and_unmatched_source(data: Path, recipe_path: Path) -> None:
    path = data / "sums.jsonl.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(SameseedError, match=r"sums\.jsonl\.gz is damaged"):
        corpus.training_order(load_recipe(recipe_path), data)
    path.write_bytes(whole)
    recipe_path.write_text(recipe_path.read_text(encoding="utf-8").replace('["talk"]', '["tolk"]'), encoding="utf-8")
    with pytest.raises(SameseedError, match=r"no row of talk\.jsonl\.gz is named tolk"):
        corpus.training_order(load_recipe(recipe_path), data)


def test_records_say_what_was_asked_and_held_out_people_are_not_trained_on() -> None:
    everyone, seen = [f"{first} {last}" for first in FIRST for last in LAST], list[set[str]]()
    for texts in (islice(made_texts("records", 1, held_out=False), 2000), made_texts("records", 1, held_out=True)):
        seen.append(set())
        for question, answer in texts:
            names = {name for name in everyone if name in answer}
            assert names and names == {name for name in everyone if name in question}
            for row in json.loads(answer) if answer.startswith("[") else ():
                assert all(str(value) in question for value in row.values()), answer
            seen[-1] |= names
    assert seen[0] and seen[1] and not seen[0] & seen[1]


def test_sums_are_right_and_held_out_ones_are_not_trained_on() -> None:
    seen: list[set[tuple[str, str, str]]] = []
    for texts in (islice(made_texts("sums", 1, held_out=False), 3000), made_texts("sums", 1, held_out=True)):
        seen.append(set())
        for question, answer in texts:
            a, sign, b, _, result = answer.split(".")[0].split()
            value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
            assert int(result) == value and f"The answer is {result}" in answer
            assert question.index(a) <= question.rindex(b)
            seen[-1].add((a, sign, b))
    assert seen[0] and seen[1] and not seen[0] & seen[1]
