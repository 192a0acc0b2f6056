"""The helper process: runs work that may hang, and is killed if a job is late; and the grammars that it compiles."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable

from sameseed.server import frames, limits, process
from sameseed.server.errors import ApiError, bad_request, unavailable
from sameseed.server.frames import HelperResult, Job, Setup, Unpacker
from sameseed.server.structured import GrammarSource

log = logging.getLogger("sameseed.server")
STARTING = 120.0  # seconds for the process to load what it needs
AT_ONCE = 0.2  # seconds: a process that fails sooner after a job was sent had died before
LARGE = 2**16  # characters: a larger frame is packed in a thread
ENDED = "the server is shutting down, and this request was not finished"


class HelperDiedError(Exception):
    """A job failed: its process died, or took too long. `spent`: the job used up its CPU time."""

    def __init__(self, spent: bool) -> None:
        super().__init__("it took too much work" if spent else "its process died or stood still")
        self.spent = spent


class Helper:
    """One process, one job at a time. If a job takes longer than `patience` seconds, the process is killed."""

    def __init__(
        self,
        setup: Callable[[], Setup],
        patience: float,
        max_waiting: int,
        spawn: Callable[[], tuple[int, socket.socket]] = lambda: process.spawn("aside"),
    ) -> None:
        """`setup` makes the first frame of a new process, which `spawn` starts; `max_waiting`: jobs that may wait."""
        self._spawn = spawn
        self._setup, self._patience, self._max_waiting = setup, patience, max_waiting
        self._lock = asyncio.Lock()
        self._pid: int | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._results: Unpacker[HelperResult] = Unpacker(HelperResult)
        self._num_jobs = 0  # one runs, the others wait
        self._closed = False

    async def ask(self, frame: Job, name: str) -> str:
        """Do a job; returns its result. `name`: the field that an error names.

        Raises HelperDiedError; ApiError 400 if the job is refused, 503 if too many jobs wait or the server shuts down.
        """
        if self._num_jobs > self._max_waiting:
            raise unavailable("too many requests wait to be prepared; try again later", 1)
        self._num_jobs += 1
        try:
            result = await self._answer(frame)
        finally:
            self._num_jobs -= 1
        if result.fault == "request":
            raise bad_request(result.text, name)
        if result.fault == "machine":
            log.error("a grammar could not be compiled: %s", result.text)
            raise HelperDiedError(spent=False)
        return result.text

    def refuse(self) -> None:
        """Do no more jobs: all that wait, and all later ones, end with ApiError 503."""
        self._closed = True
        if self._streams is not None:  # who waits for an answer reads the end, even if a fork holds the other socket
            self._streams[1].transport.abort()

    async def close(self) -> None:
        self.refuse()
        await self._end()

    async def _answer(self, frame: Job) -> HelperResult:
        data = await limits.away(len(frame.source) > LARGE, lambda: frames.pack(frame), None)
        async with self._lock:
            if self._streams is None or self._streams[0].at_eof():  # not started yet, or died while idle
                await self._start()
            sent = time.monotonic()
            try:
                return await self._exchange(data, self._patience)
            except HelperDiedError as error:
                if error.spent or time.monotonic() - sent > AT_ONCE:
                    raise
            await self._start()  # it had died while idle
            return await self._exchange(data, self._patience)

    async def _start(self) -> None:
        await self._end()
        setup = b"" if self._closed else await asyncio.to_thread(lambda: frames.pack(self._setup()))
        if self._closed:
            raise unavailable(ENDED)
        try:
            self._pid, ours = self._spawn()
            self._streams = await asyncio.open_unix_connection(sock=ours)
            result = await self._exchange(setup, STARTING)
        except (OSError, HelperDiedError) as error:  # or no process, memory or descriptor is available now
            log.error("the process beside the server cannot be started: %s", error)
        else:
            if result.fault:
                await self._end()
                raise bad_request(result.text)
            return
        await self._end()
        raise unavailable("requests cannot be prepared now; try again later")

    async def _exchange(self, data: bytes, patience: float) -> HelperResult:
        """Send a frame and receive the answer. After an error or cancellation the process is ended: its answer is late.

        Raises HelperDiedError; ApiError 503 if the server has ended the process meanwhile.
        """
        if self._closed or self._streams is None:
            raise unavailable(ENDED)
        reader, writer = self._streams
        try:
            writer.write(data)  # a process that stands still does not read either: nobody waits for `drain`
            return await asyncio.wait_for(self._results.next(reader), patience)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, frames.FrameError) as error:
            code = await self._end()
            if self._closed:
                raise unavailable(ENDED) from None
            spent = code == -signal.SIGPROF  # by its own timer
            if not spent:
                log.error("a process beside the server ended with code %s (%s)", code, type(error).__name__)
            raise HelperDiedError(spent) from None
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> int | None:
        """End the process; returns its exit code, None if there is no process."""
        pid, streams = self._pid, self._streams
        self._pid = self._streams = None
        if streams is not None:
            streams[1].close()
        return None if pid is None else await asyncio.shield(process.end(pid, 0.05))


MAX_BYTES = 64 * 2**20  # of compiled grammars, and of refusals that are remembered
MAX_KEPT = 4096  # of both: each takes more than the bytes that are counted


class Grammars:
    """An LRU cache of grammars. `on_forget` gets the key of a dropped one; `on_need` is called before compiling one."""

    def __init__(
        self,
        helper: Helper,
        on_forget: Callable[[str], None],
        on_need: Callable[[], None] = lambda: None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._helper, self._on_forget, self._on_need, self._max_bytes = helper, on_forget, on_need, max_bytes
        self._kept: OrderedDict[str, bytes | str] = OrderedDict()  # by key: the grammar's frame, or why it was refused
        self._coming: dict[str, asyncio.Task[bytes | str]] = {}  # by key: one task for all requests that wait for it
        self.num_bytes = 0

    async def compiled(self, source: GrammarSource) -> bytes:
        """The frame that loads the compiled grammar of a source into the engine.

        Raises ApiError: 400 for a grammar that is invalid, or takes too much to compile; 503 if too many wait, or if
        compiling was stopped from outside.
        """
        key = source.key
        made = self._kept.get(key)
        if made is None:
            if key not in self._coming:
                self._on_need()
                task = self._coming[key] = asyncio.get_running_loop().create_task(self._compile(source, key))
                task.add_done_callback(lambda done: self._coming.pop(key))
            made = await asyncio.shield(self._coming[key])  # goes on even if this request is cancelled
        else:
            self._kept.move_to_end(key)
        if isinstance(made, str):
            raise bad_request(made, source.field)
        return made

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    async def _compile(self, source: GrammarSource, key: str) -> bytes | str:
        try:
            text = await self._helper.ask(frames.Job(source.kind, source.text), source.field)
        except HelperDiedError:  # perhaps because of the machine: a retry may succeed
            raise unavailable("the grammar could not be compiled in time; try again later, or simplify it") from None
        except ApiError as error:
            if error.status != 400:
                raise
            return self._keep(key, error.message)
        return self._keep(key, frames.pack(frames.LoadGrammar(key, text)))

    def _keep(self, key: str, made: bytes | str) -> bytes | str:
        self._kept[key] = made
        self.num_bytes += len(made)
        while len(self._kept) > MAX_KEPT or (self.num_bytes > self._max_bytes and len(self._kept) > 1):
            old, dropped = self._kept.popitem(last=False)
            self.num_bytes -= len(dropped)
            self._on_forget(old)
        return made
