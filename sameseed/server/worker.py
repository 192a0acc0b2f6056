"""The engine's process: loads the models, runs the engine's loop, and talks to the server over one inherited socket.

`python -m sameseed.server.worker FD`. A reader thread fills the inbox. The main thread empties the inbox before every
step, so a request is added or aborted within one step. Another thread sends heartbeats, also while weights load. The
process ends when the server's end of the socket closes.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from sameseed.errors import SameseedError, reason
from sameseed.request import Grammar
from sameseed.server import frames, logs
from sameseed.server.frames import Abort, Add, Forget, Frame, Load, LoadGrammar, Prepare, ToEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sameseed.engine.engine import Engine
    from sameseed.grammar import Vocabulary
    from sameseed.grammar.matching import Matching
    from sameseed.request import Delta, Request

log = logging.getLogger("sameseed")
MakeGrammar = Callable[[], Grammar]
Action = Callable[["Engine"], object]


class GrammarStore:
    """The engine's compiled grammars, by the key that the server gave each; for one thread, which takes the frames.

    The library loads in another thread meanwhile, for the helper that compiles must load it, too.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._languages: dict[str, Any] = {}

    def take(self, frame: Prepare | LoadGrammar | Forget) -> None:
        """Load the library, or keep or drop a grammar. One that cannot be loaded is missing: its requests fail."""
        if isinstance(frame, Forget):
            self._languages.pop(frame.key, None)
        elif isinstance(frame, Prepare):
            _ = self._matching
        else:
            try:
                self._languages[frame.key] = self._matching.result().language(frame.data)
            except Exception:
                log.exception("a compiled grammar could not be loaded")

    def maker(self, add: Add) -> MakeGrammar | None:
        """What makes a request's grammar for one sequence, or raises its error; None for a free text."""
        from sameseed.grammar import Choice

        try:
            if add.choice:
                shared = Choice(add.choice, self._words)
                return lambda: shared
            if add.grammar:
                language, matching = self._languages[add.grammar], self._matching.result()
                return lambda: matching.matched(language)
        except Exception as error:  # raised when the request is added, which refuses it
            return partial(_raise, error)
        return None

    @cached_property
    def _words(self) -> Vocabulary:
        return self._vocabulary()

    @cached_property
    def _matching(self) -> Future[Matching]:
        from sameseed.grammar.matching import Matching

        return ThreadPoolExecutor(1, "grammars").submit(lambda: Matching(self._words))


def _raise(error: Exception) -> Grammar:
    raise error


BEAT = 0.25  # seconds between heartbeats
LAST_STEP = 5.0  # seconds that the current step may still take after the socket has closed
MAX_FAILURES = 3  # failed steps in a row after which the process gives up
EXIT_SETTINGS, EXIT_FAILED = 2, 3


class Worker:
    """Runs one engine on frames from a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Action | None] = queue.SimpleQueue()  # None: the socket is closed
        self._closed = False
        self._step_start: float | None = None
        self._passes = [0] * (len(frames.PASS_BOUNDS) + 1)  # histogram of passes by number of tokens
        self._pass_tokens = 0
        self.engine: Engine | None = None
        self._same: NDArray[np.bool_] | None = None  # see `_at_beginning`
        self.grammars = GrammarStore(self._vocabulary)

    def run(self) -> int:
        """Load the model named by the first frame, then serve until the socket closes; returns the exit code."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        arriving = frames.Unpacker[ToEngine](ToEngine).each(self._socket.makefile("rb"))
        load = None
        with suppress(OSError):  # the server has ended
            load = next(arriving, None)
        if not isinstance(load, Load):
            return 0
        threading.Thread(target=self._read, args=(arriving,), name="reader", daemon=True).start()
        from sameseed.engine.build import build_engine
        from sameseed.engine.settings import make_config

        try:
            config = make_config(load.draft, **load.settings)
            self.engine = engine = build_engine(load.model, config)
            model, spec = engine.runner.model.config, config.spec
            facts = frames.EngineReady(
                tokenizer=engine.tokenizer.as_files() | {"now": engine.tokenizer.now.isoformat()},
                vocab_size=model.vocab_size,
                eos_token_ids=list(model.eos_token_ids),
                max_model_len=engine.max_model_len,
                max_num_seqs=config.max_num_seqs,
                method=spec.method,
                policy=spec.policy,
                levels=list(engine.level_names),
                num_draft_tokens=spec.num_draft_tokens,
            )
            self.send(facts)
        except (SameseedError, OSError) as error:
            self.send(frames.Failed(str(error)))
            return EXIT_SETTINGS
        return self._serve(engine)

    def _serve(self, engine: Engine) -> int:
        failures = 0
        while not self._closed:
            for action in self._take(wait=not engine.has_work):
                action(engine)
            if engine.has_work:
                try:
                    self._step_start = time.monotonic()
                    deltas = engine.step(self._give_out)
                    failures = 0
                except Exception as error:
                    log.exception("a step of the engine failed; the requests in it end")
                    failures += 1
                    deltas = engine.fail_step(error)
                    if failures >= MAX_FAILURES:
                        return EXIT_FAILED
                self._passes[bisect.bisect_left(frames.PASS_BOUNDS, engine.num_rows)] += engine.num_rows > 0
                self._pass_tokens += engine.num_rows
                self._give_out(deltas)
                self._step_start = None
        return 0

    def _give_out(self, deltas: list[Delta]) -> None:
        if deltas:
            ended = any(d.completion is not None for d in deltas)  # then counters go along, to be current
            items = [(delta.request_id, frames.piece(delta)) for delta in deltas]
            self.send(frames.Deltas(items, self._stats() if ended else None))

    def _add(self, engine: Engine, add: Add, make: MakeGrammar | None) -> None:
        from sameseed.engine.llm import make_requests

        names = ("tenant", "owner", "priority", "detailed", "speculation", "score_prompt")
        shared = {name: getattr(add, name) for name in names}
        try:
            for request in make_requests(add.id, add.prompts, add.params, make, **shared):
                engine.add(self._at_beginning(engine, request))
        except Exception as error:
            inside = not isinstance(error, SameseedError)
            if inside:
                log.exception("a request could not be added", extra={"request_id": add.id})
            engine.abort(add.id)
            self.send(frames.Refused(add.id, reason(error), inside))

    def _at_beginning(self, engine: Engine, request: Request) -> Request:
        """The request; if its prompt has no text, its grammar heeds that."""
        skip = request.params.skip_special_tokens
        if request.grammar is None or engine.tokenizer.has_text(request.prompt_token_ids, skip):
            return request
        from sameseed.grammar import Beginning
        from sameseed.server.text import same_at_beginning

        if self._same is None:
            self._same = same_at_beginning(engine.tokenizer, engine.runner.model.config.vocab_size)
        return dataclasses.replace(request, grammar=Beginning(request.grammar, self._same))

    def _stats(self) -> dict[str, Any]:
        engine = self.engine
        if engine is None:
            return {}
        scheduler, blocks, spec, times = engine.scheduler, engine.runner.blocks, engine.metrics, engine.times
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free_blocks": blocks.num_free,
            "num_blocks": blocks.num_blocks,
            "passes": {"counts": list(self._passes), "tokens": self._pass_tokens},
            "preemptions": scheduler.num_preemptions,
            "prefix_queries": blocks.prefixes.num_queries,
            "prefix_hits": blocks.prefixes.num_hits,
            **{name: getattr(spec, f"num_{name}") for name in ("rounds", "drafts", "draft_tokens", "accepted_tokens")},
            "accepted_per_pos": {str(i): n for i, n in enumerate(spec.num_accepted_tokens_per_pos)},
            "undrafted": dict(spec.undrafted),
            "times": dataclasses.asdict(times),
            "pass_costs": engine.pass_costs,
        }

    def send(self, frame: Frame) -> None:
        """Send a whole frame. If the socket is closed, the reader thread ends the process soon."""
        data = frames.pack(frame)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            self._close()

    def _take(self, wait: bool) -> list[Action]:
        taken = [self._inbox.get()] if wait and not self._closed else []
        while not self._inbox.empty():
            taken.append(self._inbox.get())
        return [action for action in taken if action is not None]

    def _vocabulary(self) -> Vocabulary:
        from sameseed.server.text import vocabulary

        assert self.engine is not None
        config = self.engine.runner.model.config
        return vocabulary(self.engine.tokenizer, config.vocab_size, config.eos_token_ids)

    def _close(self) -> None:
        self._closed = True
        self._inbox.put(None)

    def _read(self, arriving: Iterator[ToEngine]) -> None:
        try:
            for frame in arriving:
                if isinstance(frame, Add):
                    self._inbox.put(partial(self._add, add=frame, make=self.grammars.maker(frame)))
                elif isinstance(frame, Abort):
                    self._inbox.put(methodcaller("abort", frame.id))
                elif not isinstance(frame, Load):
                    self.grammars.take(frame)
        except (OSError, frames.FrameError) as error:
            log.error("the server's frames cannot be read: %s", error)
        except Exception:  # e.g. no thread can be started; without a reader the process must end
            log.exception("the server's frames cannot be taken")
        self._close()
        time.sleep(LAST_STEP)  # in a daemon thread: usually the process ends meanwhile
        os._exit(EXIT_FAILED)

    def _beat(self) -> None:
        while not self._closed:
            start = self._step_start
            age = 0.0 if start is None else time.monotonic() - start
            try:
                stats = self._stats()
            except RuntimeError:  # a dictionary grew while it was copied; the next heartbeat has the counters
                stats = {}
            self.send(frames.Deltas([], stats, age))
            time.sleep(BEAT)


def main() -> None:
    """Run a worker on the inherited socket. `process.spawn` blocks signals: the process ends when its socket closes."""
    logs.set_up("warning")
    code = EXIT_FAILED
    try:
        code = Worker(socket.socket(fileno=int(sys.argv[1]))).run()
    except Exception:
        log.exception("the engine's process failed")
    finally:
        logging.shutdown()
        os._exit(code)  # at once: the other threads never end by themselves


if __name__ == "__main__":
    main()
