"""Runs the server on one port until told to stop. SIGTERM or Ctrl-C drains it; a second signal ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Generator, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp

from sameseed.errors import ConfigError
from sameseed.server import limits, logs
from sameseed.server.app import create_app
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.connection import Patient
from sameseed.server.errors import unavailable
from sameseed.server.gate import Gate

if TYPE_CHECKING:
    from sameseed.server.replicas import Replicas

log = logging.getLogger("sameseed.server")
KEEP_ALIVE = 75  # seconds that an idle connection stays open, long enough for clients that pool connections
BACKLOG = 2048  # connections that may wait to be accepted
AT_ONCE = 32  # connections accepted in one go, before any is counted; they use the reserved file descriptors
LAST_WORDS = 2.0  # seconds to send error events after a drain has timed out
EXIT_ENGINE = 1
OnFailure = Callable[[str], None]


class Served(NamedTuple):
    """The parts of a server. `renew`: starts a rolling restart on SIGHUP; None without several replicas."""

    client: EngineClient | Replicas
    app: ASGIApp
    gate: Gate
    renew: Callable[[], None] | None = None


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would stop listening at once and drop new requests."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set it to AT_ONCE

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def serve(model: str, settings: Mapping[str, Any], config: ServerConfig, log_level: str = "info") -> int:
    """Serve `model` with an engine of these settings (as `make_config` takes them); returns the exit code.

    0 after a requested stop, 1 after the engine has failed for good. Raises ConfigError if the address is taken, or if
    the engine was never ready, e.g. because of bad settings or a bad model.
    """
    logs.set_up(log_level)

    def own(on_failure: OnFailure) -> Served:
        client = EngineClient(model, settings, on_failure=on_failure)
        app, service = create_app(client, config)
        return Served(client, app, service.gate)

    return asyncio.run(Runner(own, config).run())


def serve_vllm(
    arguments: Seq[str],
    facts: Mapping[str, Any],
    config: ServerConfig,
    *,
    python: str | None = None,
    environments: Seq[Mapping[str, str]] = ({},),
    notes: Seq[str] = (),
    log_level: str = "info",
) -> int:
    """Serve with vLLM as the engine, otherwise as `serve`. For `arguments`, `facts` and `python` see `VllmClient`.

    `environments`: environment variables of each replica. `notes`: warnings to the operator, for the log.
    """
    logs.set_up(log_level)
    for note in notes:
        log.warning(note)
    try:
        from sameseed.server.proxy import create_proxy
        from sameseed.server.replicas import Replicas
        from sameseed.server.vllm import VllmClient
    except ImportError as error:
        raise ConfigError(f"--engine vllm needs {error.name}; install it: pip install '.[server]'") from None

    several = len(environments) > 1

    def one(number: int, on_failure: OnFailure) -> VllmClient:
        more: dict[str, Any] = {"load_timeout": config.load_timeout, "on_failure": on_failure}
        more["name"] = f"vLLM (replica {number})" if several else "vLLM"
        return VllmClient(arguments, facts, python=python, environment=environments[number], **more)

    def theirs(on_failure: OnFailure) -> Served:
        replicas = Replicas(one, len(environments), on_failure)
        return Served(replicas, *create_proxy(replicas, config), replicas.renew if several else None)

    return asyncio.run(Runner(theirs, config).run())


class Runner:
    """Runs a server until a stop is requested or the engine has failed for good."""

    def __init__(self, make: Callable[[OnFailure], Served], config: ServerConfig) -> None:
        """`make` builds the server's parts; its argument is the callback for an engine that has failed for good."""
        self._config = config
        self._failure: str | None = None
        self._served = False
        self._drain: asyncio.Task[None] | None = None
        self._client, app, self._gate, self._renew = make(self._failed)
        self._in_terminal = os.isatty(0)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Patient,
                loop="asyncio",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=2,
                backlog=AT_ONCE,
                h11_max_incomplete_event_size=limits.MAX_HEADERS,
            )
        )

    async def run(self) -> int:
        """Serve until the end; returns the exit code. Raises ConfigError if the engine failed before it was ready."""
        listener, loop = bind(self._config.host, self._config.port), asyncio.get_running_loop()
        heeded = {signal.SIGTERM: self._stop, signal.SIGINT: self._stop}
        heeded |= {} if self._renew is None else {signal.SIGHUP: self._hang_up}
        for number, heed in heeded.items():
            loop.add_signal_handler(number, heed)
        watch = loop.create_task(self._announce(listener))
        try:
            await self._server.serve([listener])
        finally:
            watch.cancel()
            for number in heeded:
                loop.remove_signal_handler(number)
        if self._failure is not None and not self._served:
            raise ConfigError(self._failure)
        return EXIT_ENGINE if self._failure is not None else 0

    async def _announce(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        told = {"url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"}
        told["model"] = self._config.model_name
        person = sys.stdout.isatty()
        if person:
            print(f"{told['model']} is being loaded; it will answer at {told['url']}", flush=True)
        else:
            log.info("listening", extra=told)
        with contextlib.suppress(Exception):
            await self._client.wait_ready()
            self._served = True
            told["drafter"] = str(self._client.facts["method"])
            if person:
                print(greeting(**told, locked=len(self._config.keys) > 0), flush=True)
            else:
                log.info("ready", extra=told)

    def _failed(self, message: str) -> None:
        self._failure = message
        self._server.should_exit = True

    def _stop(self) -> None:
        if self._drain is None:  # the first signal drains, the next one ends at once
            self._drain = asyncio.get_running_loop().create_task(self._leave())
        else:
            self._server.should_exit = True

    def _hang_up(self) -> None:
        """Handle SIGHUP: start a rolling restart, or stop if the signal came because the terminal was closed."""
        if self._drain is None and self._in_terminal and not os.isatty(0):
            self._stop()
        elif self._drain is None and self._renew is not None:
            self._renew()

    async def _leave(self) -> None:
        """Drain: refuse new requests, wait up to `drain_timeout` for running ones, then end these with an error."""
        gate, timeout = self._gate, self._config.drain_timeout
        gate.closed = "the server is shutting down; send the request elsewhere"
        log.info("draining", extra={"sequences": gate.num_inside, "timeout": timeout})
        try:
            await asyncio.wait_for(gate.empty.wait(), timeout)
        except asyncio.TimeoutError:
            self._client.end_all(unavailable("the server is shutting down, and this request was not finished"))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(gate.empty.wait(), LAST_WORDS)
        self._server.should_exit = True


def greeting(url: str, model: str, drafter: str, locked: bool) -> str:
    """The message for a terminal once the server is ready. `locked`: requests need an API key."""
    key = '-H "Authorization: Bearer $SAMESEED_API_KEY" ' if locked else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    curl = f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    how = "without guesses" if drafter == "none" else f"guesses by {drafter}"
    return f"ready: {model}, {how}\n\n  page  {url}/\n  docs  {url}/docs\n  try   {curl}\n\nCtrl-C ends it."


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address is taken, or is not this machine's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # clients that connect before the server is up wait
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot listen on {host} port {port} ({why}); choose another --port") from None
    return listener
