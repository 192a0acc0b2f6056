"""Read documents from a data folder and pack them into rows of tokens.

A row of `row_tokens + 1` tokens holds whole documents where they fit. Each document opens with the begin token, so
every row starts like a prompt. Attention is not masked between the documents of a row.
"""

from __future__ import annotations

import gzip
import random
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.lines import objects
from sameseed_train.made import made_texts
from sameseed_train.recipe import ENDLESS, MADE, Recipe, SourceSettings
from sameseed_train.tokenizer import ASSISTANT, BEGIN, END, USER, token_id

# Parts of the standard library that are left out: tests, tables and vendored wheels.
STDLIB_SKIP = re.compile(
    r"(^|/)(site-packages|dist-packages|tests?|idle_test|encodings|pydoc_data|ensurepip|lib2to3|turtledemo)/"
)
HELD_OUT_PER_MILLE = 20  # held-out share of the standard library's files, chosen by a hash of the path
POOL = 256  # pieces among which the packer looks for one that fits


@dataclass(frozen=True)
class Document:
    """A text: plain (`turns` empty), or a conversation of (role, content) turns."""

    domain: str
    source: str
    text: str
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


def read_rows(path: Path) -> Iterator[dict[str, object]]:
    """Rows of a .jsonl.gz file, with the strings `text` and `source`. Raises ConfigError naming the line."""
    if not path.is_file():
        raise ConfigError(f"no data file {path}; give the folder that holds the corpus with --data")
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
            for number, row in objects(lines, path):
                if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in ("text", "source")):
                    raise ConfigError(f"{path}:{number}: expected an object with the strings 'text' and 'source'")
                yield row
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is damaged ({error}); fetch the data folder again") from None


def matching(rows: Iterable[dict[str, object]], source: SourceSettings) -> list[Document]:
    """The documents of a source: those rows with one of its names that `to_document` accepts."""
    documents = []
    for row in rows:
        name = str(row["source"])
        if any(name.startswith(n[:-1]) if n.endswith("*") else name == n for n in source.names):
            document = to_document(row, source)
            documents += [document] if document else []
    return documents


def split_turns(text: str) -> tuple[tuple[str, str], ...]:
    """Turns of `User: ...` / `Assistant: ...` text (markers at the start of a line only); empty if it has none."""
    parts = re.split(r"^(User|Assistant): ", text, flags=re.MULTILINE)
    if parts[0].strip() or len(parts) < 5:
        return ()
    return tuple((role.lower(), content.strip()) for role, content in zip(parts[1::2], parts[2::2], strict=True))


def question_and_answer(row: dict[str, object]) -> tuple[tuple[str, str], ...]:
    """The two turns of an instruction row, split at `answer_start` if given; empty if one is missing."""
    text, start = str(row["text"]), row.get("answer_start")
    if not isinstance(start, int):
        found = text.find("\n\nAssistant: ")
        start = found + len("\n\nAssistant: ") if found >= 0 else 0
    question = text[:start].removeprefix("User: ").removesuffix("Assistant: ").strip()
    answer = text[start:].strip()
    return (("user", question), ("assistant", answer)) if question and answer else ()


def stdlib_documents(domain: str, held_out: bool) -> Iterator[Document]:
    """The running interpreter's standard library, without tests and data: the held-out files, or all others."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if STDLIB_SKIP.search(name) or not 400 < path.stat().st_size < 200_000:
            continue
        if (zlib.crc32(name.encode()) % 1000 < HELD_OUT_PER_MILLE) == held_out:
            yield Document(domain, f"python-stdlib/{name}", path.read_text(encoding="utf-8", errors="replace"))


def made_documents(source: SourceSettings, seed: int, *, held_out: bool) -> Iterator[Document]:
    """Documents of a kind in MADE, which need no data file. Kinds in ENDLESS yield without end, or a few held out."""
    if source.kind == "stdlib":
        yield from stdlib_documents(source.domain, held_out)
        return
    for question, answer in made_texts(source.kind, seed, held_out=held_out):
        turns = (("user", question), ("assistant", answer))
        yield Document(source.domain, source.kind, f"{question}\n{answer}", turns)


def to_document(row: dict[str, object], source: SourceSettings) -> Document | None:
    """A row as a document of its source's kind, or None if it is not suitable."""
    text = str(row["text"])
    if source.ascii_only and sum(c > "\x7f" for c in text) > 0.02 * len(text):  # a cheap test for English
        return None
    turns: tuple[tuple[str, str], ...] = ()
    if source.kind != "text":
        turns = question_and_answer(row) if source.kind == "chat" else split_turns(text)
        if not turns:
            return None
    return Document(source.domain, str(row["source"]), text, turns)


def source_documents(source: SourceSettings, data: Path, seed: int, held_out: bool = False) -> list[Document]:
    """All documents of one source, shuffled, cut to `max_mb`; `held_out`: of kinds in MADE, the held-out ones."""
    made = source.kind in MADE
    found = made_documents(source, seed, held_out=held_out) if made else matching(read_rows(data / source.file), source)
    documents: Iterable[Document] = found
    if source.kind not in ENDLESS:  # these are in random order already
        documents = own = list(found)
        if not own:
            raise ConfigError(f"source {source.domain!r}: no row of {source.file} is named {', '.join(source.names)}")
        random.Random(f"{seed}/{source.domain}/{source.names}").shuffle(own)
    kept: list[Document] = []
    size = 0.0
    for document in documents:
        size += document.num_bytes / 1e6
        if kept and size > source.max_mb:
            break
        kept.append(document)
    return kept


def held_out_documents(recipe: Recipe, data: Path) -> list[Document]:
    """Documents that no stage trains on: validation rows of the recipe's sources, and held-out ones of MADE kinds."""
    documents: list[Document] = []
    rows = list(read_rows(data / recipe.valid_file))
    for source in recipe.source:
        made = source.kind in MADE
        documents += made_documents(source, recipe.seed, held_out=True) if made else matching(rows, source)
    return documents


def encode(tokenizer: Tokenizer, document: Document) -> list[int]:
    """Token ids: the begin token, then the plain text or the turns with role tokens; each ends with the end token."""
    begin, end = token_id(tokenizer, BEGIN), token_id(tokenizer, END)
    if not document.turns:
        return [begin, *tokenizer.encode(document.text, add_special_tokens=False).ids, end]
    ids = [begin]
    for role, content in document.turns:
        ids.append(token_id(tokenizer, USER if role == "user" else ASSISTANT))
        ids += [*tokenizer.encode(content, add_special_tokens=False).ids, end]
    return ids


def pieces(ids: list[int], length: int) -> Iterator[list[int]]:
    """Cut a long document; each later piece opens with the begin token again. A rest of up to 32 tokens is dropped."""
    yield ids[:length]
    for start in range(length, len(ids) - 32, length - 1):
        yield [ids[0], *ids[start : start + length - 1]]


def pack(documents: list[list[int]], length: int, pad: int) -> Tensor:
    """Pack rows int32 `[num_rows, length]` with whole pieces while one of the pool fits; the rest is padding."""
    queue = (piece for ids in documents for piece in pieces(ids, length))
    pool = [piece for _, piece in zip(range(POOL), queue, strict=False)]
    rows: list[list[int]] = []
    row: list[int] = []
    while pool:
        room = length - len(row)
        fit = min(range(len(pool)), key=lambda i: (len(pool[i]) > room, i if not row else room - len(pool[i])))
        if len(pool[fit]) > room:
            rows.append(row + [pad] * room)
            row = []
            continue
        row += pool.pop(fit)
        pool += [piece for _, piece in zip(range(1), queue, strict=False)]
    if row:
        rows.append(row + [pad] * (length - len(row)))
    return torch.tensor(rows, dtype=torch.int32)


def training_order(recipe: Recipe, data: Path) -> list[Document]:
    """All documents, each repeated by its source's `epochs`, in one seeded order."""
    rng = random.Random(recipe.seed)
    documents: list[Document] = []
    for source in recipe.source:
        own = source_documents(source, data, recipe.seed)
        whole = int(source.epochs)
        documents += own * whole + own[: round((source.epochs - whole) * len(own))]
    rng.shuffle(documents)
    return documents


def next_rows(rows: Tensor, first: int, count: int, seed: int, stored_passes: int = 0) -> Tensor:
    """Rows int64 `[count, length]` from place `first` of an endless stream, shuffled after `stored_passes`."""
    chosen = []
    for i in range(first, first + count):
        epoch, place = divmod(i, rows.shape[0])
        if epoch >= stored_passes:
            order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(seed + epoch))
            place = int(order[place])
        chosen.append(place)
    return rows[chosen].long()


def inputs_and_targets(batch: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets `[B, S]`, shifted, of rows `[B, S+1]`; padding becomes the target -1, which losses ignore."""
    targets = batch[:, 1:]
    return batch[:, :-1].contiguous(), targets.masked_fill(targets == pad, -1).contiguous()
