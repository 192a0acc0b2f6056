"""The process beside the server: what becomes of those who wait when the server ends, or the process does."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretoken.request import SamplingParams
from foretoken.server import frames, helper as helpers
from foretoken.server.client import EngineClient
from foretoken.server.config import ServerConfig
from foretoken.server.errors import ApiError
from foretoken.server.guard import Guard
from foretoken.server.helper import Helper
from foretoken.server.stream import Job

pytestmark = pytest.mark.asyncio


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Processes that are set up, and then never answer; called, it gives their ids."""
    pids, ends = [], []

    def spawn(program: str) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        theirs.sendall(frames.pack({"type": "done", "text": ""}))  # it is set up
        ends.append(theirs)
        ours.setblocking(False)
        pids.append(os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ))
        return pids[-1], ours

    monkeypatch.setattr(helpers.process, "spawn", spawn)
    return lambda: pids


async def refused(waiting: asyncio.Future[Any]) -> int:
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(waiting, 10)
    return caught.value.status


async def test_who_is_being_prepared_when_the_server_ends_is_told(silent: Callable[[], list[int]]) -> None:
    made = Helper(lambda: {"type": "setup"}, 60.0, 8)
    waiting = [asyncio.ensure_future(made.ask({"type": "render"}, "messages")) for _ in range(3)]
    while not silent():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    made.refuse()
    assert [await refused(w) for w in waiting] == [503] * 3
    assert await refused(asyncio.ensure_future(made.ask({"type": "render"}, "messages"))) == 503
    await made.close()
    for _ in range(500):
        if not Path(f"/proc/{silent()[0]}").exists():
            break
        await asyncio.sleep(0.01)
    assert len(silent()) == 1 and not Path(f"/proc/{silent()[0]}").exists(), "nothing is left behind, or started anew"


async def test_nothing_is_taken_after_the_end() -> None:
    client = EngineClient("x", {})
    client.state = "ready"
    client.end_all(ApiError(503, "the end"))
    with pytest.raises(ApiError, match="shutting down") as caught:
        client.submit(Job("r", [[1]], SamplingParams()))
    assert caught.value.status == 503 and client.num_streams == 0


async def test_who_is_cut_off_before_an_answer_gets_one() -> None:
    """The last resort: tasks that the HTTP server cancels."""

    class Uncounted:
        def answered(self, route: str, status: int) -> None:
            assert status == 503

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [(b"host", b"localhost")]}
    task = asyncio.ensure_future(Guard(app, ServerConfig(), Uncounted())(scope, send, send))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait_for(task, 10)
    assert sent[0]["status"] == 503 and b"shutting down" in sent[1]["body"]
