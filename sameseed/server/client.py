"""EngineClient: starts the engine's process, exchanges frames with it, and restarts it when it has died.

Every stream ends, with its completion or, if the engine dies, at once with an error. So no reader waits for a dead
process. A process that sends no more heartbeats is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cached_property
from typing import Any

import msgspec

import sameseed
from sameseed.server import frames, limits, process
from sameseed.server.errors import ApiError, bad_request, internal, unavailable
from sameseed.server.frames import Add, Piece
from sameseed.server.helper import ENDED, Grammars, Helper, HelperDiedError
from sameseed.server.text import INLINE, TextCodec

log = logging.getLogger("sameseed.server")
PATIENCE = 6.0  # seconds for a helper's job of about one second of CPU time: other processes compute too
MAX_RENDERING = 2048  # conversations that may wait to be rendered: more than the gate admits by default
MAX_COMPILING = 16  # grammars that may wait for the compiler
CLOSING = 6.0  # seconds for the process to end by itself


class EngineClient(process.Supervised):
    """Runs one engine in a separate process."""

    what = "the engine's process"

    def __init__(
        self,
        model: str,
        settings: Mapping[str, Any],
        *,
        beat_timeout: float = 30.0,
        step_timeout: float = 600.0,
        max_restarts: int = 5,
        first_delay: float = process.FIRST_DELAY,
        spawn: Callable[[], tuple[int, socket.socket]] = lambda: process.spawn("worker"),
    ) -> None:
        """`settings` as `make_config` takes them; `spawn` starts the process; for restarts see `Supervised`.

        The process is killed after `beat_timeout` seconds without a frame, or `step_timeout` seconds in one step.
        """
        super().__init__(max_restarts, first_delay)
        self._spawn = spawn
        self.text: TextCodec | None = None
        self.stats: dict[str, Any] = {}
        self.past_stats: list[dict[str, Any]] = []  # last counters of engines that have died
        others = {k: v for k, v in settings.items() if k != "draft"}
        self._load = frames.Load(model, settings.get("draft"), others)
        self._beat_timeout, self._step_timeout = beat_timeout, step_timeout
        self._streams: dict[str, Stream] = {}
        self._templates = Helper(lambda: self._setup(grammars=False), PATIENCE, MAX_RENDERING)
        self._compiler = Helper(lambda: self._setup(grammars=True), 2 * PATIENCE, MAX_COMPILING)
        self.grammars = Grammars(self._compiler, self._forget_grammar, lambda: self._send(frames.Prepare()))
        self._sent: set[str] = set()  # keys of the grammars that the engine has
        self._writer: asyncio.StreamWriter | None = None
        self._over = False  # are all new requests refused?
        self._heard = 0.0

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: a hash of version, model and settings. If it changes, texts may change."""
        facts = {k: v for k, v in self.facts.items() if k != "tokenizer"}
        told = json.dumps([sameseed.__version__, self._load.model, self._load.settings, facts], default=str)
        return "fp_" + hashlib.sha256(told.encode()).hexdigest()[:12]

    async def submit(self, add: Add, grammar: bytes = b"") -> Stream:
        """Send a request to the engine; returns the stream of its output.

        `grammar`: the frame of the grammar that the request names. Raises ApiError 503 if there is no engine, or after
        `end_all`.
        """
        data = await limits.away(sum(map(len, add.prompts)) > INLINE, lambda: frames.pack(add), None)
        if self._over:
            raise unavailable(ENDED)
        self.check_ready()
        if add.grammar is not None and add.grammar not in self._sent:  # sent once to each engine process
            self._sent.add(add.grammar)
            self._write(grammar)
        self._write(data)
        stream = self._streams[add.id] = Stream(add, self.forget)
        if add.grammar is not None and add.grammar not in self.grammars:
            self._forget_grammar(add.grammar)
        return stream

    def _forget_grammar(self, key: str) -> None:
        if key in self._sent:
            self._sent.discard(key)
            self._send(frames.Forget(key))

    def forget(self, request_id: str) -> None:
        """Tell the engine to abort a request, unless its stream has ended."""
        if self._streams.pop(request_id, None) is not None:
            self._send(frames.Abort(request_id))

    def end_all(self, error: ApiError) -> None:
        """End every stream with this error; refuse requests in preparation, and all later ones."""
        self._over = True
        self._templates.refuse()
        self._compiler.refuse()
        self._end_streams(error)

    def _end_streams(self, error: ApiError) -> None:
        for stream in list(self._streams.values()):
            stream.leave(error)

    async def close(self) -> None:
        self.state = "closed"
        self.end_all(unavailable("the server is shutting down"))
        if self._writer is not None:
            self._writer.close()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._templates.close()
        await self._compiler.close()

    async def render(self, content: frames.Render) -> str:
        """Render a conversation with the chat template. Raises ApiError 400, 503."""
        try:
            return await self._templates.ask(frames.Job("template", json.dumps(content)), "messages")
        except HelperDiedError as error:
            if not error.spent:  # its CPU time was not used up: the machine may be at fault
                raise unavailable("the messages could not be prepared in time; try again later") from None
            raise bad_request("the chat template takes too long on these messages; shorten them", "messages") from None

    def _setup(self, grammars: bool) -> frames.Setup:
        known = {name: self.facts[name] for name in ("tokenizer", "vocab_size", "eos_token_ids")}
        return frames.Setup(grammars, **known)

    def _send(self, frame: frames.Frame) -> None:
        self._write(frames.pack(frame))

    def _write(self, data: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(data)

    async def _run_once(self) -> int:
        with process.starting():
            pid, ours = self._spawn()
        self.pid = pid
        self._sent.clear()
        try:
            await self._listen(pid, ours)
        finally:
            self._end_streams(unavailable("the engine stopped while this request ran; send it again"))
            code = await process.end(pid, 0.2 if self.state != "closed" else CLOSING)
            if self.stats:
                self.past_stats.append({**self.stats, "running": 0, "waiting": 0})
                self.stats = {}
        return code

    async def _listen(self, pid: int, ours: socket.socket) -> None:
        try:
            with process.starting():
                reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        unpacker: frames.Unpacker[frames.FromEngine] = frames.Unpacker(frames.FromEngine)
        self._writer, self._heard = writer, time.monotonic()
        self._send(self._load)
        watchdog = asyncio.get_running_loop().create_task(self._watch(pid))
        try:
            while True:
                try:
                    frame = await unpacker.next(reader)
                except (OSError, asyncio.IncompleteReadError):
                    break  # the process has ended
                self._receive(pid, frame)
        except Exception:  # malformed frames: to stop listening ends the process
            log.exception("the engine's frames cannot be read")
        finally:
            self._stopped()
            watchdog.cancel()
            writer.close()
            self._writer = None

    def _receive(self, pid: int, frame: frames.FromEngine) -> None:
        self._heard = time.monotonic()
        if isinstance(frame, frames.Deltas):
            for request_id, piece in frame.items:
                if (stream := self._streams.get(request_id)) is None:  # its reader has left
                    continue
                stream.push(piece)
                if piece.completion is not None and piece.completion.finish_reason == "error":
                    self.forget(request_id)
                elif not stream.num_open:
                    del self._streams[request_id]
            self.stats = frame.stats or self.stats
            if frame.step_seconds > self._step_timeout:
                log.error("a step of the engine takes %.0f s; its process is ended", frame.step_seconds)
                os.kill(pid, signal.SIGKILL)
        elif isinstance(frame, frames.EngineReady):
            self.facts = msgspec.structs.asdict(frame)
            if self.text is None:
                self.text = TextCodec(frame.tokenizer, frame.vocab_size, frame.max_model_len, self.render)
            self._serves()
        elif isinstance(frame, frames.Refused):
            if (stream := self._streams.pop(frame.id, None)) is not None:
                stream.push((internal if frame.inside else bad_request)(frame.message))
        else:
            self._message = frame.message

    async def _watch(self, pid: int) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(1.0)
            now = time.monotonic()
            if now - before > 2.0:  # this process itself was suspended
                self._heard = now
            elif now - self._heard > self._beat_timeout:
                log.error("the engine's process has not been heard of for %.0f s; it is ended", now - self._heard)
                os.kill(pid, signal.SIGKILL)
                return


class Stream:
    """The pieces of one request, in the order in which they were generated."""

    def __init__(self, add: Add, forget: Callable[[str], None]) -> None:
        self.id = add.id
        self._forget = forget
        self.num_open = len(add.prompts) * add.params.n  # sequences that the engine has not completed
        self._queue: asyncio.Queue[Piece | ApiError | None] = asyncio.Queue()

    def push(self, piece: Piece | ApiError | None) -> None:
        """Add a piece, or the error that ends the stream, or None if the reader has left."""
        self._queue.put_nowait(piece)
        if isinstance(piece, Piece) and piece.completion is not None:
            self.num_open -= 1
            if not self.num_open:
                self._queue.put_nowait(None)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields all pieces up to the last completion. Raises ApiError; ends early if `leave` is called meanwhile."""
        while (piece := await self._queue.get()) is not None:
            if isinstance(piece, ApiError):
                raise piece
            if piece.completion is not None and piece.completion.finish_reason == "error":
                raise (bad_request if piece.completion.ruled_out else internal)(piece.completion.error)
            yield piece

    def leave(self, error: ApiError | None = None) -> None:
        """End the stream, because the reader has left or must get this error. The engine stops within a step."""
        self._forget(self.id)
        self.push(error)
