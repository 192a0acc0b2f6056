"""Helper: runs a process for work that may hang. It starts with the first job, and is killed if a job is late."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable

from sameseed.server import frames, process
from sameseed.server.errors import bad_request, unavailable
from sameseed.server.frames import Frame, FromHelper, Rejected, Setup, Stalled, Unpacker

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
        self._num_waiting = 0
        self._pid: int | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._jobs: set[asyncio.Task[FromHelper]] = set()
        self._closed = False

    async def ask(self, frame: Frame, name: str, size: int = 0) -> str:
        """Do a job; returns its result.

        `name`: the field that an error names; `size`: approximate characters of the frame.
        Raises HelperDiedError; ApiError 400 if the job is refused, 503 if too many jobs wait or the server shuts down.
        """
        if self._closed:
            raise unavailable(ENDED)
        if self._num_waiting > self._max_waiting:
            raise unavailable("too many requests wait to be prepared; try again later", 1)
        self._num_waiting += 1
        job = asyncio.get_running_loop().create_task(self._answer(frame, size))
        self._jobs.add(job)
        try:
            await asyncio.wait({job})
        finally:
            job.cancel()  # if the caller was cancelled
            self._jobs.discard(job)
            self._num_waiting -= 1
        if job.cancelled():
            raise unavailable(ENDED)
        answer = job.result()
        if isinstance(answer, Rejected):
            raise bad_request(answer.message, name)
        if isinstance(answer, Stalled):
            log.error("a grammar could not be compiled: %s", answer.message)
            raise HelperDiedError(spent=False)
        return answer.text

    def refuse(self) -> None:
        """Do no more jobs: all that wait, and all later ones, end with ApiError 503."""
        self._closed = True
        for job in self._jobs:
            job.cancel()

    async def _answer(self, frame: Frame, size: int) -> FromHelper:
        data = await asyncio.to_thread(frames.pack, frame) if size > LARGE else frames.pack(frame)
        async with self._lock:
            if self._streams is None:
                await self._start()
            sent = time.monotonic()
            try:
                return await self._exchange(data, self._patience)
            except HelperDiedError:
                if time.monotonic() - sent > AT_ONCE:
                    raise
            await self._start()  # the process had died while idle
            return await self._exchange(data, self._patience)

    async def close(self) -> None:
        """End the process."""
        self.refuse()
        await self._end()

    async def _start(self) -> None:
        try:
            self._pid, ours = self._spawn()
            self._streams = await asyncio.open_unix_connection(sock=ours)
        except OSError as error:  # no process, memory or descriptor is available now
            log.error("the process beside the server cannot be started: %s", error.strerror)
            await self._end()
            raise unavailable("requests cannot be prepared now; try again later") from None
        try:
            answer = await self._exchange(await asyncio.to_thread(lambda: frames.pack(self._setup())), STARTING)
        except HelperDiedError as error:
            log.error("the process beside the server cannot be set up: %s", error)
            raise unavailable("requests cannot be prepared now; try again later") from None
        if isinstance(answer, Rejected):
            await self._end()
            raise bad_request(answer.message)

    async def _exchange(self, data: bytes, patience: float) -> FromHelper:
        """Send a frame and receive the answer. After an error or cancellation the process is ended: its answer is late.

        Raises HelperDiedError.
        """
        try:
            return await asyncio.wait_for(self._talk(data), patience)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, frames.FrameError) as error:
            code = await self._end()
            spent = code == -signal.SIGPROF  # by its own timer
            if not spent:
                log.error("a process beside the server ended with code %s (%s)", code, type(error).__name__)
            raise HelperDiedError(spent) from None
        except BaseException:
            await self._end()
            raise

    async def _talk(self, data: bytes) -> FromHelper:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(data)
        await writer.drain()
        head = await reader.readexactly(4)
        body = await reader.readexactly(min(int.from_bytes(head, "little"), frames.MAX_FRAME))
        unpacker: Unpacker[FromHelper] = Unpacker(FromHelper)
        return unpacker.feed(head + body)[0]

    async def _end(self) -> int | None:
        """End the process; returns its exit code, None if there is no process."""
        pid, streams = self._pid, self._streams
        self._pid = self._streams = None
        if streams is not None:
            streams[1].close()
        return None if pid is None else await asyncio.shield(process.end(pid, 0.05))
