"""`sameseed verify-server` against our own server with the embedded model, and against what is no such server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures_server import Server

from sameseed.cli import main

KEY = "a-key-for-the-test"
BOUNDS = ["--requests", "140", "--seconds", "100000"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("--draft", "ngram", env={"SAMESEED_API_KEY": KEY})
    try:
        made.wait_log("ready")
        yield made
    finally:
        assert made.stop() == 0


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESEED_API_KEY", KEY)


def test_our_own_server_keeps_its_promises_now_and_later(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "runs.jsonl", tmp_path / "page.html"
    ask = ["verify-server", server.url, *BOUNDS]
    assert main([*ask, "--out", str(out), "--html", str(page), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {p["id"]: p["status"] for p in found["promises"]} == dict.fromkeys(
        (p["id"] for p in found["promises"]), "holds"
    )
    assert found["not_asked"] == ["again"] and found["config"]["engine"] == "sameseed"
    assert json.loads(out.read_text()) == found and server.url not in out.read_text() and KEY not in out.read_text()
    assert "The server keeps its promises" in page.read_text()
    numbers = {p["id"]: p["numbers"] for p in found["promises"]}
    assert numbers["ties"]["made_equal"] == 4
    assert numbers["logprobs"]["largest_drift"] == 0 and numbers["load"]["written_at_once"] >= 2
    assert main([*ask, "--only", "again", "stream", "--again", str(out)]) == 0
    said = capsys.readouterr().out
    assert "again" in said and "holds: embedded (sameseed), 2 hold" in said


def test_what_is_wrong_is_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    for flags, says in (
        (["http://127.0.0.1:9"], "is it running"),
        (["nonsense"], "give a server's address"),
        ([server.url + "/v7"], "name the model with --name"),
        ([server.url, "--requests", "9"], "--requests must be at least 117"),
        ([server.url, "--again=~no-such-user/none.jsonl"], "cannot read the earlier report"),
        ([server.url, "--again=~/empty.jsonl"], "holds no report"),
        ([server.url, "--only", "again"], "needs --again FILE"),
    ):
        assert main(["verify-server", *flags]) == 2
        assert says in capsys.readouterr().err
    monkeypatch.delenv("SAMESEED_API_KEY")
    assert main(["verify-server", server.url]) == 2
    assert "wants an API key" in capsys.readouterr().err


def test_it_needs_neither_the_engine_nor_pytorch() -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name in ('sameseed', 'torch', 'numpy'):\n            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from sameseed_verify import command, page, verify\n"
        "sys.exit(command.run(['http://127.0.0.1:9'], 'x'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "is it running" in done.stderr, done.stderr
