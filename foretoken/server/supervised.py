"""Supervised: a process that is started again when it has died, until that is no use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from foretoken.server.errors import unavailable

log = logging.getLogger("foretoken.server")
FIRST_DELAY, LAST_DELAY = 0.1, 30.0  # seconds before it is started again, doubled each time
STEADY = 60.0  # seconds after which a death is no longer counted with the one before


class Supervised:
    """Base of what keeps one process running. `state`: loading, ready, down (starting anew), failed, closed."""

    what, remedy = "the process", ""  # in messages; what stands behind that it has ended for good

    def __init__(self, max_restarts: int, on_failure: Callable[[str], None]) -> None:
        """`on_failure` is told why, when it is given up: after so many deaths in a row, or before it has served."""
        self.state = "loading"
        self.num_restarts = 0
        self.pid: int | None = None
        self._max_restarts, self._on_failure = max_restarts, on_failure
        self._ready = asyncio.Event()  # it has served once, or never will
        self._ready_since = 0.0
        self._closing = asyncio.Event()
        self._message = ""  # why it is no use to start another
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process and keep one running, from now on."""
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    async def wait_ready(self) -> None:
        """Until it serves. Raises ApiError 503 if it never will."""
        await self._ready.wait()
        self.check_ready()

    def check_ready(self) -> None:
        """Raise ApiError 503 where it does not serve."""
        if self.state != "ready":
            why = {"loading": "the model is being loaded", "down": "the engine is being started again"}
            raise unavailable(why.get(self.state, "the engine has stopped") + "; try again later")

    async def _run_once(self) -> int:
        """Start a process, see it through; returns its exit code. Raises OSError where it could not be started."""
        raise NotImplementedError

    def _gone(self) -> None:
        """A process has ended: who waits for it is told."""

    def _serves(self) -> None:
        self.state, self._ready_since = "ready", time.monotonic()
        self._ready.set()

    def _stopped(self) -> None:
        """It serves no longer."""
        if self.state not in ("closed", "failed"):
            self.state = "down" if self._ready.is_set() else "loading"

    async def _supervise(self) -> None:
        """One process after the other."""
        deaths, delay = 0, FIRST_DELAY
        while self.state != "closed":
            self._ready_since, code = 0.0, None
            try:
                code = await self._run_once()
            except OSError as error:  # no process, memory or descriptor is to be had, now
                log.error("%s cannot be started: %s", self.what, error.strerror)
            lasted = time.monotonic() - self._ready_since if self._ready_since else 0.0
            self._gone()
            if self.state == "closed":
                return
            deaths, delay = (1, FIRST_DELAY) if lasted > STEADY else (deaths + 1, delay)
            deaths -= code is None and self._ready.is_set()  # of descriptors, say: that passes, and is no death
            ended = "could not be started" if code is None else f"ended with code {code}"
            if self._message or deaths > self._max_restarts or not self._ready.is_set():
                self._give_up(self._message or f"{self.what} {ended}{self.remedy}")
                return
            log.error("%s %s; starting it again in %.1f s", self.what, ended, delay)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay)
                return
            delay = min(2 * delay, LAST_DELAY)
            self.num_restarts += 1

    def _give_up(self, message: str) -> None:
        self.state = "failed"
        self._ready.set()
        log.error("no engine: %s", message)
        self._on_failure(message)
