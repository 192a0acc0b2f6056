"""Child processes of the server: started only here, by a fixed command, at one end of a socket pair; kept running."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from sameseed.server.errors import ApiError, unavailable

log = logging.getLogger("sameseed.server")
SECRETS = ("SAMESEED_API_KEY",)  # variables of the server that child processes do not get
# Environment variables for helper processes: what Python needs to start, and how texts are encoded. Helpers run
# templates and grammars of third parties, which must not see e.g. a hub token.
PLAIN = ("PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TMPDIR", "TZ", "LANG")
# Signals that a terminal or an operator sends to all processes of the server at once. They are for the server alone:
# child processes end when their socket closes.
SERVERS_OWN = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
PLAIN_PREFIXES = ("LC_", "LD_", "OMP_", "OPENBLAS_", "MKL_", "COVERAGE_", "COV_CORE_")


def spawn(program: Literal["worker", "aside"]) -> tuple[int, socket.socket]:
    """Start a worker or a helper; returns its process id and our end of the socket.

    A helper gets only the variables named above, a worker all but SECRETS. (multiprocessing's spawn passes on all.)
    """
    ours, theirs = socket.socketpair()
    with theirs:
        os.set_inheritable(theirs.fileno(), True)
        known = {k: v for k, v in os.environ.items() if k in PLAIN or k.startswith(PLAIN_PREFIXES)}
        environment = {k: v for k, v in (os.environ if program == "worker" else known).items() if k not in SECRETS}
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        safe = ["-P"] if sys.version_info >= (3, 11) else []  # nothing is imported from the working directory
        command = [sys.executable, *safe, "-m", f"sameseed.server.{program}", str(theirs.fileno())]
        try:
            pid = os.posix_spawn(sys.executable, command, environment, setsigmask=SERVERS_OWN)
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    return pid, ours


async def end(pid: int, patience: float) -> int:
    """Wait `patience` seconds for a process to end by itself, then kill it; returns its exit code."""
    until = time.monotonic() + patience
    try:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                until = float("inf")
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:  # the server itself ends, and leaves no process behind
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


FIRST_DELAY, LAST_DELAY = 0.1, 30.0  # seconds before a restart, doubled each time
STEADY = 60.0  # seconds of service after which earlier deaths no longer count
PASSING = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)  # a temporary lack of descriptors, processes, memory


class NotStartedError(Exception):
    """The process could not be started. `passes`: for a temporary lack of resources."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.passes = error.errno in PASSING


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around the start of a process: raises NotStartedError in place of OSError."""
    try:
        yield
    except OSError as error:
        raise NotStartedError(error) from error


class Supervised:
    """Base class that keeps one process running. `state`: loading, ready, down (restarting), failed or closed."""

    what, remedy = "the process", ""  # for messages: its name, and a hint after the exit code

    def __init__(self, max_restarts: int, first_delay: float) -> None:
        """The process is given up after more than `max_restarts` deaths in a row, or a first start that fails.

        `first_delay`: seconds before the first restart.
        """
        self.state = "loading"
        self.facts: dict[str, Any] = {}  # of the engine that runs
        self.num_restarts = 0
        self.pid: int | None = None
        self.on_failure: Callable[[str], None] = lambda message: None  # gets the reason when it is given up
        self._max_restarts, self._first_delay = max_restarts, first_delay
        self._ready = asyncio.Event()  # set once the process has been ready, or never will be
        self._ready_since = 0.0
        self._closing = asyncio.Event()
        self._message = ""  # if set: why a restart is useless
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    def end_all(self, error: ApiError) -> None:
        raise NotImplementedError

    async def close(self) -> None:
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
            why = {"loading": "the model is being loaded", "down": "the engine is being started again"}
            raise unavailable(why.get(self.state, "the engine has stopped") + "; try again later")

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
                self._stopped()
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
                self.on_failure(message)
                return
            log.error("%s %s; starting it again in %.1f s", self.what, ended, delay)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay)
                return
            delay = min(2 * delay, LAST_DELAY)
            self.num_restarts += 1
