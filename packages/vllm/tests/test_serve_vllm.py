"""`sameseed serve --engine vllm` as clients see it, with a process that stands in for vLLM.

`test_real_vllm.py` does the same with vLLM itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_server import Server, children, program, wait_until
from fixtures_vllm import FAKE, KEY, Fronted, stream

from sameseed.cli import main


@pytest.fixture
def fronted(tmp_path: Path) -> Iterator[Fronted]:
    made = Fronted(tmp_path, "--drain-timeout", "4", "--reasoning-parser", "qwen3")
    try:
        yield made
    finally:
        if made.process.poll() is None:
            assert made.stop() == 0
        assert not children(made.process.pid)


def test_bodies_streams_errors_and_pages_pass(fronted: Fronted) -> None:
    assert fronted.process.args[-1] != KEY  # type: ignore[index]
    with fronted.client() as http:
        answer = http.post("/v1/completions", json={"prompt": "abc", "temperature": 0.5, "unknown": 1})
        assert answer.json() == {"choices": [{"text": "ABC"}]} and answer.headers["x-request-id"]
        assert [e["choices"][0]["text"] for e in stream(http, "count", max_tokens=4)] == ["0 ", "1 ", "2 ", "3 "]
        refused = http.post("/v1/completions", json={"prompt": "refuse"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"
        assert "secret" not in refused.text and "0x7fff" not in refused.text
        failed = stream(http, "fail", max_tokens=9)
        assert failed[-1]["error"]["message"] == "in ..." and len(failed) == 3
        assert http.post("/v1/completions", json={"prompt": "x", "n": 17}).status_code == 400
        told = http.get("/v1/models")
        assert told.json()["data"][0]["max_model_len"] == 321 and "secret" not in told.text
        assert http.get("/version").json()["vllm"] == "0.0.fake"
        page = http.get("/metrics").text
        assert "vllm:some_total 3.0" in page and "sameseed:engine_up 1.0" in page
        assert httpx.post(fronted.url + "/v1/completions", json={"prompt": "abc"}).status_code == 401
    first, *bodies = fronted.seen
    assert first["key"] is None and first["group"]  # vLLM must not learn our keys
    assert "ngram" in first["arguments"][first["arguments"].index("--speculative-config") + 1]
    assert first["arguments"][first["arguments"].index("--reasoning-parser") + 1] == "qwen3"
    assert not any("secret" in a or KEY in a for a in first["arguments"])
    assert {b["authorization"] for b in bodies} != {f"Bearer {KEY}"} and len({b["authorization"] for b in bodies}) == 1
    body = bodies[0]["body"]
    assert body.pop("cache_salt") and body == {"prompt": "abc", "temperature": 0.5, "unknown": 1}


def test_who_leaves_is_not_written_for(fronted: Fronted) -> None:
    with fronted.client() as http:
        body = {"prompt": "long", "stream": True, "max_tokens": 2000}
        with http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_raw())
        wait_until(lambda: {"left": "long"} in fronted.seen)
        wait_until(lambda: "sameseed:num_requests_inside 0.0" in http.get("/metrics").text)
        assert 'status="499"' in http.get("/metrics").text


def test_a_death_is_told_at_once_and_mended(fronted: Fronted) -> None:
    with fronted.client() as http:
        cut = stream(http, "die later", max_tokens=100)
        assert cut[-1]["error"]["type"] == "service_unavailable_error"
        told = time.monotonic()
        wait_until(lambda: "sameseed:engine_restarts 1.0" in http.get("/metrics").text)
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "die"}).status_code == 503
        wait_until(lambda: "sameseed:engine_restarts 2.0" in http.get("/metrics").text)
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.post("/v1/completions", json={"prompt": "ok"}).json() == {"choices": [{"text": "OK"}]}
        sick = Path(f"{fronted.file}.sick")  # alive, but not healthy
        sick.write_text("")
        wait_until(lambda: "sameseed:engine_restarts 3.0" in http.get("/metrics").text)
        sick.unlink()
        wait_until(lambda: http.get("/ready").status_code == 200)
    ready = [float(moment) for moment in Path(f"{fronted.file}.asked").read_text().split()]
    assert len(ready) == 4 and ready[0] < told < ready[1], "told at once: before the next one could be ready"
    folders = [f["arguments"][-1] for f in fronted.seen if "arguments" in f]
    assert len(set(folders)) == 4 and [Path(f).parent.exists() for f in folders] == [False] * 3 + [True]
    assert stat.S_IMODE(Path(folders[-1]).parent.stat().st_mode) == 0o700


def test_sigterm_lets_streams_finish_and_tells_the_rest(fronted: Fronted) -> None:
    with fronted.client() as http, ThreadPoolExecutor(2) as pool:
        short = pool.submit(stream, http, "short", max_tokens=15)
        long = pool.submit(stream, http, "long", max_tokens=5000)
        wait_until(lambda: sum("body" in s for s in fronted.seen) == 2)
        fronted.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get("/ready").status_code == 503)
        assert http.post("/v1/completions", json={"prompt": "new"}).status_code == 503
        assert len(short.result()) == 15 and "error" not in short.result()[-1]
        assert long.result()[-1]["error"]["type"] == "service_unavailable_error"
    assert fronted.process.wait(60) == 0


FLAGS = ["--served-model-name", "--max-num-seqs", "--enforce-eager"]


@pytest.mark.parametrize(
    ("flags", "installed", "says"),
    [
        (["--draft", "none", "--vllm-args=--enforce-eagre"], {"flags": FLAGS}, "did you mean --enforce-eager"),
        (["--draft", "none", "--batch-invariant"], {"cpu": True}, "of vLLM's GPU kernels"),
        (["--draft", "none"], None, "has no vLLM; install it"),
    ],
)
def test_what_is_wrong_is_said_before_vllm_starts(
    flags: list[str],
    installed: dict[str, Any] | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`installed`: what the interpreter reports about its vLLM; None: it has none."""
    python = program(tmp_path / "python", "echo null" if installed is None else f'exec {sys.executable} {FAKE} "$@"')
    monkeypatch.setenv("FAKE_VLLM_INSTALLED", json.dumps(installed))
    assert main(["serve", "--port", "0", "--engine", "vllm", "--vllm-python", str(python), *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_before_vllm_starts(tmp_path: Path) -> None:
    python = program(tmp_path / "python", f'exec {sys.executable} {FAKE} "$@"')
    own = ["--engine", "vllm", "--vllm-python", str(python), "--draft", "none", "--host", "127.0.0.1"]
    env = {**os.environ, "FAKE_VLLM_SEEN": str(tmp_path / "seen")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "sameseed", "serve", *own, "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "choose another --port" in done.stderr, done.stderr
    assert not (tmp_path / "seen").exists()


OTHER = """import sys, uvicorn
from starlette.applications import Starlette
uvicorn.run(Starlette(), uds=sys.argv[sys.argv.index('--uds') + 1], log_config=None)
"""  # answers every request with 404, and so is never healthy


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ("echo no model >&2; exit 3", ("no model", "vLLM ended with code 3")),
        ('exec {python} {other} "$@"', ("was not ready within 3 s", "/health with 404")),
    ],
)
def test_a_first_start_that_fails_ends_the_server(runs: str, says: tuple[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(OTHER)
    look = f'case "$1" in *look.py) exec {sys.executable} {FAKE} "$@";; esac'
    python = program(tmp_path / "python", f"{look}; {runs.format(python=sys.executable, other=other)}")
    made = Server("--engine", "vllm", "--vllm-python", str(python), "--draft", "none", "--load-timeout", "3")
    assert made.process.wait(60) == 2
    said = " ".join(str(line["message"]) for line in made.log)
    assert all(words in said for words in says)
