"""Commands and Python in the documents are understood and run; so do the examples."""

import contextlib
import importlib
import io
import re
import runpy
import shlex
from functools import cache
from pathlib import Path

import pytest
from fixtures_server import serving
from lawkit import write_model

from sameseed import cli, ops, registry
from sameseed.models.config import ASSETS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted(p for d in ("docs", "packages", "benchmarks") for p in (ROOT / d).rglob("*.md"))]
PAGES = [page for page in PAGES if page.name not in ("CHANGELOG.md", "2026-q4.md")]  # not what was true once
# Placeholders in the pages, and what replaces them here.
STANDS_FOR = {
    r"(path/to|runs|twins)/[\w/-]*head\b.*|org/head": "embedded-head",
    r"(path/to|twins)/[\w-]*draft|org/small[\w-]*": "embedded-draft",
    r"suffix \+ (DRAFT|SMALL\.gguf)": "suffix + embedded-draft",
    r"llama-3\.[12]-\d+b|smollm2(-135m)?": "embedded",
    r".*\.gguf|folder-with-one-gguf|org/name[\w/@-]*|path/to/[\w/-]+|twins/[\w-]+|runs/[\w-]+|DIR|M|MODEL": "embedded",
}
TOY = {  # commands that end by themselves, with flags that make them small
    "generate": ["--max-tokens", "4"],
    "estimate": ["--machine-read", "40", "--machine-ops", "1", "--memory", "64GB"],
    "chat": ["--max-tokens", "4"],
    "bench": ["--num-prompts", "8", "--max-tokens", "4", "--repeat", "1"],
    "eval": ["--tokens", "64"],
    "profile": ["--rows", "1,2", "--prefill-tokens", "0", "--batch-sizes", "", "--repeats", "3", "--seconds", "0.1"],
    "quantize": ["--samples", "4", "--length", "64", "--overwrite"],
    "study": ["--dry-run"],
    **{name: [] for name in ("info", "completion", "vocabulary")},
}
FLAG = re.compile(r"(?<![\w='-])--[a-z][\w-]*")
OTHERS = ["--spec-type", "--spec-draft-n-max", "--model_args"]
OTHERS += ["--speculative-config", "--kv-cache-dtype", "--dtype", "--data-parallel-size", "--nnodes"]  # vLLM's
NOT_HERE = re.compile(  # needs a network, a GPU, a file of another command, a longer context, or hours
    r"Qwen/|meta-llama/|HuggingFaceTB/|amd/|mask_token|--device cuda|--engine vllm"
    r"|tuned\.toml|ids\.json|--cost|--data|--tasks|--head-for|bench serve|8192|profile --model"
    r"|^bench .*OUT/draft|--size real"
)


def parts(page):
    """The lines after `sameseed` of a page's code blocks without a language or in bash, and its text without blocks."""
    text, fence = page.read_text().replace("\\\n", " "), r"^ *```%s\n(.*?)^ *```"
    blocks = re.sub(r" # .*", "", "\n".join(re.findall(fence % "(?:bash)?", text, re.DOTALL | re.MULTILINE)))
    lines = re.findall(r"(?:^|[ /(])sameseed ([a-z].*)$", blocks, re.MULTILINE)
    return lines, re.sub(fence % r"\w*", "", text, flags=re.DOTALL | re.MULTILINE)


def commands():
    """Every sameseed command in the pages' code blocks, and those of studies in the text: page and words."""
    found = []
    for page in PAGES:
        lines, text = parts(page)
        for line in (*lines, *re.findall(r"`(?:sameseed )?(study [a-z][^`]*)`", text)):
            found.append((str(page.relative_to(ROOT)), shlex.split(line.split(" | ")[0].rstrip(" &)"))))
    return found


def stood_for(word):
    """The word, or what replaces it here."""
    return next((ours for theirs, ours in STANDS_FOR.items() if re.fullmatch(theirs, word)), word)


class UnderstoodError(Exception):
    """Raised when the flags were parsed and the work would begin."""


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda v: v if isinstance(v, str) else " ".join(v)[:60])
def test_a_command_is_understood(page, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    own = words[0] not in registry.names("commands")
    module = importlib.import_module("sameseed.cli.options") if own else registry.load("commands", words[0])
    module, name = (module, "parse") if hasattr(module, "parse") else (module.tyro, "cli")
    read = getattr(module, name)

    def stop(*args, **kwargs):
        read(*args, **kwargs)
        raise UnderstoodError

    monkeypatch.setattr(module, name, stop)
    if "--profile" in words:  # the file would be read while parsing
        place = words.index("--profile")
        words = words[:place] + words[place + 2 :]
    with pytest.raises(UnderstoodError):
        cli._command(words[0], [stood_for(word) for word in words[1:]])


@cache
def flags_of(command):
    """The flags in a command's help."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        cli._command(command.split()[0], [*command.split()[1:], "--help"])
    return set(FLAG.findall(shown.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_flags_that_a_page_names_are_there(page):
    """A flag without a command is of any."""
    every = [*cli.COMMANDS, "bench serve", "train head", "train draft"]
    for said in re.findall(r"`([^`]+)`", parts(page)[1]):
        words = " ".join(said.removeprefix("sameseed ").split())
        named = [c for c in every if f"{words} ".startswith(f"{c} ")]
        if named or words.startswith("--"):
            known = set[str]().union(*map(flags_of, named[-1:] or every))
            assert not set(FLAG.findall(said)) - known - {*OTHERS}, said


def runnable():
    """The commands that run here, made small."""
    found = {}
    for _, words in commands():
        line = " ".join(words)
        if words[0] in TOY and not NOT_HERE.search(line):
            small = [words[0], *map(stood_for, words[1:]), *TOY[words[0]]]
            if words[0] == "quantize":
                small[1] = "small"  # the embedded target would take a minute
            found.setdefault(" ".join(small), small)
    return list(found.values())


@pytest.mark.parametrize("words", runnable(), ids=lambda words: " ".join(words)[:80])
def test_a_command_runs(words, tmp_path_factory, monkeypatch, capsys):
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
def test_python_of_a_page_is_python_and_its_names_are_ours(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(code, str(page), "exec")
        for module, names in re.findall(r"^from (sameseed[\w.]*) import ([\w, ]+)", code, re.MULTILINE):
            here = importlib.import_module(module)
            assert not [n for n in names.replace(" ", "").split(",") if not hasattr(here, n)]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/guides/plan.md"])
def test_the_python_of_a_page_runs(page, capsys):
    """The server's page has a test of its own. The rest writes gigabytes."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    code = [c.replace('"smollm2"', '"embedded"') for c in code if "plan" not in page or "RoundCost" in c]
    exec("\n".join(code), {})
    assert capsys.readouterr().out.strip()


def test_the_clients_of_the_server_s_page_run():
    """The page's Python as printed, against the server that the page's first command starts; only the port differs."""
    page = (ROOT / "docs/guides/serve.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert "response_format=Answer" in code
    known = {}
    with serving() as server:
        exec(code.replace("http://127.0.0.1:8000", server.url), known)
    assert known["answer"].choices[0].message.content


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(example, capsys):
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip(), "an example shows something"
