"""VllmClient: vLLM in a separate process, in place of sameseed's engine. Starts, watches and restarts the process.

vLLM listens on a unix socket in a folder that only this user may enter, and requires a random key. Neither is given to
anyone else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from sameseed.server.answer import Answering
from sameseed.server.errors import ApiError, unavailable
from sameseed.server.process import FIRST_DELAY, SECRETS, Supervised, end, starting
from sameseed_vllm.environments import interpreter
from sameseed_vllm.link import STOPPED, Link, Response

log = logging.getLogger("sameseed.server")
START = Path(__file__).with_name("vllm_start.py")
POLL = 0.1  # seconds between checks of the process
LOADING, READY = 0.5, 2.0  # seconds between health checks
PATIENCE, PAGE = 10.0, 5.0  # seconds for the answer to a health check, and for a page of metrics
CLOSING = 15.0  # seconds for vLLM to end by itself


class VllmClient(Supervised):
    """Runs one vLLM."""

    what, remedy = "vLLM", "; what it wrote above says why"

    def __init__(
        self,
        arguments: Seq[str],
        facts: Mapping[str, Any],  # max_num_seqs, method, greedy_only
        *,
        python: str | None = None,  # the interpreter that runs vLLM
        environment: Mapping[str, str] | None = None,
        beat_timeout: float = 60.0,  # seconds without a healthy answer
        load_timeout: float = 1800.0,  # seconds until it is ready
        max_restarts: int = 5,
        first_delay: float = FIRST_DELAY,
    ) -> None:
        """`arguments`: of `flags.arguments`. vLLM is killed after either timeout. Raises ConfigError without a vLLM."""
        program = interpreter(python)
        super().__init__(max_restarts, first_delay)
        self.facts = dict(facts)
        self.link: Link | None = None
        self._command = [program, str(START)]
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self._beat_timeout, self._load_timeout = beat_timeout, load_timeout
        self._open: set[Answering] = set()  # requests to end with an error when vLLM ends

    @contextlib.asynccontextmanager
    async def post(self, request: Answering, path: str, body: bytes) -> AsyncIterator[Response]:
        """Send a request; yields the answer. Leaving early ends it, and so does vLLM's end: ApiError 503."""
        self.check_ready()
        assert self.link is not None
        self._open.add(request)
        try:
            async with self.link.post(path, body) as response:
                yield response
        finally:
            self._open.discard(request)

    async def page(self, path: str) -> bytes:
        """A page of vLLM; empty while it has none to give."""
        if self.link is None or self.state != "ready":
            return b""
        status, page = await self.link.get(path, PAGE)
        return page if status == 200 else b""

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

    async def _run_once(self) -> int:
        key = secrets.token_urlsafe(32)
        with starting(), contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="sameseed-")  # for this user alone
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            path = os.path.join(folder, "socket")
            pid, leash = self._spawn(path, key)
            cleaning = stack.pop_all()
        self.pid, self.link = pid, Link(path, key)
        try:
            code = await self._mind(pid, self.link)
        finally:
            self._stopped()
            self.end_all(unavailable(STOPPED))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # its child processes
            with contextlib.suppress(ChildProcessError):  # it has been waited for, unless something went wrong
                await end(pid, 0.0)
            os.close(leash)
            cleaning.close()
            link, self.link = self.link, None
            await link.close()
        return code

    async def _mind(self, pid: int, link: Link) -> int:
        """Watch the process until its end, and kill it if it is late or not well; returns its exit code."""
        heard = asked = started = time.monotonic()
        question: asyncio.Task[tuple[int, bytes]] | None = None
        stop_at: float | None = None
        said = 0  # the status of the last answer to /health
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
                (status, _), question = question.result(), None
                said = status or said
                heard = now if status == 200 else heard
                if status == 200 and self.state in ("loading", "down"):
                    with contextlib.suppress(ValueError, LookupError, TypeError):
                        models = json.loads((await link.get("/v1/models"))[1])
                        self.facts["max_model_len"] = models["data"][0]["max_model_len"]
                        self.facts["version"] = json.loads((await link.get("/version"))[1])["version"]
                    if self.state != "closed":
                        self._serves()
                elif self.state == "ready" and (status not in (0, 200) or now - heard > self._beat_timeout):
                    log.error("%s is not well; it is ended", self.what)
                    stop_at = now
            elif question is None and now - asked > (READY if self.state == "ready" else LOADING):
                asked, question = now, asyncio.create_task(link.get("/health", PATIENCE))
            if stop_at is None and self.state in ("loading", "down") and now - started > self._load_timeout:
                late = "%s was not ready within %g s%s; it is ended (--load-timeout gives more)"
                answered = f", and answered /health with {said}: is it vLLM?" if said not in (0, 503) else ""
                log.error(late, self.what, self._load_timeout, answered)
                stop_at = now
            if stop_at is not None and now >= stop_at:
                os.killpg(pid, signal.SIGKILL)
                stop_at = float("inf")
            await asyncio.sleep(POLL)

    def _spawn(self, path: str, key: str) -> tuple[int, int]:
        """Start vLLM in a process group of its own. Returns its id, and our end of a pipe; vLLM ends if that closes."""
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
