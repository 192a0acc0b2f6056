"""Counts what a target says, and how much of a draft's vocabulary that asks for (`--draft-vocabulary auto` or N).

A token without a row in the draft's LM head is never drafted; the target still says it. So fewer rows cost less to read
and lose some of the accepted tokens: as with formats, the cheapest that pays is taken (FR-Spec: Zhao et al., 2025).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sameseed import store
from sameseed.cost.draft_format import RIGHT, speed
from sameseed.cost.round import PAYS
from sameseed.errors import ConfigError

log = logging.getLogger("sameseed")
KIND, AUTO = "said", "auto"
FEWEST = 6  # AUTO keeps the 2 ** FEWEST tokens said most often, or more
OFTEN = 64  # counts are written, and cuts judged anew, once they have grown by one part in so many
MOST = 1 << 17  # tokens from which counts are halved, so that newer outputs count more


class HasHead(Protocol):
    """A drafter with an LM head (`drafters/_vocabulary.py`); `whole`: its model with all rows."""

    whole: Any
    at_once: bool

    def draft_only(self, ids: Tensor | None) -> None: ...


class SaidTokens:
    """How often a target said each token, in this process and before: kept by the digest of its weights.

    `counts` [V]. `places` [64]: how many tokens of outputs that were not counted yet were among the first 2 ** i by
    count, but not among the first 2 ** (i - 1). So a cut is judged on outputs that it was not made from.
    """

    def __init__(self, target: Path, vocab_size: int) -> None:
        self._key, self._unwritten = store.weights_key(target), 0
        own = {"counts": np.zeros(vocab_size, np.int64), "places": np.zeros(64, np.int64)}
        known = store.read(KIND, self._key, lambda arrays: store.alike(arrays, own)) or own
        self.counts, self.places = known["counts"], known["places"]
        self._cuts: list[_Cut] = []
        self._rank()

    def add(self, token_ids: Seq[int]) -> None:
        """Count an output."""
        if not token_ids:
            return
        ids = np.array(token_ids, np.int64)
        self.places += np.bincount(np.frexp(self._rank_of[ids])[1], minlength=len(self.places))
        np.add.at(self.counts, ids, 1)
        self._unwritten += len(ids)
        if self._unwritten * OFTEN < self.counts.sum():
            return
        self._unwritten = 0
        if self.counts.sum() > MOST:
            self.counts, self.places = self.counts // 2, self.places // 2
        store.write(KIND, self._key, {"counts": self.counts, "places": self.places})
        self._rank()
        for cut in self._cuts:
            cut.judge()

    def follow(self, drafter: HasHead, target_bytes: int, vocabulary: str) -> None:
        """Let a drafter draft what is said most often, now and as counts change.

        `vocabulary`: AUTO, as many tokens as pay; or a number, where the first ids follow those that were said.
        `target_bytes`: what a pass of the target reads.
        """
        cut = _Cut(self, drafter, target_bytes, 0 if vocabulary == AUTO else int(vocabulary))
        self._cuts.append(cut)
        cut.judge()
        if len(cut.kept) == len(self.counts):
            log.info("draft vocabulary: all tokens; by the %d counted so far, fewer do not pay", self.counts.sum())

    def share(self, num_tokens: int) -> float:
        """The share that the most frequent tokens have of new outputs; a careful estimate, 1 for all tokens."""
        told = int(self.places.sum())
        if num_tokens >= len(self.counts):
            return 1.0
        return max(0.0, self.places[: num_tokens.bit_length()].sum() / told - told**-0.5) if told else 0.0

    def _rank(self) -> None:
        self.ranked = np.argsort(-self.counts, kind="stable")  # among equal counts the first ids come first
        self._rank_of = np.empty_like(self.ranked)
        self._rank_of[self.ranked] = np.arange(len(self.ranked))


class _Cut:
    """What a drafter may draft: the `size` most frequent tokens, 0: as many as pay. `kept`: those of now."""

    def __init__(self, said: SaidTokens, drafter: HasHead, target_bytes: int, size: int) -> None:
        self.said, self.drafter, self.target_bytes, self.size = said, drafter, target_bytes, size
        self.kept = said.ranked  # all

    def judge(self) -> None:
        """Keep other tokens where they promise more than those of now."""
        said, every = self.said, len(self.said.ranked)
        sizes = [1 << i for i in range(FEWEST, every.bit_length())] + [every]
        best = min(self.size, every) or max(sizes, key=lambda n: self.speed(n, said.share(n)))
        stale = said.counts[said.ranked[: len(self.kept)]].sum() - said.counts[self.kept].sum()
        now = self.speed(len(self.kept), said.share(len(self.kept)) - stale / max(1, said.counts.sum()))
        is_first = self.size and best < len(self.kept) == every
        if is_first or self.speed(best, said.share(best)) > PAYS * now:
            kept = said.ranked[:best].copy()
            try:
                self.drafter.draft_only(None if best == every else torch.from_numpy(kept))
            except ConfigError as error:  # a head has none of these tokens: it keeps those of now
                log.info("draft vocabulary: not cut to %d of %d tokens: %s", best, every, error)
                return
            self.kept = kept
            log.info("draft vocabulary: %d of %d tokens, %.1f %% of the target's", best, every, 100 * said.share(best))

    def speed(self, num_tokens: int, share: float) -> float:
        """Tokens over plain decoding with the rows of so many tokens, by what passes read."""
        w = self.drafter.whole.weights
        unread = max(0, w.lm_head.shape[0] - num_tokens) / w.lm_head.shape[0] * w.lm_head.nbytes
        return speed(w.read_bytes - unread, self.target_bytes, RIGHT * share, self.drafter.at_once)


def is_counted(vocabulary: str) -> bool:
    """Whether the option `vocabulary` asks for tokens that the target says."""
    return vocabulary == AUTO or vocabulary.isdecimal()
