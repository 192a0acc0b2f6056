"""Loader: a thread of the engine's process that prepares the grammars and choices of requests."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from sameseed.errors import RequestError
from sameseed.request import Grammar
from sameseed.server.frames import Abort, Add, Forget, LoadGrammar, Prepare, ToEngine

if TYPE_CHECKING:
    from sameseed.grammar import Vocabulary
    from sameseed.grammar.matching import Matching

log = logging.getLogger("sameseed")
MakeGrammar = Callable[[], Grammar]


class Loader:
    """Takes the frames that concern grammars, in order, and passes requests on together with their grammar.

    The grammar is passed as a function that makes it for one sequence, or raises its error. So every request is passed
    on, whatever fails here.
    """

    def __init__(self, deliver: Callable[[Add, MakeGrammar], None], vocabulary: Callable[[], Vocabulary]) -> None:
        self._deliver, self._vocabulary = deliver, vocabulary
        self._grammars: dict[str, Any] = {}  # by key; the server says which to keep
        self._waiting: set[str] = set()  # requests that were not passed on yet
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def takes(self, frame: ToEngine) -> bool:
        """Take a frame that concerns grammars, or aborts a request that waits here. Returns whether it was taken."""
        if isinstance(frame, Abort):
            with self._lock:
                waited = frame.id in self._waiting
                self._waiting.discard(frame.id)
            return waited
        if isinstance(frame, Add) and (frame.choice or frame.grammar):
            with self._lock:
                self._waiting.add(frame.id)
        elif not isinstance(frame, Prepare | LoadGrammar | Forget):
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        self._queue.put(frame)
        return True

    def _work(self) -> None:
        while True:
            frame = self._queue.get()
            try:
                if isinstance(frame, Add):
                    try:
                        make = self._maker(frame.choice, frame.grammar)
                    except Exception as error:  # raised when the request is added, which refuses it
                        make = partial(_raise, error)
                    with self._lock:
                        wanted = frame.id in self._waiting
                        self._waiting.discard(frame.id)
                        if wanted:  # under the lock: an abort comes later, or is seen here
                            self._deliver(frame, make)
                elif isinstance(frame, Forget):
                    self._grammars.pop(frame.key, None)
                elif isinstance(frame, LoadGrammar):
                    self._grammars[frame.key] = self._matching.language(frame.data)
                else:  # load the library while the helper compiles
                    _ = self._matching
            except RequestError as error:  # the library is missing; the request is refused for it
                log.warning("%s", error)
            except Exception:
                log.exception("a compiled grammar could not be loaded")

    def _maker(self, choice: list[str] | None, key: str | None) -> MakeGrammar:
        from sameseed.grammar import Choice

        if choice:
            shared = Choice(choice, self._words)
            return lambda: shared
        grammar = self._grammars.get(key or "")
        if grammar is None:
            raise RuntimeError("the request's grammar is not there")
        return lambda: self._matching.matched(grammar)

    @cached_property
    def _words(self) -> Vocabulary:
        return self._vocabulary()

    @cached_property
    def _matching(self) -> Matching:
        from sameseed.grammar.matching import Matching

        return Matching(self._words)


def _raise(error: Exception) -> Grammar:
    raise error
