"""Counts what a target says, and how much of a draft model's vocabulary that asks for (`--draft-vocabulary auto`).

A token without a row in the draft's LM head is never drafted; the target still says it. So fewer rows cost less to read
and lose some of the accepted tokens: as with formats, the cheapest that pays is taken (FR-Spec: Zhao et al., 2025).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sameseed import store
from sameseed.cost.draft_format import RIGHT, speed
from sameseed.models.decoder import Decoder
from sameseed.models.runner import ModelRunner

log = logging.getLogger("sameseed")
KIND = "said"
OFTEN = 64  # counts are written once they have grown by one part in so many: no more is lost with a process


class SaidTokens:
    """How often a target said each token, in this process and before: kept by the digest of its weights."""

    def __init__(self, target: Path) -> None:
        self._key = store.weights_key(target)
        known, self._unwritten = store.read(KIND, self._key), 0
        self.counts = Counter(dict(zip(*known["counts"].tolist(), strict=True)) if known else {})

    def add(self, token_ids: Seq[int]) -> None:
        """Count an output."""
        self.counts.update(token_ids)
        self._unwritten += len(token_ids)
        if self._unwritten * OFTEN >= self.counts.total():
            self._unwritten = 0
            store.write(KIND, self._key, {"counts": np.array([[*self.counts], [*self.counts.values()]])})

    def vocabulary(self, draft: Decoder, target: Decoder) -> str:
        """The drafter's option `vocabulary`: a JSON list of the tokens whose rows pay, or "" for all."""
        total, once = self.counts.total(), sum(n == 1 for n in self.counts.values())
        new = max(once / total, total**-0.5) if total else 1.0  # Good and Turing's share; more where outputs repeat
        ranked, size = self.counts.most_common(), draft.config.vocab_size
        row, whole, every = draft.weights.lm_head.nbytes / size, draft.weights.read_bytes, target.weights.read_bytes
        found, best, share = 0, speed(whole, every, RIGHT), 1.0
        for n in (1 << i for i in range(6, len(ranked).bit_length())):
            known = sum(count for _, count in ranked[:n]) / total * (1.0 - new)
            if (fast := speed(whole - (size - n) * row, every, RIGHT * known)) > best:
                found, best, share = n, fast, known
        log.info("draft vocabulary: %d of %d tokens, %.1f %% of the target's", found or size, size, 100 * share)
        return json.dumps(sorted(token for token, _ in ranked[:found])) if found else ""


def is_counted(options: object) -> bool:
    """Whether a drafter's options ask for the tokens that the target says."""
    return getattr(options, "vocabulary", "") == "auto"


def settled(options: Any, said: SaidTokens | None, draft: ModelRunner | None, target: ModelRunner) -> Any:
    """A drafter's options, with the vocabulary that was counted if they ask for it; without counts all tokens."""
    if not is_counted(options):
        return options
    found = said.vocabulary(draft.model, target.model) if said is not None and draft is not None else ""
    return replace(options, vocabulary=found)
