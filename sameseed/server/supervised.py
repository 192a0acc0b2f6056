"""Supervised: keeps a process running. A process that has died is restarted, until that is useless."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol

from sameseed.server.errors import ApiError, unavailable

log = logging.getLogger("sameseed.server")
FIRST_DELAY, LAST_DELAY = 0.1, 30.0  # seconds before a restart, doubled each time
STEADY = 60.0  # seconds of service after which earlier deaths no longer count
PASSING = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # a temporary lack of descriptors, processes, memory


class Backend(Protocol):
    """What answers the server's requests, as the server sees it. `state`: as of Supervised; `told`: for /health."""

    @property
    def state(self) -> str: ...
    @property
    def told(self) -> Mapping[str, Any]: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    async def wait_ready(self) -> None: ...
    def check_ready(self) -> None: ...
    def end_all(self, error: ApiError) -> None: ...


class NotStartedError(Exception):
    """The process could not be started. `passes`: for a temporary lack of resources."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.passes = error.errno in PASSING


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Context for starting a process. Raises NotStartedError in place of OSError."""
    try:
        yield
    except OSError as error:
        raise NotStartedError(error) from error


def not_ready(state: str) -> ApiError:
    """The error 503 that says why the engine is not ready, given its state."""
    why = {"loading": "the model is being loaded", "down": "the engine is being started again"}
    return unavailable(why.get(state, "the engine has stopped") + "; try again later")


class Supervised:
    """Base class that keeps one process running. `state`: loading, ready, down (restarting), failed or closed."""

    what, remedy = "the process", ""  # for messages: its name, and a hint after the exit code

    def __init__(self, max_restarts: int, on_failure: Callable[[str], None], first_delay: float = FIRST_DELAY) -> None:
        """`on_failure` gets the reason when the process is given up: after more than `max_restarts` deaths in a row, or
        a first start that fails. `first_delay`: seconds before the first restart.
        """
        self.state = "loading"
        self.num_restarts = 0
        self.pid: int | None = None
        self._max_restarts, self._on_failure = max_restarts, on_failure
        self._first_delay = first_delay
        self._ready = asyncio.Event()  # set once the process has been ready, or never will be
        self._ready_since = 0.0
        self._closing = asyncio.Event()
        self._message = ""  # if set: why a restart is useless
        self._task: asyncio.Task[None] | None = None

    @property
    def told(self) -> dict[str, Any]:
        """The fields of /health."""
        return {"engine": self.state}

    def start(self) -> None:
        """Start the process, and keep one running from now on."""
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    async def close(self) -> None:
        """End the process; open requests end with an error."""
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def living(self, app: Any) -> AsyncIterator[None]:
        """The application's lifespan: starts the process, and ends it at its end."""
        self.start()
        yield
        await self.close()

    async def wait_ready(self) -> None:
        """Wait until the process is ready. Raises ApiError 503 if it never will be."""
        await self._ready.wait()
        self.check_ready()

    def check_ready(self) -> None:
        """Raise ApiError 503 if the process is not ready."""
        if self.state != "ready":
            raise not_ready(self.state)

    async def _run_once(self) -> int:
        """Start a process and wait for its end; returns its exit code. Whatever it raises, no process is left.

        Raises NotStartedError (see `starting`) if the process could not be started.
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
            passes = False  # did it fail to start for a temporary lack of resources?
            try:
                ended = f"ended with code {await self._run_once()}{self.remedy}"
            except NotStartedError as error:
                ended, passes = f"could not be started: {error}", error.passes
            except Exception as error:  # in our code, or from what it sent: a new process may work
                log.exception("%s could not be seen through", self.what)
                self._stopped()
                ended = f"could not be seen through ({type(error).__name__})"
            lasted = time.monotonic() - self._ready_since if self._ready_since else 0.0
            if self.state == "closed":
                return
            deaths, delay = (1, self._first_delay) if lasted > STEADY else (deaths + 1, delay)
            deaths -= passes and self._ready.is_set()  # does not count as a death
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
