"""The search for the draft lengths with the most expected tokens per second, from acceptance estimates and prices."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from sameseed.cost.round import PAYS
from sameseed.cost.running import Prices

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # upper limits of the draft length that are compared for a batch
Offers = Seq[tuple[float, float, float]]  # by rank, expected: accepted tokens, rows, drafting steps up to it


def alone(offers: Offers, count: int, prices: Prices) -> tuple[list[int], float]:
    """The best draft length of one sequence, in a pass of `count` sequences, and its expected tokens per second."""
    tokens, more, best, plain = float(count), 0.0, 0, count / prices.plain
    promised = plain * PAYS
    found = max(offers[0][1], 1e-3) if offers else 1.0  # probability that there is a draft at all
    for j, (gain, there, steps) in enumerate(offers):
        tokens += gain
        more += there
        seconds = found * prices.seconds(more / found, steps)
        rate = tokens / (seconds + (1.0 - found) * prices.seconds(0.0, steps) if found < 1.0 else seconds)
        if rate > promised:
            promised, best = rate, j + 1
    return [best], promised if best else plain


def shared(offers: Seq[Offers], budget: int | None, count: int, prices: Prices) -> tuple[list[int], float]:
    """The best draft lengths of several sequences, and the expected tokens per second.

    Draft rows of all sequences are taken in the order of their expected gain.
    """
    most = max(map(len, offers))
    if not most or hopeless(offers, count, prices):
        return [0] * len(offers), count / prices.plain
    table = np.zeros((len(offers), most, 3))
    for b, row in enumerate(offers):
        if row:
            table[b, : len(row)] = row
    # A row comes after its parent, which is at least as likely and comes first in the stable sort.
    order = np.argsort(-table[:, :, 0], axis=None, kind="stable")
    owner, position = order // most, order % most
    gain, there, steps = table[owner, position].T
    plain = count / prices.plain
    found = max(1.0 - float(np.prod(1.0 - table[:, 0, 1].clip(max=1.0))), 1e-3)  # probability of a draft
    best, promised = [0] * len(offers), plain * PAYS
    # One drafting step serves all sequences, so it pays with a few likely tokens or with many less likely ones.
    for depth in {min(d, most) for d in DEPTHS}:
        taken = ((position < depth) & (gain > 0.0)).nonzero()[0][:budget]
        if not len(taken):
            continue
        deep = np.maximum.accumulate(steps[taken])
        seconds = found * prices.seconds(np.cumsum(there[taken]) / found, deep)
        if found < 1.0:
            seconds += (1.0 - found) * prices.seconds(0.0, float(deep[0]))
        rate = (count + np.cumsum(gain[taken])) / seconds
        last = int(rate.argmax())
        if rate[last] > promised:
            promised = float(rate[last])
            best = np.bincount(owner[taken[: last + 1]], minlength=len(offers)).tolist()
    return best, promised if any(best) else plain


def hopeless(offers: Seq[Offers], count: int, prices: Prices) -> bool:
    """True if surely no draft is faster than plain decoding: cheaper to find out than the best lengths are.

    The bound: each row costs at least its share of the longer pass, and a row that loses time could be left out.
    """
    rate = count / prices.plain * PAYS
    row = rate * prices.least_per_row
    by_kind: dict[int, float] = {}  # sequences without observations share their offers
    tokens, steps = float(count), []
    for one in offers:
        if id(one) not in by_kind:
            by_kind[id(one)] = sum(max(0.0, gain - row * there) for gain, there, _ in one)
            steps += [one[0][2]] if one else []
        tokens += by_kind[id(one)]
    return tokens <= rate * prices.seconds(0.0, min(steps))


def within(lengths: list[int], budget: int | None) -> list[int]:
    """Reduce `lengths` in place to at most `budget` tokens in all; later sequences lose theirs first."""
    left = sum(lengths) if budget is None else budget
    for b, k in enumerate(lengths):
        lengths[b] = min(k, left)
        left -= lengths[b]
    return lengths
