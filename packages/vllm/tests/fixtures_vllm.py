"""A server in front of a stand-in for vLLM; and the Python interpreters with a real vLLM.

SAMESEED_VLLM_PYTHON names them, separated by ":". Without it, the running interpreter counts if it has vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
from fixtures_server import Server, events, program

KEY = "a-key-for-the-test"
FAKE = Path(__file__).with_name("fake_vllm.py")


def real_pythons() -> list[str]:
    """Python interpreters that have vLLM."""
    named = [python for python in os.environ.get("SAMESEED_VLLM_PYTHON", "").split(os.pathsep) if python]
    return named or ([sys.executable] if importlib.util.find_spec("vllm") else [])


class Fronted(Server):
    """A server in front of the stand-in; `seen`: what the stand-in received."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.file = folder / "seen"
        python = program(folder / "python", f'exec {sys.executable} {FAKE} "$@"')
        env = {"FAKE_VLLM_SEEN": str(self.file), "SAMESEED_API_KEY": KEY}
        own = ["--engine", "vllm", "--vllm-python", str(python), "--draft", "ngram", "--max-num-seqs", "4"]
        super().__init__(*own, "--served-model-name", "m", *flags, env=env)
        self.wait_log("ready")

    @property
    def seen(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def client(self, **more: Any) -> httpx.Client:
        return super().client(headers={"authorization": f"Bearer {KEY}"}, **more)


def stream(http: httpx.Client, prompt: str, **more: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "stream": True, **more}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        return events(response)
