"""Overlap: while the target verifies a draft, the drafter drafts ahead in its own thread.

After AMUSD (McDanel, 2024) and PEARL (Liu et al., 2024): the drafter assumes that the whole draft will be accepted and
that its own next token is the token after it. The two share the cores, so this pays only if the target leaves some
idle.
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
    """During the target's pass, gives the drafter `threads` cores and leaves the other cores to the target."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.others = max(1, ops.available_cores() - threads)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sameseed-draft")
        self._drafted: Seq[Seq[int]] = ()
        self._failed = False
        # Times of the latest passes. No drafter's pass begins that would end after the target's: the target would wait.
        self._target_seconds = math.inf
        self._pass_seconds = 0.0

    @contextmanager
    def beside(
        self, drafter: Drafter, seqs: Seq[Sequence], draft: Draft, num_draft: Seq[int]
    ) -> Iterator[Callable[[], None]]:
        self._drafted = ()
        if not len(draft.tokens) or not self.fits(0.0):
            self._pass_seconds *= FORGET  # so that a drafter that was slow once is tried again
            yield lambda: None
            return
        self._stop = threading.Event()
        self._begun, self._last = time.perf_counter(), math.inf
        work = self._worker.submit(self._draft, drafter, list(seqs), draft, num_draft)
        ops.limit_threads(self.others)

        def end() -> None:
            if not self._stop.is_set():
                ops.limit_threads(0)
                self._stop.set()
                self._target_seconds = time.perf_counter() - self._begun

        try:
            yield end
        finally:
            end()
            self._drafted = work.result()

    def _going(self) -> bool:
        """May another pass begin? To be called before each pass."""
        now = time.perf_counter()
        self._pass_seconds, self._last = (now - self._last if self._last < now else self._pass_seconds), now
        return not self._stop.is_set() and self.fits(now - self._begun)

    def fits(self, seconds: float) -> bool:
        """Would a drafter's pass that begins `seconds` after the target's pass end before the target's?"""
        return seconds + self._pass_seconds <= self._target_seconds

    def _draft(self, drafter: Drafter, seqs: Seq[Sequence], draft: Draft, num_draft: Seq[int]) -> list[list[int]]:
        ops.limit_threads(self.threads)
        try:
            return drafter.ahead(seqs, draft, num_draft, self._going)
        except Exception:  # only draft tokens are lost: the request goes on
            if not self._failed:
                log.exception("drafting ahead failed; the drafts of such rounds begin anew")
            self._failed = True
            return []

    def outcome(self, b: int, draft: Draft, result: Verified) -> bool | None:
        if b >= len(self._drafted) or not self._drafted[b]:
            return None
        all_right = len(result.nodes[b]) == draft.count(b) and len(result.tokens[b]) > draft.count(b)
        return all_right and result.tokens[b][-1] == self._drafted[b][0]


def make_overlap(spec: SpecConfig) -> NoOverlap:
    """The overlap that a SpecConfig asks for."""
    return Overlap(spec.overlap) if spec.overlap else NO_OVERLAP
