"""VllmClient: vLLM in a process of its own, in place of foretoken's engine. Starts it, watches it, starts it anew.

It listens on a unix socket in a folder that only this user may enter, with a key made for it; nobody else gets either.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any, Protocol

from foretoken.errors import ConfigError
from foretoken.server.client import FIRST_DELAY, LAST_DELAY, STEADY
from foretoken.server.errors import ApiError, unavailable
from foretoken.server.link import Link
from foretoken.server.process import SECRETS

log = logging.getLogger("foretoken.server")
START = Path(__file__).with_name("vllm_start.py")
POLL = 0.1  # seconds between looks at the process
LOADING, READY = 0.5, 2.0  # seconds between questions whether it is well
PATIENCE = 10.0  # seconds for the answer
EXIT_START = 127  # as a shell says it
CLOSING = 15.0  # seconds for vLLM to leave by itself
LOADS = 1800.0  # seconds for it to become ready


class Ending(Protocol):
    """A request on its way through vLLM."""

    def leave(self, error: ApiError) -> None:
        """End it with this error."""


class VllmClient:
    """Runs one vLLM. `state`: loading, ready, down (starting anew), failed, closed."""

    def __init__(
        self,
        arguments: Seq[str],
        facts: Mapping[str, Any],
        *,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        beat_timeout: float = 60.0,
        load_timeout: float = LOADS,
        max_restarts: int = 5,
        on_failure: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`arguments` as `export.vllm.arguments` makes them. `facts`: max_num_seqs, method. `python`: whose vLLM.

        `beat_timeout`: seconds without an answer after which it is ended; `load_timeout`: seconds until it is ready.
        Raises ConfigError where there is no vLLM.
        """
        if python is None and importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "--engine vllm needs vLLM; install it: pip install 'foretoken[vllm]', or name the python of an "
                "environment that has it with --vllm-python"
            )
        program = sys.executable if python is None else shutil.which(python)
        if program is None:
            raise ConfigError(f"--vllm-python {python} is no program; give the python of an environment that has vLLM")
        self.state = "loading"
        self.facts: dict[str, Any] = dict(facts)
        self.link: Link | None = None
        self.num_restarts = 0
        self.pid: int | None = None
        self._command = [program, str(START)]
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self._beat_timeout, self._load_timeout = beat_timeout, load_timeout
        self._max_restarts, self._on_failure = max_restarts, on_failure
        self._open: set[Ending] = set()
        self._ready = asyncio.Event()
        self._closing = asyncio.Event()
        self._ready_since = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start vLLM and keep one running, from now on."""
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    async def wait_ready(self) -> None:
        """Until vLLM is loaded. Raises ApiError 503 if it will not be."""
        await self._ready.wait()
        self.check()

    def check(self) -> Link:
        """The way to vLLM. Raises ApiError 503 where there is none."""
        if self.state != "ready" or self.link is None:
            why = {"loading": "the model is being loaded", "down": "the engine is being started again"}
            raise unavailable(why.get(self.state, "the engine has stopped") + "; try again later")
        return self.link

    def enter(self, request: Ending) -> None:
        """A request that is to be told when vLLM goes."""
        self._open.add(request)

    def forget(self, request: Ending) -> None:
        """It is done."""
        self._open.discard(request)

    def end_all(self, error: ApiError) -> None:
        """End every request with this error."""
        for request in list(self._open):
            request.leave(error)

    async def close(self) -> None:
        """End vLLM; open requests end with an error."""
        self.state = "closed"
        self._closing.set()
        self.end_all(unavailable("the server is shutting down"))
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _supervise(self) -> None:
        """One process after the other."""
        deaths, delay = 0, FIRST_DELAY
        while self.state != "closed":
            self._ready_since = 0.0
            try:
                code = await self._run_once()
            except OSError as error:  # the program has gone, or there is no room for a socket
                log.error("vLLM cannot be started: %s", error.strerror)
                code = EXIT_START
            loaded, lasted = self._ready_since > 0, time.monotonic() - self._ready_since
            if self.state == "closed":
                return
            deaths, delay = (1, FIRST_DELAY) if loaded and lasted > STEADY else (deaths + 1, delay)
            if deaths > self._max_restarts or not (loaded or self.num_restarts):
                self.state = "failed"
                self._ready.set()
                message = f"vLLM ended with code {code}; what it wrote above says why"
                log.error(message)
                self._on_failure(message)
                return
            log.error("vLLM ended with code %s; starting it again in %.1f s", code, delay)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay)
                return
            delay = min(2 * delay, LAST_DELAY)
            self.num_restarts += 1

    async def _run_once(self) -> int:
        """Start a process, watch it until it ends; returns its exit code."""
        folder = tempfile.mkdtemp(prefix="foretoken-")  # for this user alone
        key = secrets.token_urlsafe(32)
        path = os.path.join(folder, "socket")
        try:
            pid, leash = self._spawn(path, key)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.pid, self.link = pid, Link(path, key)
        try:
            code = await self._mind(pid, self.link)
        finally:
            if self.state not in ("closed", "failed"):
                self.state = "down" if self._ready_since else "loading"
            self.end_all(unavailable("the engine stopped while this request ran; send it again"))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what it left behind
            os.close(leash)
            link, self.link = self.link, None
            await link.close()
            shutil.rmtree(folder, ignore_errors=True)
        return code

    async def _mind(self, pid: int, link: Link) -> int:
        """Until the process has ended, by itself or because it is no longer well."""
        heard = asked = started = time.monotonic()
        question: asyncio.Task[bool | None] | None = None
        stop_at: float | None = None
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                if question is not None:
                    question.cancel()
                return os.waitstatus_to_exitcode(status)
            now = time.monotonic()
            if self.state == "closed" and stop_at is None:
                os.kill(pid, signal.SIGTERM)
                stop_at = now + CLOSING
            if question is not None and question.done():
                well, question = question.result(), None
                heard = now if well else heard
                if well and self.state in ("loading", "down"):
                    await self._arrive(link)
                elif self.state == "ready" and (well is False or now - heard > self._beat_timeout):
                    log.error("vLLM is not well; it is ended")
                    stop_at = now
            elif question is None and now - asked > (READY if self.state == "ready" else LOADING):
                asked, question = now, asyncio.get_running_loop().create_task(link.healthy(PATIENCE))
            if stop_at is None and self.state in ("loading", "down") and now - started > self._load_timeout:
                log.error("vLLM was not ready within %g s; it is ended (--load-timeout gives more)", self._load_timeout)
                stop_at = now
            if stop_at is not None and now >= stop_at:
                os.killpg(pid, signal.SIGKILL)
                stop_at = float("inf")
            await asyncio.sleep(POLL)

    async def _arrive(self, link: Link) -> None:
        """vLLM answers: what it says of itself, and from now on it is asked."""
        with contextlib.suppress(ApiError, ValueError, KeyError, IndexError):
            models = json.loads(await link.get("/v1/models"))
            self.facts["max_model_len"] = models["data"][0]["max_model_len"]
            self.facts["version"] = json.loads(await link.get("/version"))["version"]
        if self.state != "closed":
            self.state, self._ready_since = "ready", time.monotonic()
            self._ready.set()

    def _spawn(self, path: str, key: str) -> tuple[int, int]:
        """Start vLLM in a process group of its own; returns its id and our end of its leash."""
        theirs, ours = os.pipe()
        os.set_inheritable(theirs, True)
        environment = {k: v for k, v in os.environ.items() if k not in SECRETS}
        environment = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", **environment, **self._environment}
        environment["VLLM_API_KEY"] = key  # not among the arguments, where `ps` would show it
        command = [*self._command, str(theirs), *self._arguments, "--uvicorn-log-level", "warning", "--uds", path]
        to_stderr = [(os.POSIX_SPAWN_DUP2, 2, 1)]
        try:
            return os.posix_spawn(command[0], command, environment, file_actions=to_stderr, setpgroup=0), ours
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
