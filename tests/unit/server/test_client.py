"""The server's end of the engine process, with a stand-in for that process that dies, hangs or sends nonsense."""

import asyncio
import io
import itertools
import select
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fixtures_server import pretender, until

from sameseed.request import SamplingParams
from sameseed.server import frames, process
from sameseed.server.client import EngineClient
from sameseed.server.errors import ApiError
from sameseed.server.frames import Add

PRETENDER = """
import os, socket, sys, time
connection, behaviour = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
ready, seen = open(sys.argv[3], "rb").read(), sys.argv[3] + ".seen"
beat = open(sys.argv[3] + "." + ("stuck" if behaviour == "stuck" else "beat"), "rb").read()
first = not os.path.exists(seen)
connection.recv(100_000)  # what to load
connection.sendall(ready)
if first:  # waits until it is asked for something
    open(seen, "w").close()
    connection.recv(100_000)
while behaviour != "silent":
    connection.sendall(beat)
    if behaviour == "dies" or behaviour == "dies once" and first:
        time.sleep(0.2)
        os._exit(7)
    if behaviour == "nonsense":
        connection.sendall(b"\\xff" * 100)
    time.sleep(0.05)
time.sleep(60)
"""
Start = Callable[..., EngineClient]


@pytest.fixture
def start(pair, tmp_path):
    """Makes clients of stand-ins with a given behaviour."""
    ready = tmp_path / "ready"
    ready.write_bytes(frames.pack(frames.EngineReady(pair.tokenizer.as_files(), 304, 256, 4)))
    for name, seconds in (("beat", 0.0), ("stuck", 99.0)):
        ready.with_suffix(f".{name}").write_bytes(frames.pack(frames.Deltas([], {"drafts": 1}, seconds)))
    script = tmp_path / "pretender.py"
    script.write_text(PRETENDER)

    def make(behaviour, failing=lambda start: None, **more):
        pretended, starts = pretender(sys.executable, str(script), "FD", behaviour, str(ready)), itertools.count()

        def spawn():
            if (error := failing(next(starts))) is not None:
                raise error
            return pretended()

        made = EngineClient("x", {}, spawn=spawn, first_delay=0.01, **more)
        made.start()
        return made

    return make


async def submit(client):
    return await client.submit(Add("r", [[1]], SamplingParams()))


async def read(stream):
    """The error that ends a stream."""
    with pytest.raises(ApiError) as caught:
        async for _ in stream.pieces():
            pass
    return caught.value


async def test_a_process_that_keeps_dying_is_given_up(start):
    said = []
    client = start("dies", max_restarts=2)
    client.on_failure = said.append
    await asyncio.wait_for(client.wait_ready(), 20)
    error = await asyncio.wait_for(read(await submit(client)), 20)
    assert error.status == 503 and error.retry_after
    await until(lambda: said)
    assert said == ["the engine's process ended with code 7"]
    assert client.num_restarts == 2 and client.state == "failed"
    assert [s["drafts"] for s in client.past_stats] == [1, 1, 1]
    with pytest.raises(ApiError, match="has stopped"):
        await submit(client)
    await client.close()


@pytest.mark.parametrize(
    ("behaviour", "settings"), [("silent", {"_beat_timeout": 0.5}), ("stuck", {"_step_timeout": 1.0}), ("nonsense", {})]
)
async def test_a_process_that_hangs_is_ended(start, behaviour, settings):
    client = start(behaviour, max_restarts=1)
    await asyncio.wait_for(client.wait_ready(), 20)
    vars(client).update(settings)  # only now, since starting may take longer
    stream, pid = await submit(client), client.pid
    assert (await asyncio.wait_for(read(stream), 20)).status == 503
    assert not client._streams
    await until(lambda: client.pid != pid)
    assert not Path(f"/proc/{pid}").exists(), "it is gone, and another one is there"
    await client.close()


async def test_a_process_that_cannot_be_started_is_tried_again(start):
    """The engine dies while no file descriptor is available, which is temporary."""
    states = []

    def short(start):
        if start:
            states.append(client.state)
        return OSError(24, "Too many open files") if 1 <= start < 5 else None

    client = start("dies once", short, max_restarts=1)
    await asyncio.wait_for(client.wait_ready(), 20)
    await submit(client)
    await until(lambda: client.num_restarts >= 5 and client.state == "ready")
    assert states == ["down"] * 5
    await client.close()


async def test_a_fault_of_a_running_process_counts_as_a_death(caplog):
    """Also one that looks like a lack of descriptors at a start: it is logged with its place, and not tried forever."""

    class Failing(process.Supervised):
        async def _run_once(self):
            self._serves()
            raise OSError(24, "Too many open files")

    said, client = [], Failing(1, 0.01)
    client.on_failure = said.append
    client.start()
    await until(lambda: said)
    assert said == ["the process could not be seen through (OSError)"]
    assert [record.exc_info is not None for record in caplog.records].count(True) == 2


async def test_who_leaves_is_forgotten_and_the_engine_told(start):
    client = start("alive")
    await asyncio.wait_for(client.wait_ready(), 20)
    written = []
    client._write = written.append
    stream = await submit(client)
    stream.leave()
    stream.leave()
    assert [piece async for piece in stream.pieces()] == []
    sent = frames.Unpacker[frames.ToEngine](frames.ToEngine).each(io.BytesIO(b"".join(written)))
    assert [type(f) for f in sent] == [Add, frames.Abort] and not client._streams
    await client.close()
    assert client.pid is not None and not Path(f"/proc/{client.pid}").exists()


async def test_the_engine_does_not_outlive_its_server():
    """The real process exits when the other end of its socket is closed, however the server ended."""
    pid, ours = process.spawn("worker")
    try:
        received = ours.recv(1) if select.select([ours], [], [], 30)[0] else b""
        assert received, "it beats before it is asked for anything"
    finally:
        ours.close()
    assert await asyncio.wait_for(process.end(pid, 20), 30) == 0
