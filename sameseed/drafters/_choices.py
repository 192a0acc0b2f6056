"""The best few tokens under the target's noise, for drafts with several candidates at a position.

If the target's choice (`sampling.py`) is not the drafter's first token under the same noise, it is often its second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sameseed.errors import RequestError
from sameseed.request import SamplingParams, Sequence
from sameseed.spec import sampling

if sampling.HAS_NATIVE:
    from sameseed import _native

SHARE_AMONG = 8  # with sampling, a share is computed among at least so many tokens; csrc/sampling.h has the same value
LEFT_OUT = 3.0  # subtracted, in trees, from the logits of tokens that truncation excludes; also in csrc/sampling.h
Rows = NDArray[np.floating]
Ids = NDArray[np.int32] | None  # of the target's vocabulary, for the columns of rows; None: their indices
Choices = list[tuple[int, float]]
Likely = tuple[NDArray[np.int64], NDArray[np.float64]]


def choices(logits: NDArray[np.float32], seq: Sequence, path: Seq[int], eos_token_ids: Seq[int], count: int) -> Choices:
    """At most `count` tokens after the sequence's known tokens and `path`, the likeliest first, with their shares.

    `logits`: float32 [V] at that position. The first token is that of `sampling.choose`; the list is empty if that
    fails. A share estimates the probability that the target chooses the token: with greedy decoding its probability,
    with sampling its share of exp(log p + noise) among the first tokens.
    """
    row = sampling.adjusted(logits, seq, path, eos_token_ids)
    found = native_choices if sampling.HAS_NATIVE else numpy_choices
    return found(row, seq.params, seq.seed, len(seq) + len(path), count)


def numpy_choices(logits: Rows, params: SamplingParams, seed: int, position: int, count: int) -> Choices:
    """The specification of `choices`, for a row [V] of adjusted logits."""
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


def native_choices(row: Rows, params: SamplingParams, seed: int, position: int, count: int) -> Choices:
    """`numpy_choices` in C++ (csrc/sampling.cpp), for a row float32 or float64 [V]."""
    row = np.ascontiguousarray(row)
    return _native.choices(*sampling.native_args(row, params, seed, position), count)


def likely(rows: Rows, seq: Sequence, num_path: int, count: int, ids: Ids = None) -> Likely:
    """For trees: the first `count` tokens for each row, int64 [n, count], and the logs of their shares (-inf: none).

    As `choices`, for `rows` [n, V] of adjusted logits `num_path` tokens after the sequence; but tokens excluded by
    truncation are only penalized by `LEFT_OUT`, since the target's distribution may keep them. `ids` [V]: the token id
    of each column, if that is not the column's index.
    """
    found = native_likely if sampling.HAS_NATIVE else numpy_likely
    tokens, shares = found(rows, seq.params, seq.seed, len(seq) + num_path, count, ids)
    with np.errstate(divide="ignore"):
        return tokens, np.log(shares)


def numpy_likely(rows: Rows, params: SamplingParams, seed: int, position: int, count: int, ids: Ids) -> Likely:
    """The specification of `likely`: tokens and shares [n, count], 0 for none."""
    tokens, shares = np.zeros((len(rows), count), np.int64), np.zeros((len(rows), count))
    for row, own_tokens, own_shares in zip(rows, tokens, shares, strict=True):
        values = row.astype(np.float64)
        if params.greedy or not np.isfinite(values.max()):
            found = numpy_choices(values, params, seed, position, count)
        else:
            _, kept = sampling.survivors(values, params)
            places, scores = sampling.survivors(values, replace(params, min_p=0.0, top_k=0, top_p=1.0))
            scores[scores < kept.min()] -= LEFT_OUT
            scores += sampling.gumbel_noise(seed, position, places if ids is None else ids[places].astype(np.int64))
            first = np.argsort(-scores, kind="stable")[: max(count, SHARE_AMONG)]
            exps = np.exp(scores[first] - scores[first[0]])
            found = list(zip(places[first].tolist(), (exps / exps.sum()).tolist(), strict=True))[:count]
        for i, (place, share) in enumerate(found):
            own_tokens[i], own_shares[i] = place if ids is None else ids[place], share
    return tokens, shares


def native_likely(rows: Rows, params: SamplingParams, seed: int, position: int, count: int, ids: Ids) -> Likely:
    """`numpy_likely` in C++ (csrc/sampling.cpp), for rows float32 or float64."""
    rows = np.ascontiguousarray(rows)
    tokens, shares = np.empty((len(rows), count), np.int64), np.empty((len(rows), count))
    if len(rows):
        own = None if ids is None else np.ascontiguousarray(ids, np.int32)
        where = 0 if own is None else own.ctypes.data
        args = sampling.native_args(rows[0], params, seed, position)
        _native.likely(*args, len(rows), where, count, tokens.ctypes.data, shares.ctypes.data)
    return tokens, shares


class Guesses:
    """Turns logits over a head's vocabulary into candidate tokens, given as token ids of the target."""

    def __init__(self, target_ids: Tensor | None, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """`target_ids` [Vd]: the target's token id for each id of the head; None if the ids are the same."""
        self.target_ids = None if target_ids is None else target_ids.cpu().numpy().astype(np.int32)
        self.vocab_size = vocab_size  # the target's
        self.eos_token_ids = tuple(eos_token_ids)

    def rows(self, logits: Tensor) -> NDArray[np.float32]:
        """A pass's logits [R, Vd] on the host. On a GPU this is the only point where the host waits for the pass."""
        rows: NDArray[np.float32] = logits.cpu().numpy()
        return rows

    def after(self, rows: NDArray[np.float32], seq: Sequence, paths: Seq[Seq[int]], count: int) -> Likely:
        """`likely` after each of `paths`, which have equal lengths, with all penalties, bias and bans."""
        depth = len(paths[0])
        if not sampling.needs_adjusting(seq, depth):
            return likely(rows, seq, depth, count, self.target_ids)
        tokens, log_probs = np.zeros((len(rows), count), np.int64), np.full((len(rows), count), -np.inf)
        for i, (row, path) in enumerate(zip(rows, paths, strict=True)):
            whole = row
            if self.target_ids is not None:  # what adjusts needs a row over the target's vocabulary
                whole = np.full(self.vocab_size, -np.inf, np.float32)
                whole[self.target_ids] = row
            # A grammar that took too much time raises: this path gets no candidates, the other sequences go on.
            with suppress(RequestError):
                values = sampling.adjust(whole, seq, path, self.eos_token_ids)
                tokens[i : i + 1], log_probs[i : i + 1] = likely(values[None], seq, len(path), count)
        return tokens, log_probs


def grows_at_once(seqs: Seq[Sequence]) -> bool:
    """May the native code grow the drafts of these sequences? Not if each token must be examined in Python."""
    return sampling.HAS_NATIVE and all(map(sampling.shaped_by_model, seqs))


def growing_tree(
    seq: Sequence, depth: int, ids: NDArray[np.int32] | None, ending: Iterable[int], **sizes: Any
) -> _native.GrowingTree:
    """A tree of `depth` levels for the native code to grow (csrc/grow.h); `sizes`: its other fields."""
    draws = [sampling.draw_of(seq.params, seq.seed, len(seq) + level) for level in range(depth)]
    first = draws[0]
    return _native.GrowingTree(
        depth=depth,
        greedy=first.greedy,
        temperature=first.divisor,
        floor=first.floor,
        top_k=first.top_k,
        top_p=first.top_p,
        keys=[draw.key for draw in draws],
        ids=0 if ids is None else ids.ctypes.data,
        ending=list(ending),
        **sizes,
    )
