"""One's own drafter is a file, an installed package or an object: the guide's examples as printed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_formats import forget

import sameseed
from sameseed import LLM, SamplingParams, registry
from sameseed.errors import ConfigError, RegistryError

PACKAGE = Path(sameseed.__file__).parent
GUIDE = (PACKAGE.parent / "docs" / "extend.md").read_text()
CODES = {
    re.findall(r'"""(\w+)', code)[0]: code
    for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    if "DRAFTER" in code
}
PARAMS = SamplingParams(max_tokens=24)
PROMPT = "1 1 1 1 1 1 1 1"

# Runs in its own process: each way to give the drafter, by LLM and on the command line.
SCRIPT = """
import sys

if sys.argv[2] == "as_files":  # an editable install finds its own package by a hook, before any path
    sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
from sameseed import LLM, SamplingParams, registry
from sameseed.cli import main

assert {"repeat", "writer"} <= set(registry.names("drafters"))
params, plain = SamplingParams(max_tokens=24), sys.argv[1]
for draft in ("repeat", "writer:embedded-draft", "ngram > writer:embedded-draft", "ngram + writer:embedded-draft"):
    done = LLM("embedded", draft=draft, policy="fixed", num_draft_tokens=4).generate("1 1 1 1 1 1 1 1", params)[0]
    assert done.text == plain and done.metrics.spec.num_accepted_tokens > 0, draft
    assert {n for n in done.levels if n} <= {"ngram", "repeat", "writer"}, done.levels
sys.exit(main(["generate", "1 1 1 1 1 1 1 1", "--draft", "ngram > writer", "--max-tokens", "4"]))
"""


@pytest.fixture(scope="module")
def plain():
    return LLM("embedded").generate(PROMPT, PARAMS)[0].text


def as_files(folder):
    """A copy of the package, by links, with the example drafters as additional files."""
    package = folder / "sameseed"
    (package / "drafters").mkdir(parents=True)
    for part in (*PACKAGE.iterdir(), *(PACKAGE / "drafters").iterdir()):
        if part.name not in ("drafters", "__pycache__"):
            (package / part.relative_to(PACKAGE)).symlink_to(part)
    native = importlib.util.find_spec("sameseed._native")
    if native is not None and native.origin and not (package / Path(native.origin).name).exists():
        (package / Path(native.origin).name).symlink_to(native.origin)  # in another folder for an editable install
    for name, code in CODES.items():
        (package / "drafters" / f"{name}.py").write_text(code)


def as_package(folder, name="guesses", entries=("repeat", "writer")):
    """Write an installed package whose entry points name the example drafters."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    for entry, code in CODES.items():
        (folder / name / f"{entry}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {name}.{entry if entry in CODES else 'repeat'}" for entry in entries]
    (info / "entry_points.txt").write_text("\n".join(["[sameseed.drafters]", *lines, ""]))


@pytest.mark.parametrize("install", [as_files, as_package])
def test_one_file_is_a_drafter(install, tmp_path, plain):
    assert set(CODES) == {"repeat", "writer"}
    install(tmp_path)
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT, plain, install.__name__]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_object_is_a_drafter(tmp_path, plain):
    classes = {}
    for name, code in CODES.items():
        (tmp_path / f"{name}.py").write_text(code)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        classes[name] = module.DRAFTER
    repeat, writer = classes["repeat"], classes["writer"]
    for draft, options in ((repeat, {"period": 6}), (repeat(repeat.Options(6)), None)):
        llm = LLM("embedded", draft=draft, num_draft_tokens=4, policy="fixed", draft_options=options)
        done = llm.generate(PROMPT, PARAMS)[0]
        assert done.text == plain and done.metrics.spec.num_draft_tokens > 0
    owner = sameseed.SpecConfig("writer", "embedded-draft", drafter=writer)
    done = LLM("embedded", draft=owner).generate(PROMPT, PARAMS)[0]
    assert done.text == plain and done.metrics.spec.num_accepted_tokens > 0
    with pytest.raises(ConfigError, match="needs a draft model"):
        LLM("embedded", draft=writer)
    with pytest.raises(ConfigError, match="text, a SpecConfig or a Drafter"):
        LLM("embedded", draft=3)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder in which packages are found. The registry's caches are cleared before and after the test."""

    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()
    assert "ngram" in registry.names("drafters")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"one": ("ngram",)}, "sameseed itself and package 'one'"),
        ({"one": ("mine",), "two": ("mine",)}, "package '(one|two)' and package '(one|two)'"),
    ],
)
def test_a_name_that_is_taken(entries, said, site):
    for name, own in entries.items():
        as_package(site, name, own)
    with pytest.raises(RegistryError, match=said):
        registry.names("drafters")


def test_an_entry_that_cannot_be_loaded(site, caplog):
    as_package(site, "broken", ("gone",))
    (site / "broken" / "repeat.py").write_text("1 / 0")
    assert "gone" in registry.names("drafters"), "nothing is loaded by its name alone"
    with pytest.raises(RegistryError, match=r"'broken'.*'gone'"):
        registry.load("drafters", "gone")
    known = registry.loaded("drafters")
    assert "ngram" in known and "gone" not in known, "the others work without it"
    assert "package 'broken' gives drafters 'gone'" in caplog.text and "it is left out" in caplog.text
