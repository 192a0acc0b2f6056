"""Alarm: one warning per drafter whose draft tokens are almost never accepted, with likely causes and a remedy."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from sameseed.request import SpecMetrics
from sameseed.spec.drafter import Drafter

log = logging.getLogger("sameseed")
ENOUGH_TOKENS, ENOUGH_DRAFTS = 200, 20  # draft tokens, and drafts, before a warning is possible
SHARE_OF_TOKENS, SHARE_OF_DRAFTS = 0.01, 0.05  # warn if accepted tokens are below both: most nodes of large trees fail
REMEDY = (
    "It may have been trained for another target, read other layers of it, or know another tokenizer or chat template: "
    "take a draft of this very target, or none (the text is the same, only slower)"
)


class Alarm:
    """Watches drafters that own a model. Drafters that look tokens up are not watched: a failed lookup is no fault."""

    def __init__(self) -> None:
        self.texts: list[str] = []  # the warnings so far
        self._drafter: Drafter | None = None
        self._metrics = SpecMetrics()  # of this drafter
        self._said: set[int] = set()  # ids of its levels with a warning: they need not be hashable

    def update(self, drafter: Drafter, num_draft: Seq[int], num_accepted: Seq[int]) -> None:
        """Count a round of a drafter (an engine's drafter may be replaced), and check it and the levels below it."""
        if self._drafter is not drafter:
            self._drafter, self._metrics, self._said = drafter, SpecMetrics(), set()
        for drafted, accepted in zip(num_draft, num_accepted, strict=True):
            if drafted:
                self._metrics.update(drafted, accepted)
        for level, counted in [(drafter, self._metrics), *drafter.counted()]:
            if level.owns and is_useless(counted) and id(level) not in self._said:
                self._said.add(id(level))
                drafted, accepted = counted.num_draft_tokens, counted.num_accepted_tokens
                text = f"drafter {level.name!r}: {accepted} of {drafted} drafted tokens accepted "
                text += f"({accepted / drafted:.1%}). {REMEDY}"
                self.texts.append(text)
                log.warning("%s", text)


def is_useless(metrics: SpecMetrics) -> bool:
    """True if enough was drafted to judge, and almost nothing of it was accepted.

    If nothing at all was, the number of drafts is enough: a length policy soon asks for few tokens then.
    """
    if metrics.num_drafts < ENOUGH_DRAFTS:
        return False
    return metrics.num_accepted_tokens == 0 or (
        metrics.num_draft_tokens >= ENOUGH_TOKENS
        and metrics.num_accepted_tokens < SHARE_OF_TOKENS * metrics.num_draft_tokens
        and metrics.num_accepted_tokens < SHARE_OF_DRAFTS * metrics.num_drafts
    )
