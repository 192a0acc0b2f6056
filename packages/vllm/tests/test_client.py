"""A vLLM that dies, cannot be started, or cannot be watched."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from fixtures_server import program, until

from sameseed_vllm import client as vllm
from sameseed_vllm.client import VllmClient
from sameseed_vllm.link import Link


async def test_a_vllm_that_is_gone_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that reports no facts still serves; then it dies, and it cannot be started again."""
    said: list[str] = []
    python = program(tmp_path / "python", "exec sleep 60")

    async def page(link: Link, path: str, patience: float = 0.0) -> tuple[int, bytes]:
        return 200, b'{"data": null}'

    monkeypatch.setattr(Link, "get", page)
    monkeypatch.setattr(vllm, "LOADING", 0.0)
    client = VllmClient([], {}, python=str(python), max_restarts=2, first_delay=0.01)
    client.on_failure = said.append
    client.start()
    await asyncio.wait_for(client.wait_ready(), 20)
    python.unlink()
    os.kill(client.pid or 0, 9)
    await until(lambda: said)
    assert said[0] == "vLLM could not be started: No such file or directory"
    await client.close()
