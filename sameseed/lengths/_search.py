"""The search for the draft lengths with the most expected tokens per second, from acceptance estimates and costs."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from operator import itemgetter

import numpy as np

from sameseed.cost.round import PAYS, DraftRows, RoundCost, expected

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # upper limits of the draft length that are compared for a batch
Offers = Seq[tuple[float, float, float]]  # by rank, expected: accepted tokens, rows, drafting steps up to it


def best_lengths(
    offers: Seq[Offers], budget: int | None, cost: RoundCost, count: int, context: float, plain: float
) -> tuple[list[int], float]:
    """The best draft lengths in rounds of `count` sequences, and the expected tokens per second of all.

    Draft rows of all sequences are taken in the order of their expected gain. All lengths are 0 unless they beat plain
    decoding, whose rounds take `plain` seconds, by `PAYS`.
    """
    ranks = [(*offer, b, j) for b, row in enumerate(offers) for j, offer in enumerate(row) if offer[0] > 0.0]
    if not ranks or budget == 0:
        return [0] * len(offers), count / plain
    ranks.sort(key=itemgetter(0), reverse=True)  # stable: parents, which are at least as likely, come before children
    table, most = np.array(ranks), max(map(len, offers))
    # One drafting step serves all sequences, so it pays with a few likely tokens or with many less likely ones.
    depths = [d for d in DEPTHS if d < most] if len(offers) > 1 else []
    choices = [table[:budget], *(table[table[:, 4] < depth][:budget] for depth in depths)]
    accepted, rows = np.concatenate([part[:, :2].cumsum(0) for part in choices]).T / count
    steps = np.concatenate([np.maximum.accumulate(part[:, 2]) for part in choices])
    found = max(1.0 - math.prod(1.0 - min(row[0][1], 1.0) for row in offers if row), 1e-3)  # probability of a draft
    drafted = DraftRows(accepted, rows, steps, len(offers), found)
    rates = np.asarray(expected(cost, drafted, most, count, context).tokens_per_s)
    if rates[last := int(rates.argmax())] <= PAYS * count / plain:
        return [0] * len(offers), count / plain
    promised = float(rates[last])
    for part in choices:  # the one that this rank is of
        if last < len(part):
            break
        last -= len(part)
    return np.bincount(part[: last + 1, 3].astype(int), minlength=len(offers)).tolist(), promised


def within(lengths: list[int], budget: int | None) -> list[int]:
    """Reduce `lengths` in place to at most `budget` tokens in all; later sequences lose theirs first."""
    left = sum(lengths) if budget is None else budget
    for b, k in enumerate(lengths):
        lengths[b] = min(k, left)
        left -= lengths[b]
    return lengths
