"""The process beside the server: what becomes of those who wait when the server ends, or the process does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures_server import pretender

from sameseed.request import SamplingParams
from sameseed.server import aside as asides, frames
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.errors import ApiError
from sameseed.server.frames import Done, Rejected, Stalled
from sameseed.server.guard import Guard
from sameseed.server.helper import Helper, HelperDiedError

pytestmark = pytest.mark.asyncio
SETUP = frames.Setup(False, {}, 8, [])
RENDER = frames.Render([], [])
DONE = frames.pack(Done(""))


async def refused(waiting: asyncio.Future[Any]) -> int:
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(waiting, 10)
    return caught.value.status


async def test_who_is_being_prepared_when_the_server_ends_is_told() -> None:
    pids: list[int] = []

    def silent() -> tuple[int, socket.socket]:
        """Starts what is set up, and then never answers."""
        pid, ours = pretender("sleep", "60", first=DONE)()
        pids.append(pid)
        return pid, ours

    made = Helper(lambda: SETUP, 60.0, 8, silent)
    waiting = [asyncio.ensure_future(made.ask(RENDER, "messages")) for _ in range(3)]
    while not pids:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    made.refuse()
    assert [await refused(w) for w in waiting] == [503] * 3
    assert await refused(asyncio.ensure_future(made.ask(RENDER, "messages"))) == 503
    await made.close()
    for _ in range(500):
        if not Path(f"/proc/{pids[0]}").exists():
            break
        await asyncio.sleep(0.01)
    assert len(pids) == 1 and not Path(f"/proc/{pids[0]}").exists(), "nothing is left behind, or started anew"


ENDS = """
import os, signal, sys
left = int(sys.argv[2])
while left:
    left -= len(os.read(int(sys.argv[1]), left))
os.kill(os.getpid(), signal.Signals[sys.argv[3]])
"""


async def test_what_took_too_much_work_is_told_from_what_was_stopped() -> None:
    """A process's own limit ends it with a signal of its own; any other end may be the machine's doing."""
    read = len(frames.pack(SETUP)) + 1  # it ends when it has seen something of its job
    for end, status in (("SIGPROF", 400), ("SIGKILL", 503)):
        spawn = pretender(sys.executable, "-IS", "-c", ENDS, "FD", str(read), end, first=DONE)
        made = Helper(lambda: SETUP, 60.0, 8, spawn)
        with pytest.raises(HelperDiedError) as caught:
            await made.ask(RENDER, "messages")
        assert caught.value.spent is (end == "SIGPROF")
        client = EngineClient("x", {})
        client._templates = made
        with pytest.raises(ApiError) as told:
            await client.render([], [], 0)
        assert told.value.status == status
        await made.close()


def _sleep() -> str:
    time.sleep(60)
    return ""


def _work() -> str:
    while True:
        pass


def _kill() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def _much() -> str:
    raise MemoryError


@pytest.mark.parametrize(
    ("compiling", "kind"),
    [(_sleep, Stalled), (_kill, Stalled), (_work, Rejected), (_much, Rejected), (str, Done)],
)
async def test_a_grammar_is_refused_for_its_own_faults_only(
    monkeypatch: pytest.MonkeyPatch, compiling: Callable[[], str], kind: type[frames.Frame]
) -> None:
    class Pretended:
        def compiled(self, kind: str, source: str) -> str:
            return compiling()

    monkeypatch.setattr(asides, "WALL", 0.3 if compiling is _sleep else 20.0)
    monkeypatch.setattr(asides, "COMPILE_SECONDS", 1.0 if compiling is _sleep else 0.1)
    aside = asides.Aside(socket.socket())
    aside._matching = Pretended()
    assert type(aside._answer(frames.Compile("regex", "x"))) is kind


@pytest.mark.parametrize(("compiling", "kind"), [(str, Done), (_much, Rejected)])
async def test_what_a_fork_says_counts_though_it_is_slow_to_end(
    monkeypatch: pytest.MonkeyPatch, compiling: Callable[[], str], kind: type[frames.Frame]
) -> None:
    class Pretended:
        def compiled(self, kind: str, source: str) -> str:
            return compiling()

    end = os._exit

    def late(code: int) -> None:
        os.closerange(3, 256)  # as the end itself does; but then comes another process's turn
        time.sleep(0.5)
        end(code)

    monkeypatch.setattr(os, "_exit", late)  # called in the fork only
    aside = asides.Aside(socket.socket())
    aside._matching = Pretended()
    assert type(aside._answer(frames.Compile("regex", "x"))) is kind


async def test_nothing_is_taken_after_the_end() -> None:
    client = EngineClient("x", {})
    client.state = "ready"
    client.end_all(ApiError(503, "the end"))
    with pytest.raises(ApiError, match="shutting down") as caught:
        client.submit(frames.Add("r", [[1]], SamplingParams()), b"")
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
