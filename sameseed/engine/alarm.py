"""Alarm: a drafter whose guesses are hardly ever right is said aloud, once, with what it may be and what to do."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary, WeakSet

from sameseed.request import SpecMetrics
from sameseed.spec.drafter import Drafter

log = logging.getLogger("sameseed")
ENOUGH_TOKENS, ENOUGH_DRAFTS = 200, 20  # drafted, before anything is said
SHARE_OF_TOKENS, SHARE_OF_DRAFTS = 0.01, 0.05  # accepted tokens below both: a large tree wastes most of its nodes
REMEDY = (
    "It may have been trained for another target, read other layers of it, or know another tokenizer or chat template: "
    "take a draft of this very target, or none (the text is the same, only slower)"
)


class Alarm:
    """Watches drafters that have learned to guess: of one that looks things up, finding nothing is no fault."""

    def __init__(self) -> None:
        self.texts: list[str] = []  # what was said
        self._metrics: WeakKeyDictionary[Drafter, SpecMetrics] = WeakKeyDictionary()
        self._said: WeakSet[Drafter] = WeakSet()

    def update(self, drafter: Drafter, num_draft: Seq[int], num_accepted: Seq[int]) -> None:
        """Count a round of a drafter (one engine may exchange them), and look at the levels below it too."""
        metrics = self._metrics.setdefault(drafter, SpecMetrics())
        for drafted, accepted in zip(num_draft, num_accepted, strict=True):
            if drafted:
                metrics.update(drafted, accepted)
        for level, counted in [(drafter, metrics), *drafter.counted()]:
            if level.owns and is_useless(counted) and level not in self._said:
                self._said.add(level)
                drafted, accepted = counted.num_draft_tokens, counted.num_accepted_tokens
                text = f"drafter {level.name!r}: {accepted} of {drafted} drafted tokens accepted "
                text += f"({accepted / drafted:.1%}). {REMEDY}"
                self.texts.append(text)
                log.warning("%s", text)


def is_useless(metrics: SpecMetrics) -> bool:
    """Enough was drafted to tell, and next to nothing of it was accepted.

    Where nothing at all was, drafts alone tell: a policy that sees no use in them soon asks for hardly any tokens.
    """
    if metrics.num_drafts < ENOUGH_DRAFTS:
        return False
    return metrics.num_accepted_tokens == 0 or (
        metrics.num_draft_tokens >= ENOUGH_TOKENS
        and metrics.num_accepted_tokens < SHARE_OF_TOKENS * metrics.num_draft_tokens
        and metrics.num_accepted_tokens < SHARE_OF_DRAFTS * metrics.num_drafts
    )
