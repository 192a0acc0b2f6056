"""The helper process for work that may hang: renders chat templates, or compiles grammars. It may be killed any time.

`python -m sameseed.server.aside FD` does one job after the other. Templates are rendered in this process, under a timer
that ends it. Each grammar is compiled in a fork with limits of time and memory, because grammars come from clients. A
fork needs no loading; xgrammar and the vocabulary take seconds to load.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from sameseed.errors import RequestError
from sameseed.server import frames
from sameseed.server.frames import HelperResult, Job, Setup, ToHelper
from sameseed.server.limits import COMPILE_MEMORY, COMPILE_SECONDS, MAX_COMPILED, TEMPLATE_SECONDS

log = logging.getLogger("sameseed")
WALL = 5.0  # wall-clock seconds for each second of CPU time: other processes compute too
LEAVING = 5.0  # seconds for a fork to end after it has closed its pipe; it ends as soon as it is scheduled
FORK = multiprocessing.get_context("fork")  # only bytes go through its pipes, never objects
TOO_MUCH = HelperResult("structured output: it takes too much time or memory to compile; simplify it", "request")


class Aside:
    """Does a helper's jobs, which come as frames from a socket. The first frame says which model they are for."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._tokenizer: Any = None
        self._matching: Any = None

    def run(self) -> None:
        unpacker: frames.Unpacker[ToHelper] = frames.Unpacker(ToHelper)
        for frame in unpacker.each(self._socket.makefile("rb")):
            self._socket.sendall(frames.pack(self._answer(frame)))

    def _answer(self, frame: ToHelper) -> HelperResult:
        try:
            if isinstance(frame, Job) and frame.kind != "template":
                return self._compile(frame)
            return HelperResult(self._set_up(frame) if isinstance(frame, Setup) else self._render(frame))
        except RequestError as error:
            return HelperResult(str(error), "request")

    def _set_up(self, frame: Setup) -> str:
        from sameseed.tokenizer import Tokenizer

        self._tokenizer = Tokenizer.from_files(frame.tokenizer)
        if frame.grammars:
            from sameseed.grammar.matching import Matching
            from sameseed.server.text import vocabulary

            self._matching = Matching(vocabulary(self._tokenizer, frame.vocab_size, frame.eos_token_ids))
        else:
            _limit(resource.RLIMIT_DATA, COMPILE_MEMORY)
        return ""

    def _render(self, frame: Job) -> str:
        asked = frames.Render(*json.loads(frame.source))
        signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)  # its signal ends the process
        try:
            render = self._tokenizer.render_chat
            return str(render(asked.messages, True, asked.tools, asked.options, guarded=True))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def _compile(self, frame: Job) -> HelperResult:
        """Compile in a fork, so that neither a crash nor a kill loses the loaded library and vocabulary."""
        try:
            reading, writing = FORK.Pipe(duplex=False)
            with reading:
                with writing:
                    fork = FORK.Process(target=self._as_child, args=(writing, frame))
                    fork.start()
                said: bytes | None = b""  # empty if the fork ends early, None if it takes too long
                with contextlib.suppress(EOFError, OSError):
                    said = reading.recv_bytes(frames.MAX_FRAME) if reading.poll(WALL * COMPILE_SECONDS) else None
        except OSError as error:  # no memory, process or descriptor is available now
            return HelperResult(str(error.strerror), "machine")
        fork.join(LEAVING if said is not None else 0.0)
        if fork.exitcode is None:
            fork.kill()
            fork.join()
        if said and fork.exitcode == 0:
            return msgspec.msgpack.decode(said, type=HelperResult)
        if fork.exitcode == -signal.SIGKILL:  # killed for its wall-clock time, or by the system, not by its own limits
            return HelperResult("compiling was stopped", "machine")
        return TOO_MUCH

    def _as_child(self, writing: Connection, frame: Job) -> None:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with open("/proc/self/statm", encoding="ascii") as file:
                address_space = int(file.read().split()[0]) * resource.getpagesize()
            _limit(resource.RLIMIT_AS, address_space + COMPILE_MEMORY)
            signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
            try:
                result = HelperResult(self._matching.compiled(frame.kind, frame.source))
            except RequestError as error:
                result = HelperResult(str(error), "request")
            writing.send_bytes(msgspec.msgpack.encode(TOO_MUCH if len(result.text) > MAX_COMPILED else result))
        except Exception:
            log.debug("a grammar could not be compiled", exc_info=True)


def _limit(kind: int, size: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def main() -> None:
    """Run a helper on the inherited socket. `process.spawn` blocks signals: the process ends when its socket closes."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    Aside(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
