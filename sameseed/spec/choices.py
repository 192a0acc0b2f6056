"""The tokens that come first under the target's noise, for drafts that hold more than one of a place.

The target's choice is the largest of its log-probability plus noise (coupled sampling, `sampling.py`). Where a
drafter's largest is not it, its second often is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from sameseed.request import SamplingParams, Sequence
from sameseed.spec import sampling

if sampling.HAS_NATIVE:
    from sameseed import _native

SHARE_AMONG = 4  # sampled tokens, at least, whose exponentials a share is of: csrc/sampling.h has the same
Choices = list[tuple[int, float]]


def choices(logits: NDArray[np.float32], seq: Sequence, path: Seq[int], eos_token_ids: Seq[int], count: int) -> Choices:
    """At most `count` tokens after the sequence's known tokens and `path`, the likeliest first, with their shares.

    From logits float32 [V] there. The first is what `sampling.choose` says; none where that fails. A share guesses how
    often the target chooses that token: greedy its probability, sampled its part of exp(log p + noise) of the first.
    """
    row = sampling.adjusted(logits, seq, path, eos_token_ids)
    found = native_choices if sampling.HAS_NATIVE else numpy_choices
    return found(row, seq.params, seq.seed, len(seq) + len(path), count)


def numpy_choices(
    logits: NDArray[np.floating], params: SamplingParams, seed: int, position: int, count: int
) -> Choices:
    """The meaning of `choices`, for a row [V] of adjusted logits."""
    row = logits.astype(np.float64)
    if not np.isfinite(row.max()):
        return []
    if params.greedy:
        ids = np.flatnonzero(row > -np.inf)
        scores = row[ids]
        total = np.exp(scores - scores.max()).sum()
    else:
        ids, values = sampling.survivors(row, params)
        scores, total = values + sampling.gumbel_noise(seed, position, ids), 0.0
    first = np.argsort(-scores, kind="stable")[: count if params.greedy else max(count, SHARE_AMONG)]
    shares = np.exp(scores[first] - scores[first[0]])
    shares /= total or shares.sum()
    return list(zip(ids[first].tolist(), shares.tolist(), strict=True))[:count]


def native_choices(row: NDArray[np.floating], params: SamplingParams, seed: int, position: int, count: int) -> Choices:
    """numpy_choices in C++ (csrc/sampling.cpp), for a row float32 or float64 [V]."""
    row = np.ascontiguousarray(row)
    return _native.choices(*sampling.native_args(row, params, seed, position), count)
