"""Read calibration text as token rows: .jsonl (`text`, or `prompt` or `messages` for the chat template) or .txt."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.lines import read_lines, read_text
from sameseed.tokenizer import Tokenizer

MOST_DOCUMENTS = 100_000  # lines that are read; enough for any choice of samples


@dataclass(frozen=True)
class Calibration:
    """`rows` int64 [B, S] for the statistics, `held_out` [B', S] for measuring what quantization costs."""

    rows: Tensor
    held_out: Tensor
    source: str  # the file's name, the number of rows and their length


def read_calibration(
    path: Path, tokenizer: Tokenizer, samples: int, length: int, seed: int, held_out: int = 0
) -> Calibration:
    """`samples` rows of `length` tokens from documents in a seeded order, and `held_out` further rows.

    Long documents are cut and short ones joined, without padding. Held-out rows are at most a quarter of all rows. A
    file with too little text for one row gives one shorter row. Raises ConfigError naming the line and the remedy.
    """
    if samples < 1 or length < 8:
        raise ConfigError(f"samples must be at least 1 and length at least 8, got {samples} and {length}")
    documents = list(_documents(path, tokenizer))
    if not documents:
        raise ConfigError(f'{path} holds no text; give lines like {{"text": ...}}, or a .txt file')
    random.Random(seed).shuffle(documents)
    begin = tokenizer.encode("")[:1]  # the token that opens every text, where the tokenizer has one
    rows = pack(documents, length, samples + held_out, begin)
    if not rows:
        raise ConfigError(f"{path} holds fewer than 2 tokens; give a longer text")
    apart = min(held_out, len(rows) // 4)
    table = torch.tensor(rows)
    whole = len(rows) - apart
    return Calibration(
        table[:whole], table[whole:] if apart else table[:0], f"{path.name}: {whole} rows of {table.shape[1]} tokens"
    )


def _documents(path: Path, tokenizer: Tokenizer) -> Iterator[Seq[int]]:
    if path.suffix == ".jsonl":
        for line in islice(read_lines(path, "messages", "text", "prompt"), MOST_DOCUMENTS):
            asked = line.kind == "prompt" and tokenizer.chat_template is not None
            if asked:
                line = replace(line, kind="messages", value=[{"role": "user", "content": line.value}])
            yield line.encode(tokenizer, add_generation_prompt=asked)
        return
    if path.suffix != ".txt":
        raise ConfigError(f"{path}: calibration text is a .jsonl or a .txt file")
    text = read_text(path, "calibration text", "give a .jsonl or .txt file")
    if text.strip():
        yield tokenizer.encode(text)


def pack(documents: Seq[Seq[int]], length: int, most: int, begin: list[int]) -> list[list[int]]:
    """At most `most` rows of `length` tokens; one shorter row where there is too little text for a whole one."""
    rows: list[list[int]] = []
    row: list[int] = []
    for ids in documents:
        start = 0
        while start < len(ids):
            # Later pieces of a document also open with the begin token, since models expect it.
            lead = begin if start and list(ids[:1]) == begin else []
            taken = ids[start : start + length - len(row) - len(lead)]
            row += [*lead, *taken]
            start += len(taken)
            if len(row) == length:
                rows.append(row)
                row = []
                if len(rows) == most:
                    return rows
    return rows if rows or len(row) < 2 else [row]
