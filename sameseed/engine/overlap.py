"""Going ahead: while the target checks a draft, its drafter guesses on, in a thread of its own.

After AMUSD (McDanel, 2024) and PEARL (Liu et al., 2024): it supposes that all of the draft is right and that its own
next guess is the token after it. Where that holds, the next draft is there already; where not, it is thrown away. The
cores are shared out meanwhile, so this pays only where the target leaves some idle.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from sameseed import ops
from sameseed.config import SpecConfig
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter
from sameseed.spec.step import NO_OVERLAP, NoOverlap
from sameseed.spec.verify import Verified

FORGET = 0.95

log = logging.getLogger("sameseed.spec")


class Overlap(NoOverlap):
    """Gives the drafter `threads` of the cores and leaves the target the others, for the time of the target's pass."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.others = max(1, ops.available_cores() - threads)
        self.seconds = 0.0  # that drafters guessed ahead
        self.waited = 0.0  # of these, after the target had its result
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sameseed-draft")
        self._guesses: Seq[Seq[int]] = ()
        self._failed = False
        # Of the latest pass of each: one that would end after the target's is not begun, as the target would wait.
        self._target_seconds = math.inf
        self._pass_seconds = 0.0

    @contextmanager
    def beside(
        self, drafter: Drafter, seqs: Seq[Sequence], draft: Draft, num_draft: Seq[int]
    ) -> Iterator[Callable[[], None]]:
        self._guesses = ()
        if not len(draft.tokens) or not self.fits(0.0):
            self._pass_seconds *= FORGET  # what was slow once is tried again
            yield lambda: None
            return
        stop = threading.Event()
        begun = time.perf_counter()
        going = self._until(begun, stop)
        work = self._worker.submit(self._guess, drafter, list(seqs), draft, num_draft, going)
        ops.limit_threads(self.others)

        def end() -> None:
            if not stop.is_set():
                ops.limit_threads(0)
                stop.set()
                self._target_seconds = time.perf_counter() - begun

        try:
            yield end
        finally:
            end()
            start = time.perf_counter()
            self._guesses = work.result()
            self.waited += time.perf_counter() - start

    def _until(self, begun: float, stop: threading.Event) -> Callable[[], bool]:
        """Whether another pass may begin; it is asked before each."""
        last = math.inf

        def going() -> bool:
            nonlocal last
            now = time.perf_counter()
            self._pass_seconds, last = (now - last if last < now else self._pass_seconds), now
            return not stop.is_set() and self.fits(now - begun)

        return going

    def fits(self, seconds: float) -> bool:
        """Would a pass of the drafter that begins so long after the target's be over when that is?"""
        return seconds + self._pass_seconds <= self._target_seconds

    def _guess(
        self, drafter: Drafter, seqs: Seq[Sequence], draft: Draft, num_draft: Seq[int], going: Callable[[], bool]
    ) -> list[list[int]]:
        ops.limit_threads(self.threads)
        start = time.perf_counter()
        try:
            return drafter.ahead(seqs, draft, num_draft, going)
        except Exception:  # a guess is lost, no text: the request goes on
            if not self._failed:
                log.exception("guessing ahead failed; the drafts of such rounds begin anew")
            self._failed = True
            return []
        finally:
            self.seconds += time.perf_counter() - start

    def outcome(self, b: int, draft: Draft, result: Verified) -> bool | None:
        if b >= len(self._guesses) or not self._guesses[b]:
            return None
        all_right = len(result.nodes[b]) == draft.count(b) and len(result.tokens[b]) > draft.count(b)
        return all_right and result.tokens[b][-1] == self._guesses[b][0]


def make_overlap(spec: SpecConfig) -> NoOverlap:
    """What a SpecConfig asks for."""
    return Overlap(spec.overlap) if spec.overlap else NO_OVERLAP
