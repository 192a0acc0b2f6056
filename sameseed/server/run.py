"""Runs the server on one port or UNIX socket until told to stop.

SIGTERM, SIGINT and SIGQUIT drain it; a second one ends it at once. SIGHUP reads keys and certificates again. No other
signal that a person or a log rotation may send ends it. Only SIGTERM and SIGKILL reach the programs that it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import shlex
import signal
import socket
import stat
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sameseed.errors import ConfigError
from sameseed.server.app import create_app
from sameseed.server.client import EngineClient
from sameseed.server.config import ServerConfig
from sameseed.server.connection import Patient
from sameseed.server.errors import unavailable
from sameseed.server.gate import Gate
from sameseed.server.process import Supervised

log = logging.getLogger("sameseed.server")
KEEP_ALIVE = 75  # seconds that an idle connection stays open, long enough for clients that pool connections
BACKLOG = 2048  # connections that may wait to be accepted
AT_ONCE = 32  # connections accepted in one go, before any is counted; they use the reserved file descriptors
LAST_WORDS = 2.0  # seconds to send error events after a drain has timed out
EXIT_ENGINE = 1
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)  # SIGQUIT by default leaves a core file with users' texts
PASSED_OVER = (signal.SIGUSR1, signal.SIGUSR2)  # log rotations send them to reopen log files


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would stop listening at once and drop new requests."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set it to AT_ONCE

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def serve(model: str, settings: Mapping[str, Any], config: ServerConfig) -> int:
    """Serve `model` with an engine of these settings (as `make_config` takes them); returns the exit code.

    0 after a requested stop, 1 after the engine has failed for good. Raises ConfigError if the address is taken, or if
    the engine was never ready, e.g. because of bad settings or a bad model.
    """
    client = EngineClient(model, settings)
    app, service = create_app(client, config)
    return asyncio.run(Runner(client, app, service.gate, config).run())


class Runner:
    """Runs a server until a stop is requested or the engine has failed for good."""

    def __init__(self, client: Supervised, app: ASGIApp, gate: Gate, config: ServerConfig) -> None:
        self._config, self._client, self._gate = config, client, gate
        self._failure: str | None = None
        self._served = False
        self._drain: asyncio.Task[None] | None = None
        client.on_failure = self._failed
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
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )

    async def run(self) -> int:
        config, loop = self._config, asyncio.get_running_loop()
        listener = bind(config.host, config.port) if config.uds is None else bind_unix(config.uds)
        inode = None if config.uds is None else config.uds.stat().st_ino
        self._server.config.load()
        heeded: dict[signal.Signals, Callable[[], None]] = dict.fromkeys(STOPPING, self.stop)
        # A closed terminal sends SIGHUP, too: the server goes on, as it does under nohup.
        heeded |= {signal.SIGHUP: self.reload, **dict.fromkeys(PASSED_OVER, lambda: None)}
        for number, heed in heeded.items():
            loop.add_signal_handler(number, heed)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if its parent ignores it, no child could be waited for
        watch = loop.create_task(self._announce(listener))
        try:
            await self._server.serve([listener])
        finally:
            watch.cancel()
            for number in heeded:
                loop.remove_signal_handler(number)
            with contextlib.suppress(OSError):  # removed already
                if config.uds is not None and config.uds.stat().st_ino == inode:  # not a later server's
                    config.uds.unlink()
        if self._failure is not None and not self._served:
            raise ConfigError(self._failure)
        return EXIT_ENGINE if self._failure is not None else 0

    async def _announce(self, listener: socket.socket) -> None:
        told = {"url": url_of(self._config, listener), "model": self._config.model_name}
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

    def stop(self) -> None:
        """Drain the server; if it is being drained, end it at once."""
        if self._drain is None:  # the first signal drains, the next one ends at once
            self._drain = asyncio.get_running_loop().create_task(self._leave())
        else:
            self._server.should_exit = True

    def reload(self) -> None:
        """Read API keys and certificates again (SIGHUP)."""
        config = self._config
        try:
            config.keys.reload()
            self._gate.num_tenants = len(config.keys)
            if config.tls() is not None and config.ssl_certfile is not None:  # the pair is good
                assert self._server.config.ssl is not None
                self._server.config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except (ConfigError, OSError) as error:
            log.error("SIGHUP: %s; the API keys and certificates in use stay", error)
        else:
            log.info("reloaded", extra={"keys": len(config.keys)})

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
    path, http = url.removeprefix("unix:"), "http://localhost" if url.startswith("unix:") else url
    curl = f"curl {f'--unix-socket {shlex.quote(path)} ' if path != url else ''}{http}/v1/chat/completions {key}"
    curl += f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    how = "speculation off (no --draft)" if drafter == "none" else f"drafter: {drafter}"
    pages = "" if path != url else f"  page  {url}/\n"
    return f"ready: {model}, {how}\n\n{pages}  try   {curl}\n\nCtrl-C ends it."


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """What clients connect to: a URL, or unix:PATH."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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


def bind_unix(path: Path) -> socket.socket:
    """A listening UNIX socket, for this user alone. It replaces one whose server has died.

    Raises ConfigError if another server listens there, or if the path is of something else.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.exists() or path.is_symlink():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"--uds {path} is not a socket and stays as it is; choose another path")
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
                    raise ConfigError(f"another server listens on {path}; end it, or choose another --uds")
            log.warning("%s was left by a server that has died; it is replaced", path)
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)  # before it listens: until then nobody can connect
        listener.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path} ({error.strerror or error}); choose another --uds") from None
    return listener
