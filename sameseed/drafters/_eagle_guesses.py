"""Candidate tokens from a draft head's logits: the target's likely choices, with their log-probabilities.

With sampling, the target's own noise is included: it is known before the target chooses (coupled sampling).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sameseed.drafters._choices import Floats, Ints, likely
from sameseed.errors import RequestError
from sameseed.request import Sequence
from sameseed.spec.sampling import adjust, needs_adjusting


class Guesses:
    """Turns logits over the head's vocabulary into candidate tokens, given as token ids of the target."""

    def __init__(self, target_ids: Tensor | None, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """`target_ids` [Vd]: the target's token id for each id of the head; None if the ids are the same."""
        self.target_ids = None if target_ids is None else target_ids.cpu().numpy().astype(np.int32)
        self.vocab_size = vocab_size  # the target's
        self.eos_token_ids = tuple(eos_token_ids)

    def rows(self, logits: Tensor) -> NDArray[np.float32]:
        """A pass's logits [R, Vd] on the host. On a GPU this is the only point where the host waits for the pass."""
        rows: NDArray[np.float32] = logits.cpu().numpy()
        return rows

    def after(
        self, rows: NDArray[np.float32], seq: Sequence, depth: int, count: int, paths: Callable[[], Seq[Seq[int]]]
    ) -> tuple[Ints, Floats]:
        """`likeliest` after each of `paths`, which have `depth` tokens, with all penalties, bias and bans."""
        if needs_adjusting(seq, depth):
            return self.adjusted(rows, seq, paths(), count)
        return self.likeliest(rows, seq, depth, count)

    def likeliest(self, rows: NDArray[np.float32], seq: Sequence, num_path: int, count: int) -> tuple[Ints, Floats]:
        """The target's likely choices [n, count] `num_path` tokens after the sequence, from logits [n, Vd].

        Returns the tokens and their log-probabilities (-inf: no token). Greedy: the likeliest tokens. Sampled: the
        tokens with the largest log p + noise, and their shares of exp(log p + noise). The target will choose the
        largest of its own log p plus the same noise.
        """
        return likely(rows, seq, num_path, count, self.target_ids)

    def adjusted(
        self, rows: NDArray[np.float32], seq: Sequence, paths: Seq[Seq[int]], count: int
    ) -> tuple[Ints, Floats]:
        """`likeliest` after each path with penalties, bias and bans, which need rows over the target's vocabulary."""
        tokens, log_probs = np.zeros((len(rows), count), np.int64), np.full((len(rows), count), -np.inf)
        for i, (row, path) in enumerate(zip(rows, paths, strict=True)):
            whole = row
            if self.target_ids is not None:
                whole = np.full(self.vocab_size, -np.inf, np.float32)
                whole[self.target_ids] = row
            # A grammar that took too much time raises: this path gets no candidates, the other sequences go on.
            with suppress(RequestError):
                values = adjust(whole, seq, path, self.eos_token_ids)
                tokens[i : i + 1], log_probs[i : i + 1] = likely(values[None], seq, len(path), count)
        return tokens, log_probs
