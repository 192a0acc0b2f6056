"""The helper process: what waiting requests get when the server or the helper ends."""

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from fixtures_server import children, pretender, until

from sameseed.request import SamplingParams
from sameseed.server import aside as asides, frames, helper
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.connection import Guard
from sameseed.server.errors import ApiError
from sameseed.server.frames import HelperResult
from sameseed.server.helper import Helper

SETUP = frames.Setup(False, {}, 8, [])
RENDER = frames.Job("template", "[[], [], {}]")
DONE = frames.pack(HelperResult(""))
FORKS = "import os, socket, sys; os.fork(); socket.socket(fileno=int(sys.argv[1])).makefile('rb').read()"


async def refused(waiting):
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(waiting, 10)
    return caught.value.status


@pytest.mark.parametrize("starting", [False, True])
async def test_who_is_being_prepared_when_the_server_ends_is_told(starting):
    """Also while the helper's process is being started; none is left behind, or started anew."""
    pids = []

    def setup():
        time.sleep(0.3 if starting else 0.0)
        return SETUP

    # It confirms its setup, and then never answers. Its fork holds the socket, too, as one for a grammar does.
    silent = pretender(sys.executable, "-IS", "-c", FORKS, "FD", first=DONE, pids=pids)
    made = Helper(setup, 60.0, 8, silent)
    waiting = [asyncio.ensure_future(made.ask(RENDER, "messages")) for _ in range(3)]
    await (asyncio.sleep(0.1) if starting else until(lambda: pids and children(pids[0])))
    made.refuse()
    waiting.append(asyncio.ensure_future(made.ask(RENDER, "messages")))
    assert [await refused(w) for w in waiting] == [503] * 4
    await made.close()
    await asyncio.sleep(0.4 if starting else 0.0)
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert len(pids) <= 1


def _sleep():
    time.sleep(60)
    return ""


def _work():
    while True:
        pass


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _much():
    raise MemoryError


def fault_of(compiling):
    """Whose fault the helper says it is, for a grammar whose compiler does this."""

    class Pretended:
        def compiled(self, kind, source):
            return compiling()

    aside = asides.Aside(socket.socket())
    aside._matching = Pretended()
    return aside._answer(frames.Job("regex", "x")).fault


@pytest.mark.parametrize(
    ("compiling", "fault"), [(_sleep, "machine"), (_kill, "machine"), (_work, "request"), (_much, "request"), (str, "")]
)
async def test_a_grammar_is_refused_for_its_own_faults_only(monkeypatch, compiling, fault):
    monkeypatch.setattr(asides, "WALL", 0.3 if compiling is _sleep else 20.0)
    monkeypatch.setattr(asides, "COMPILE_SECONDS", 1.0 if compiling is _sleep else 0.1)
    assert fault_of(compiling) == fault


async def test_nothing_is_taken_after_the_end():
    client = EngineClient("x", {})
    client.state = "ready"
    client.end_all(ApiError(503, "the end"))
    with pytest.raises(ApiError, match="shutting down") as caught:
        await client.submit(frames.Add("r", [[1]], SamplingParams()))
    assert caught.value.status == 503 and not client._streams


async def test_who_is_cut_off_before_an_answer_gets_one():
    """The last resort, for tasks that the HTTP server cancels."""
    counted, sent = [], []

    async def app(scope, receive, send):
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": [(b"host", b"localhost")]}
    guard = Guard(app, ServerConfig(), lambda visit, route, status: counted.append(status))
    task = asyncio.ensure_future(guard(scope, send, send))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait_for(task, 10)
    assert counted == [sent[0]["status"]] == [503] and b"shutting down" in sent[1]["body"]


async def test_a_helper_that_cannot_be_started_is_no_fault_of_the_request():
    def short():
        raise OSError(24, "Too many open files")

    made = Helper(lambda: SETUP, 1.0, 8, short)
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            await made.ask(RENDER, "messages")
        assert caught.value.status == 503 and caught.value.retry_after
    await made.close()


def test_who_runs_the_programs_of_others_knows_no_secret(monkeypatch):
    """Templates and grammars run in a process whose environment holds only what Python needs."""
    started = []
    monkeypatch.setattr(helper.process.os, "posix_spawn", lambda path, command, env, **more: started.append(env) or 1)
    secret = {"SAMESEED_API_KEY": "k", "HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s", "LC_ALL": "C.UTF-8"}
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    for program in ("aside", "worker"):
        helper.process.spawn(program)[1].close()
    aside, worker = started
    assert not secret.keys() - {"LC_ALL"} & aside.keys() and aside["LC_ALL"] == "C.UTF-8" and aside["PYTHONPATH"]
    assert "SAMESEED_API_KEY" not in worker and worker["HF_TOKEN"] == "t", "who loads models may need it"
