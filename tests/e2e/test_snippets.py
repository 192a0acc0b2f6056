"""Commands and Python in the documents are understood and run; so do the examples."""

from __future__ import annotations

import importlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures_server import serving
from lawkit import write_model

from sameseed import cli, ops, registry
from sameseed.models.config import ASSETS
from sameseed.models.loader import resolve_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Placeholders in the pages, and what replaces them here.
STANDS_FOR = {
    r"(path/to|runs|twins)/[\w/-]*head\b.*|org/head": "embedded-head",
    r"(path/to|twins)/[\w-]*draft": "embedded-draft",
    r"suffix \+ (DRAFT|SMALL\.gguf)": "suffix + embedded-draft",
    r"llama-3\.[12]-\d+b|smollm2(-135m)?": "embedded",
    r".*\.gguf|folder-with-one-gguf|org/name[\w/@-]*|path/to/[\w/-]+|twins/[\w-]+|runs/[\w-]+|DIR|M|MODEL": "embedded",
}
TOY = {  # commands that end by themselves, with flags that make them small
    "generate": ["--max-tokens", "4"],
    "estimate": ["--machine-read", "40", "--machine-ops", "1", "--memory", "64GB"],
    "chat": ["--max-tokens", "4"],
    "bench": ["--num-prompts", "1", "--max-tokens", "4", "--repeat", "1"],
    "eval": ["--tokens", "64"],
    "profile": ["--rows", "1,2", "--prefill-tokens", "0", "--batch-sizes", "", "--repeats", "3", "--seconds", "0.1"],
    "quantize": ["--samples", "4", "--length", "64", "--overwrite"],
    **{name: [] for name in ("info", "completion", "vocabulary", "study")},
}
NOT_HERE = re.compile(  # needs a network, a GPU, a file of another command, a longer context, or hours
    r"Qwen/|meta-llama/|HuggingFaceTB/|amd/|mask_token|--device cuda|--engine vllm|--vocabulary|chats\.txt|ids\.json"
    r"|tuned\.toml|--run|--cost|--data|--tasks|--head-for|bench serve|8192|profile --model"
    r"|^study (?!list|.*--dry-run)|^bench .*OUT/draft"
)


def commands() -> list[tuple[str, list[str]]]:
    """Every sameseed command in the pages' code blocks: page and words."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for block in re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in re.findall(r"(?:^|[ /(])sameseed ([a-z].*)$", block, re.MULTILINE):
                words = shlex.split(line.split(" | ")[0].rstrip(" &)"), comments=True)
                if words[0] in cli.COMMANDS:
                    found.append((str(page.relative_to(ROOT)), words))
    return found


def stood_for(word: str) -> str:
    """The word, or what replaces it here."""
    return next((ours for theirs, ours in STANDS_FOR.items() if re.fullmatch(theirs, word)), word)


class UnderstoodError(Exception):
    """Raised when the flags were parsed and the work would begin."""


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda v: v if isinstance(v, str) else " ".join(v)[:60])
def test_a_command_is_understood(page: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    own = words[0] not in registry.names("commands")
    module: Any = importlib.import_module("sameseed.cli.options") if own else registry.load("commands", words[0])
    module, name = (module, "parse") if hasattr(module, "parse") else (module.tyro, "cli")
    read = getattr(module, name)

    def stop(*args: Any, **kwargs: Any) -> Any:
        read(*args, **kwargs)
        raise UnderstoodError

    monkeypatch.setattr(module, name, stop)
    if "--profile" in words:  # the file would be read while parsing
        place = words.index("--profile")
        words = words[:place] + words[place + 2 :]
    with pytest.raises(UnderstoodError):
        cli._run(words[0], [stood_for(word) for word in words[1:]])


def runnable() -> list[list[str]]:
    """The commands that run here, made small."""
    found: dict[str, list[str]] = {}
    for _, words in commands():
        line = " ".join(words)
        if words[0] in TOY and not NOT_HERE.search(line):
            small = [words[0], *map(stood_for, words[1:]), *TOY[words[0]]]
            if words[0] == "quantize":
                small[1] = "small"  # the embedded target would take a minute
            found.setdefault(" ".join(small), small)
    return list(found.values())


@pytest.mark.parametrize("words", runnable(), ids=lambda words: " ".join(words)[:80])
def test_a_command_runs(
    words: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if any(word.startswith("--overlap") for word in words) and ops.available_cores() < 2:
        pytest.skip("guessing beside the target takes a core of its own")
    folder = tmp_path_factory.getbasetemp()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SAMESEED_CACHE", str(folder / "learned"))
    for name in ("mine.jsonl", "text.jsonl", "texts.jsonl"):
        (folder / name).write_text((ASSETS / "prompts.jsonl").read_text())
    if words[:2] == ["quantize", "small"]:
        write_model(folder / "small", hidden_size=256, intermediate_size=256, head_dim=64)
    (folder / "mine.txt").write_text((ASSETS / "prompts.jsonl").read_text()[:2000])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Once upon a time")))
    assert cli.main(words) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=lambda p: p.stem)
def test_python_of_a_page_is_python_and_its_names_are_ours(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(code, str(page), "exec")
        for module, names in re.findall(r"^from (sameseed[\w.]*) import ([\w, ]+)", code, re.MULTILINE):
            here = importlib.import_module(module)
            assert not [n for n in names.replace(" ", "").split(",") if not hasattr(here, n)]


def test_the_costs_of_the_plan_page_run() -> None:
    """README's and the quickstart's Python have a test of their own. The rest needs a server or writes gigabytes."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "plan.md").read_text(), re.DOTALL)
    costs = next(c for c in code if "RoundCost" in c)
    done = subprocess.run([sys.executable, "-c", costs], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_the_clients_of_the_server_s_page_run() -> None:
    """The page's Python as printed, against the server that the page's first command starts; only the port differs."""
    page = (ROOT / "docs/guides/serve.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert "response_format=Answer" in code
    known: dict[str, Any] = {}
    with serving() as server:
        exec(code.replace("http://127.0.0.1:8000", server.url), known)
    assert known["answer"].choices[0].message.content


FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("embedded", "embedded-draft"):
        if not (resolve_model(name) / "model.safetensors").exists():
            pytest.skip(f"{name}: the embedded weights are not in this checkout; `sameseed train` makes them")
    runpy.run_path(str(example), run_name="__main__")
    out, _ = capsys.readouterr()
    assert out.strip(), "an example shows something"
