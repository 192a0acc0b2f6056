"""Stream: the output of one request for its reader: pieces as they are generated, and always an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from sameseed.server.errors import ApiError, bad_request, internal
from sameseed.server.frames import Add, Piece


class Stream:
    """The pieces of one request, in the order in which they were generated."""

    def __init__(self, request: Add, forget: Callable[[str], None]) -> None:
        """`forget` makes the engine abort a request, given its id."""
        self.id = request.id
        self._forget = forget
        self.num_open = len(request.prompts) * request.params.n  # sequences that the engine has not completed
        self._num_unread = self.num_open
        self._scores: dict[int, list[Any]] = {}
        self._queue: asyncio.Queue[Piece | ApiError | None] = asyncio.Queue()

    def hold(self, index: int, scores: list[Any]) -> None:
        """Keep log-probabilities of a prompt for the sequence's next piece."""
        self._scores.setdefault(index, []).extend(scores)

    def push(self, item: Piece | ApiError | None) -> None:
        """Add a piece, or the error that ends the stream, or None if the reader has left."""
        if isinstance(item, Piece):
            item.prompt_logprobs[:0] = self._scores.pop(item.index, ())
            self.num_open -= item.completion is not None
        self._queue.put_nowait(item)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields all pieces up to the last completion. Raises ApiError; ends early if `leave` is called meanwhile."""
        while self._num_unread:
            item = await self._queue.get()
            if item is None:
                return
            if isinstance(item, ApiError):
                raise item
            if item.completion is not None:
                self._num_unread -= 1
                if item.completion["finish_reason"] == "error":
                    raise (bad_request if item.completion["ruled_out"] else internal)(item.completion["error"])
            yield item

    def leave(self, error: ApiError | None = None) -> None:
        """End the stream, because the reader has left or must get this error. The engine stops within a step."""
        self._forget(self.id)
        self.push(error)
