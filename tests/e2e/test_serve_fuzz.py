"""schemathesis with the OpenAPI document: valid requests are accepted, the others refused, and no status is 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_server import Server, serving

pytest.importorskip("schemathesis")
KEY = "key-of-the-fuzz"
CHECKS = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]  # replaced in fixtures_fuzz.py


@pytest.fixture(scope="module")
def server(pair_folders: tuple[Path, Path]) -> Iterator[Server]:
    flags = ["--model", str(pair_folders[0]), "--served-model-name", "tiny", "--draft", str(pair_folders[1])]
    with serving(*flags, "--max-model-len", "64", env={"SAMESEED_API_KEY": KEY}) as made:
        yield made
    assert not [entry for entry in made.log if "trace" in entry]


def fuzz(server: Server, folder: Path, *more: str) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *CHECKS, "--mode", "all"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--no-color", "--generation-deterministic", *more]
    command += ["--request-timeout", "60", "--max-response-time", "60"]  # its own 10 s are short on a busy machine
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "fixtures_fuzz", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_a_few_examples(server: Server, tmp_path: Path) -> None:
    fuzz(server, tmp_path, "--phases", "fuzzing", "--max-examples", "4")


@pytest.mark.slow
def test_two_hundred_examples_an_operation(server: Server, tmp_path: Path) -> None:
    fuzz(server, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "200")
