"""Which draft lengths promise the most tokens a second: by what drafts are expected to bring and passes to cost."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from sameseed.lengths._cost import Prices

MARGIN = 0.02  # drafting must promise so much more than not drafting
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # longest drafts that are compared in a batch
Offers = Seq[tuple[float, float, float]]  # by rank: tokens that it brings, rows that it is, steps up to it


def alone(offers: Offers, count: int, prices: Prices) -> tuple[list[int], float]:
    """The length of one sequence, in a pass of `count`, and the tokens a second that it promises."""
    tokens, more, best, plain = float(count), 0.0, 0, count / prices.plain
    promised = plain * (1.0 + MARGIN)
    found = max(offers[0][1], 1e-3) if offers else 1.0  # how often there is a draft at all
    for j, (gain, there, steps) in enumerate(offers):
        tokens += gain
        more += there
        seconds = found * prices.seconds(more / found, steps)
        rate = tokens / (seconds + (1.0 - found) * prices.seconds(0.0, steps) if found < 1.0 else seconds)
        if rate > promised:
            promised, best = rate, j + 1
    return [best], promised if best else plain


def shared(offers: Seq[Offers], budget: int | None, count: int, prices: Prices) -> tuple[list[int], float]:
    """The lengths of several sequences. The likeliest rows come first, whosever they are."""
    most = max(map(len, offers))
    if not most:
        return [0] * len(offers), count / prices.plain
    table = np.zeros((len(offers), most, 3))
    for b, row in enumerate(offers):
        if row:
            table[b, : len(row)] = row
    # A row comes after its parent, which is at least as likely.
    order = np.argsort(-table[:, :, 0], axis=None, kind="stable")
    owner, position = order // most, order % most
    gain, there, steps = table[owner, position].T
    plain = count / prices.plain
    found = max(1.0 - float(np.prod(1.0 - table[:, 0, 1].clip(max=1.0))), 1e-3)  # how often there is a draft at all
    best, promised = [0] * len(offers), plain * (1.0 + MARGIN)
    # A step of drafting serves all sequences: it pays for few likely tokens, or for many less likely ones.
    for depth in {min(d, most) for d in DEPTHS}:
        taken = ((position < depth) & (gain > 0.0)).nonzero()[0][:budget]
        if not len(taken):
            continue
        deep = np.maximum.accumulate(steps[taken])
        seconds = found * prices.seconds_many(np.cumsum(there[taken]) / found, deep)
        if found < 1.0:
            seconds += (1.0 - found) * prices.seconds(0.0, float(deep[0]))
        rate = (count + np.cumsum(gain[taken])) / seconds
        last = int(rate.argmax())
        if rate[last] > promised:
            promised = float(rate[last])
            best = np.bincount(owner[taken[: last + 1]], minlength=len(offers)).tolist()
    return best, promised if any(best) else plain


def within(lengths: list[int], budget: int | None) -> list[int]:
    """Lengths cut, the last ones first, to `budget` in all."""
    left = sum(lengths) if budget is None else budget
    for b, k in enumerate(lengths):
        lengths[b] = min(k, left)
        left -= lengths[b]
    return lengths
