"""Evaluation data sets, read from a folder or else from the hub, and checked on reading."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sameseed import hub
from sameseed.errors import ConfigError
from sameseed.lines import objects

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class DataSet:
    """One data set, in a file of a folder or on the hub."""

    name: str
    files: tuple[str, ...]  # its possible names, each also with .gz
    hub: tuple[str, str] | None  # repository and file
    fields: Mapping[str, type] | None = None  # that each row must have, with their types; None: plain text
    source: str = ""  # where to fetch a set that is not on the hub


FIRST = "-00000-of-00001.parquet"
PROGRAM = {"task_id": str, "prompt": str, "entry_point": str, "canonical_solution": str, "test": str}
SUM = {"question": str, "answer": str}
PROBLEM = {"text": str, "code": str, "test_list": list}
EXAM = {"category": str, "question": str, "options": list, "answer": str}
GSM, MMLU = "openai/gsm8k", "TIGER-Lab/MMLU-Pro"
WIKITEXT = ("Salesforce/wikitext", f"wikitext-2-raw-v1/test{FIRST}")

TEXT = DataSet("wikitext2", ("wiki.test.raw", "wikitext2-test.txt"), WIKITEXT)
HUMANEVAL_FILES = ("HumanEval.jsonl", "humaneval.jsonl")
HUMANEVAL_HUB = ("openai/openai_humaneval", f"openai_humaneval/test{FIRST}")
HUMANEVAL = DataSet("humaneval", HUMANEVAL_FILES, HUMANEVAL_HUB, PROGRAM)
HUMANEVAL_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # the paper's stop strings: code after the function
GSM8K = DataSet("gsm8k", ("gsm8k-test.jsonl",), (GSM, f"main/test{FIRST}"), SUM)
GSM8K_SHOTS = DataSet("gsm8k examples", ("gsm8k-train.jsonl",), (GSM, f"main/train{FIRST}"), SUM)
MBPP = DataSet("mbpp", ("mbpp-test.jsonl",), ("google-research-datasets/mbpp", f"full/test{FIRST}"), PROBLEM)
MMLU_PRO_FILES = ("mmlu_pro-test.jsonl", "mmlu_pro-sample.jsonl")
MMLU_PRO = DataSet("mmlu_pro", MMLU_PRO_FILES, (MMLU, f"data/test{FIRST}"), EXAM)
MMLU_PRO_SHOTS = DataSet(
    "mmlu_pro examples", ("mmlu_pro-shots.jsonl",), (MMLU, f"data/validation{FIRST}"), EXAM | {"cot_content": str}
)


def find(folder: Path, data: DataSet) -> Path | None:
    """The file of a set in `folder`, also under its path in the hub's repository; None if there is none."""
    names = [n for file in data.files for n in (file, f"{file}.gz")] + ([data.hub[1]] if data.hub else [])
    return next((folder / n for n in names if (folder / n).is_file()), None)


def locate(data: DataSet, folder: Path | None, flag: str = "--data DIR") -> Path:
    """The file of a set: in `folder` if one is given, else from the hub. Raises ConfigError with file and flag."""
    if folder is None:
        if data.hub is None:
            raise ConfigError(f"the hub does not keep {data.name}; fetch {data.source} and give it with {flag}")
        try:
            return hub.fetch(*data.hub, kind="dataset")
        except Exception as error:  # the hub client's own errors, and those of whichever HTTP library it uses
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(
                f"the data of {data.name} ({data.hub[0]}) did not come from the hub: {first}; give a folder that holds "
                f"{data.files[-1]} with {flag}"
            ) from None
    if not folder.is_dir():
        raise ConfigError(f"{flag}: {folder} is no folder; name the one that holds {data.files[-1]}")
    path = find(folder, data)
    if path is None:
        raise ConfigError(f"{folder} lacks {' or '.join(data.files)} (or the same with .gz), the data of {data.name}")
    return path


def read_text(path: Path) -> str:
    """The text of a file; .gz is decompressed. Raises ConfigError."""
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text ({error}); check the file") from None


def read_rows(path: Path, data: DataSet) -> list[Row]:
    """The rows of a set, each checked. Raises ConfigError naming the invalid row."""
    assert data.fields is not None
    if path.suffix == ".parquet":
        rows = _parquet(path)
    else:  # split at "\n" only: strings may contain other characters that `splitlines` treats as line ends
        rows = [(f"{path}:{number}", row) for number, row in objects(read_text(path).split("\n"), path)]
    needed = f"{data.name} needs the fields {', '.join(data.fields)}"
    for where, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is no JSON object; {needed}")
        for name, kind in data.fields.items():
            if not isinstance(row.get(name), kind):
                raise ConfigError(f"{where} lacks {name!r} ({kind.__name__}); is this the data of {data.name}?")
    if not rows:
        raise ConfigError(f"{path} holds no rows; {needed}")
    return [row for _, row in rows]


def _parquet(path: Path) -> list[tuple[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            "the hub's data sets are parquet files, which take pyarrow: pip install '.[eval]', or give --data"
        ) from None
    rows: Seq[Any] = parquet.read_table(path).to_pylist()
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]


def text_lines(path: Path) -> list[str]:
    """The set's lines as the hub has them: each with its line end, blank lines as "". Raises ConfigError."""
    if path.suffix == ".parquet":
        return [str(row.get("text", "")) if isinstance(row, dict) else "" for _, row in _parquet(path)]
    return [f"{line}\n" if line.strip() else "" for line in read_text(path).removesuffix("\n").split("\n")]


def wikitext(folder: Path | None) -> tuple[str, str]:
    """The WikiText-2 test text and the name of its file.

    The lines are joined as for published perplexities: each with its line end, blank lines as "", and blank lines
    between them (`"\\n\\n".join`). Raises ConfigError.
    """
    path = locate(TEXT, folder)
    text = "\n\n".join(text_lines(path))
    if not text.strip():
        raise ConfigError(f"{path} holds no text; fetch it again")
    return text, path.name


def text_of(path: Path) -> str:
    """The text of a file; for .jsonl and .jsonl.gz, "text" of all rows joined by blank lines. Raises ConfigError."""
    if path.suffix != ".jsonl" and not path.name.endswith(".jsonl.gz"):
        return read_text(path)
    corpus = DataSet("a text", (path.name,), None, {"text": str})
    return "\n\n".join(row["text"].strip("\n") for row in read_rows(path, corpus))


def rows(data: DataSet, folder: Path | None) -> list[Row]:
    """All rows of a set, from the folder or the hub. Raises ConfigError."""
    return read_rows(locate(data, folder), data)


def take(items: Seq[T], limit: int | None) -> list[T]:
    """`limit` items, spread evenly over all items so that every category stays in; None: all items."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]
