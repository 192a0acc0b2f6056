"""A real server for tests: `sameseed serve` as users start it, on a free port, with its log."""

import asyncio
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from lawkit import MAX_LEN, MODEL_VOCAB, TEMPLATE
from tokenizers import Tokenizer as HFTokenizer

from sameseed.request import FinishReason, Metrics, SpecMetrics, TimeSplit
from sameseed.server.app import create_app
from sameseed.server.client import EngineClient
from sameseed.server.frames import Ended
from sameseed.server.text import TextCodec

START = 120.0  # seconds at most, on a busy machine
DONE = Ended(FinishReason.STOP, 1, Metrics(0, 0, SpecMetrics(), TimeSplit(), 0.0, 0.0, 0.0))


def start(*argv, **kwargs):
    """Start the command in a process of its own, with Ctrl-C enabled even if the tests run without it."""
    return subprocess.Popen(
        [sys.executable, "-m", "sameseed", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **kwargs,
    )


class Server:
    """One running server. `log` holds its log lines, parsed, unless `process` (as for Popen) sends them elsewhere."""

    def __init__(self, *flags, env=None, **process):
        self.log: list[dict[str, Any]] = []
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sameseed", "serve", "--port", "0", "--threads", "1", *flags],
            **{"stderr": subprocess.PIPE, "text": True, "env": {**os.environ, **(env or {})}, **process},
        )
        if self.process.stderr:
            threading.Thread(target=self._read, daemon=True).start()
            self.url = str(self.wait_log("listening")["url"])
        else:
            wait_until(self._listening, START)
            self.url = f"http://127.0.0.1:{self._listening()[0]}"

    def _listening(self):
        return [port for port, _, state in sockets(self.process.pid) if state == "0A"]

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def connect(self):
        """An open TCP connection."""
        return socket.create_connection(("127.0.0.1", self.port), 10)

    def _read(self):
        for line in self.process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"message": line.rstrip(), "raw": True}
            self.log.append(entry)
            self._lines.put(entry)
        self._lines.put(None)

    def wait_log(self, message):
        """Wait for the next log line with this message."""
        until = time.monotonic() + START
        while True:
            entry = self._lines.get(timeout=max(0.1, until - time.monotonic()))
            assert entry is not None, f"the server ended: {self.log}"
            if entry["message"] == message:
                return entry

    def client(self, **more):
        return httpx.Client(base_url=self.url, timeout=60, **more)

    @property
    def engine_pid(self):
        """The PID of the engine's process, a child of the server."""
        return program_of(self.process.pid, "worker")

    def stop(self):
        """Terminate the server if it still runs; returns the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextmanager
def serving(*flags, env=None):
    """A server that is ready. At the end it must exit with code 0 and leave no child process behind."""
    made = Server(*flags, env=env)
    try:
        made.wait_log("ready")
        yield made
    finally:
        assert made.stop() == 0
        assert not children(made.process.pid)


def visiting(app):
    """A client of an ASGI application in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def visitor(config):
    """A client of an application whose engine was never started."""
    app, _ = create_app(EngineClient("embedded", {}), config)
    return visiting(app)


def codec(pair, template=TEMPLATE, marks=()):
    """The tiny pair's tokenizer as the server has it, with this chat template and `marks` as special tokens."""
    backend = HFTokenizer.from_str(pair.tokenizer.as_files()["tokenizer.json"])
    backend.add_special_tokens(list(marks))
    config = json.dumps({"chat_template": template, "eos_token": "<|end|>"})

    async def render(content):
        messages, tools, options = content
        return made.tokenizer.render_chat(messages, True, tools, options, guarded=True)

    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": config}
    made = TextCodec(files, MODEL_VOCAB, MAX_LEN, render)
    return made


async def until(condition):
    """Let the event loop run until the condition is true."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < 60.0, "waited in vain"
        await asyncio.sleep(0.01)


def pretender(*command, first=b"", pids=None):
    """A function that starts `command` in place of a program of the server; "FD" in it becomes its end of the socket.

    `first`: bytes that seem to come from the program at once; `pids`: a list that gets the PID of each process.
    """

    def spawn():
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(first)
            os.set_inheritable(theirs.fileno(), True)
            words = [word.replace("FD", str(theirs.fileno())) for word in command]
            pid = os.posix_spawnp(words[0], words, os.environ)
        if pids is not None:
            pids.append(pid)
        ours.setblocking(False)
        return pid, ours

    return spawn


def children(pid):
    """PIDs of the child processes that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def program_of(server, program):
    """The PID of the server's child process that runs the module sameseed.server.`program`."""
    name = f"sameseed.server.{program}".encode()
    return next(pid for pid in children(server) if name in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


def sockets(pid):
    """TCP and UDP sockets of a process: local port, remote port, state (0A: listening)."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(link.readlink())
        except OSError:
            continue
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                local, remote = (int(f.rpartition(":")[2], 16) for f in fields[1:3])
                found.append((local, remote, fields[3]))
    return found


def num_files(pid):
    """The number of file descriptors that a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def program(path, text):
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def gauge(client, name):
    """A metric of /metrics, summed over its labels."""
    page = client.get("/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"vllm:{name}{{"))


def wait_until(condition, seconds=60.0):
    """Wait until the condition is true; returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited in vain"
        time.sleep(0.02)
    return time.monotonic() - start


def events(response):
    """The data of a stream's events; the last one must be [DONE]."""
    lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
