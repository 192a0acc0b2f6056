"""Supervised: a process that is started again when it has died, until that is no use."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from sameseed.server.errors import ApiError, unavailable

log = logging.getLogger("sameseed.server")
FIRST_DELAY, LAST_DELAY = 0.1, 30.0  # seconds before it is started again, doubled each time
STEADY = 60.0  # seconds after which a death is no longer counted with the one before
PASSING = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # no descriptor, process, memory is to be had: now


class NotStartedError(Exception):
    """There is no process."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.passes = error.errno in PASSING


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around what starts a process. Raises NotStartedError in place of OSError."""
    try:
        yield
    except OSError as error:
        raise NotStartedError(error) from error


def not_ready(state: str) -> ApiError:
    """Why nothing serves, by the state of what should."""
    why = {"loading": "the model is being loaded", "down": "the engine is being started again"}
    return unavailable(why.get(state, "the engine has stopped") + "; try again later")


class Supervised:
    """Base of what keeps one process running. `state`: loading, ready, down (starting anew), failed, closed."""

    what, remedy = "the process", ""  # in messages; what stands behind that it has ended for good

    def __init__(self, max_restarts: int, on_failure: Callable[[str], None], first_delay: float = FIRST_DELAY) -> None:
        """`on_failure` is told why it is given up: after more than `max_restarts` deaths in a row, or a first start
        that fails. `first_delay`: seconds before it is started again.
        """
        self.state = "loading"
        self.num_restarts = 0
        self.pid: int | None = None
        self._max_restarts, self._on_failure = max_restarts, on_failure
        self._first_delay = first_delay
        self._ready = asyncio.Event()  # it has served once, or never will
        self._ready_since = 0.0
        self._closing = asyncio.Event()
        self._message = ""  # why it is no use to start another
        self._task: asyncio.Task[None] | None = None

    @property
    def told(self) -> dict[str, Any]:
        """What /health says of it."""
        return {"engine": self.state}

    def start(self) -> None:
        """Start the process and keep one running, from now on."""
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    async def close(self) -> None:
        """End the process; open requests end with an error."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def living(self, app: Any) -> AsyncIterator[None]:
        """The lifespan of an application: the process lives as long."""
        self.start()
        yield
        await self.close()

    async def wait_ready(self) -> None:
        """Until it serves. Raises ApiError 503 if it never will."""
        await self._ready.wait()
        self.check_ready()

    def check_ready(self) -> None:
        """Raise ApiError 503 where it does not serve."""
        if self.state != "ready":
            raise not_ready(self.state)

    async def _run_once(self) -> int:
        """Start a process, see it through; returns its exit code. Whatever it raises, there is no process after it.

        Raises NotStartedError (`starting`) where there was none at all.
        """
        raise NotImplementedError

    def _serves(self) -> None:
        self.state, self._ready_since = "ready", time.monotonic()
        self._ready.set()

    def _stopped(self) -> None:
        if self.state not in ("closed", "failed"):
            self.state = "down" if self._ready.is_set() else "loading"

    async def _supervise(self) -> None:
        deaths, delay = 0, self._first_delay
        while self.state != "closed":
            self._ready_since = 0.0
            passes = False  # a want of the machine's that will pass
            try:
                ended = f"ended with code {await self._run_once()}{self.remedy}"
            except NotStartedError as error:
                ended, passes = f"could not be started: {error}", error.passes
            except Exception as error:  # of ours, or of what it said: the next one may do better
                log.exception("%s could not be seen through", self.what)
                self._stopped()
                ended = f"could not be seen through ({type(error).__name__})"
            lasted = time.monotonic() - self._ready_since if self._ready_since else 0.0
            if self.state == "closed":
                return
            deaths, delay = (1, self._first_delay) if lasted > STEADY else (deaths + 1, delay)
            deaths -= passes and self._ready.is_set()  # no death
            if self._message or deaths > self._max_restarts or not self._ready.is_set():
                message = self._message or f"{self.what} {ended}"
                self.state = "failed"
                self._ready.set()
                log.error("no engine: %s", message)
                self._on_failure(message)
                return
            log.error("%s %s; starting it again in %.1f s", self.what, ended, delay)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay)
                return
            delay = min(2 * delay, LAST_DELAY)
            self.num_restarts += 1
