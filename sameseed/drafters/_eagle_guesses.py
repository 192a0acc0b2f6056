"""What comes next, in a head's opinion: from its logits the target's likely choices, with their log-probabilities.

With sampling the target's own noise is part of it: it is known before the target's choice is (coupled sampling).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sameseed.errors import RequestError
from sameseed.request import Sequence
from sameseed.spec.sampling import adjust, gumbel_noise

CANDIDATES = 64  # of the head's likeliest tokens, those that noise may reorder
LEFT_OUT = 3.0  # taken off the logarithm of what the head's own truncation excludes
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class HeadRows:
    """The head's logits at T places: all [T, Vd]; of each the n best, falling, with the target's ids; logs of mass."""

    logits: NDArray[np.float32]
    best: Floats  # [T, n]
    ids: Ints  # [T, n]
    totals: Floats  # [T]


class Guesses:
    """Reads logits over the head's own vocabulary; what it says is in the target's ids."""

    def __init__(self, target_ids: Ints | None, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """`target_ids` [Vd]: the target's token of each of the head's, None where they are the same."""
        self.target_ids = target_ids
        self.vocab_size = vocab_size  # the target's
        self.eos_token_ids = tuple(eos_token_ids)

    def rows(self, logits: Tensor, num: int) -> HeadRows:
        """Rows of logits [T, Vd] with their `num` likeliest tokens. In NumPy a row's sum has its own order."""
        num = min(num, logits.shape[1])
        table = logits.cpu().numpy()
        if num > 1:
            both = torch.cat([x.double() for x in logits.topk(num)], dim=1).cpu().numpy()  # one wait for a device
            highest, ids = both[:, :num].astype(np.float32), both[:, num:].astype(np.int64)  # [T, num] each
        else:
            ids = table.argmax(axis=1)[:, None]
            highest = np.take_along_axis(table, ids, axis=1)
        best: Floats = highest.astype(np.float64)
        with np.errstate(all="ignore"):  # logits that are no numbers give no guess
            weights = table - highest[:, :1]
            np.exp(weights, out=weights)
            totals = best[:, 0] + np.log(weights.sum(axis=1))
        return HeadRows(table, best, ids if self.target_ids is None else self.target_ids[ids], totals)

    def likeliest(self, known: HeadRows, part: slice, seq: Sequence, num_path: int, count: int) -> tuple[Ints, Floats]:
        """The target's likely choices [n, count] `num_path` tokens after the sequence, from rows `part`.

        With their log-probabilities, -inf for none. Greedy: the likeliest tokens. Sampled: of log p + noise, the
        largest, as shares of their exponentials: the target's choice is the largest of its own log p + the same noise.
        """
        totals = known.totals[part, None]  # [n, 1]
        if seq.params.greedy:
            tokens, log_probs = known.ids[part, :count], np.minimum(known.best[part, :count] - totals, 0.0)
        else:
            tokens, log_probs = _sampled(known.best[part], known.ids[part], seq, num_path, count)
        sound = np.isfinite(totals)
        return tokens, log_probs if sound.all() else np.where(sound, log_probs, -np.inf)

    def adjusted(
        self, known: HeadRows, part: slice, seq: Sequence, paths: Seq[Seq[int]], count: int
    ) -> tuple[Ints, Floats]:
        """`likeliest` after each path under penalties, bias, bans: they need rows over the target's vocabulary."""
        found = [self._adjusted(row, seq, path, count) for row, path in zip(known.logits[part], paths, strict=True)]
        return np.stack([tokens for tokens, _ in found]), np.stack([log_probs for _, log_probs in found])

    def _adjusted(self, logits: NDArray[np.float32], seq: Sequence, path: Seq[int], count: int) -> tuple[Ints, Floats]:
        if self.target_ids is not None:
            whole = np.full(self.vocab_size, -np.inf, np.float32)
            whole[self.target_ids] = logits
            logits = whole
        try:
            values = adjust(logits, seq, path, self.eos_token_ids)
        except RequestError:  # its grammar is given up: the sequences beside it go on
            return np.arange(count), np.full(count, -np.inf)
        best = np.argsort(-values, kind="stable")[: max(CANDIDATES, count)].astype(np.int64)
        if not np.isfinite(values[best[0]]):
            return best[:count], np.full(len(best[:count]), -np.inf)
        if seq.params.greedy:
            total = np.log(np.exp(values - values[best[0]]).sum())
            best = best[:count]
            return best, values[best] - values[best[0]] - total
        tokens, log_probs = _sampled(values[best][None], best[None], seq, len(path), count)
        return tokens[0], log_probs[0]


def _sampled(logits: Floats, ids: Ints, seq: Sequence, num_path: int, count: int) -> tuple[Ints, Floats]:
    """Of rows of candidates [T, n], falling, those with the largest log p + noise, and the log-shares of these sums.

    What top-k, top-p or min-p leave out of the head's distribution, the target may still have: it comes later.
    """
    params = seq.params
    with np.errstate(all="ignore"):
        values: Floats = (logits - logits[:, :1]) / (params.temperature or 1.0)
        kept = np.ones(values.shape, np.bool_)
        if params.min_p > 0.0:
            kept &= values >= np.log(params.min_p)
        if params.top_k > 0:
            kept[:, params.top_k :] = False
        if params.top_p < 1.0:
            weights = np.where(kept, np.exp(values), 0.0)
            before = np.cumsum(weights, axis=1) - weights
            kept &= before < params.top_p * weights.sum(axis=1, keepdims=True)
        values[~kept] -= LEFT_OUT
        values += gumbel_noise(seq.seed, len(seq) + num_path, ids)
        best = np.argsort(-values, axis=1, kind="stable")[:, :count]
        rows = np.arange(len(best))[:, None]
        values -= values[rows, best[:, :1]]
        values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
        return ids[rows, best], values[rows, best]
