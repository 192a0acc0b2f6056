"""Grammars: compiled in a helper process, cached up to a number of bytes. Refusals are cached too."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from sameseed.server import frames
from sameseed.server.errors import ApiError, bad_request, unavailable
from sameseed.server.helper import Helper, HelperDiedError
from sameseed.server.structured import GrammarSource

MAX_BYTES = 64 * 2**20  # of compiled grammars
MAX_REFUSALS = 256


class Compiled(NamedTuple):
    """A compiled grammar: its key, and the frame that loads it into the engine."""

    key: str
    frame: bytes


class Grammars:
    """An LRU cache of grammars. `on_forget` gets the key of a dropped one; `on_need` is called before compiling one."""

    def __init__(
        self,
        helper: Helper,
        on_forget: Callable[[str], None],
        on_need: Callable[[], None] = lambda: None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._helper, self._on_forget, self._on_need, self._max_bytes = helper, on_forget, on_need, max_bytes
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._coming: dict[str, asyncio.Task[bytes]] = {}  # by key: one task for all requests that wait for it
        self.num_bytes = 0

    async def compiled(self, source: GrammarSource) -> Compiled:
        """The compiled grammar of a source.

        Raises ApiError: 400 for a grammar that is invalid, or takes too much to compile; 503 if too many wait, or if
        compiling was stopped from outside.
        """
        key = source.key
        if (message := self._refused.get(key)) is not None:
            raise bad_request(message, source.field)
        data = self._known.get(key)
        if data is None:
            task = self._coming.get(key)
            if task is None:
                self._on_need()
                task = self._coming[key] = asyncio.get_running_loop().create_task(self._compile(source, key))
                task.add_done_callback(lambda done: self._coming.pop(key))
            try:
                data = await asyncio.shield(task)  # goes on even if the request that began it is cancelled
            except ApiError as error:
                raise (bad_request(error.message, source.field) if error.status == 400 else error) from None
        else:
            self._known.move_to_end(key)
        return Compiled(key, data)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    async def _compile(self, source: GrammarSource, key: str) -> bytes:
        try:
            text = await self._helper.ask(frames.Compile(source.kind, source.text), source.field, len(source.text))
        except HelperDiedError:  # perhaps because of the machine: a retry may succeed
            raise unavailable("the grammar could not be compiled in time; try again later, or simplify it") from None
        except ApiError as error:
            if error.status == 400:
                self._refused[key] = error.message
                if len(self._refused) > MAX_REFUSALS:
                    self._refused.popitem(last=False)
            raise
        data = self._known[key] = frames.pack(frames.LoadGrammar(key, text))
        self.num_bytes += len(data)
        while self.num_bytes > self._max_bytes and len(self._known) > 1:
            old, forgotten = self._known.popitem(last=False)
            self.num_bytes -= len(forgotten)
            self._on_forget(old)
        return data
