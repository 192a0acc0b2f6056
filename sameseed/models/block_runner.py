"""BlockRunner: a block head with its KV cache. It stores rows of the target's states, and guesses blocks after them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from sameseed.batch import Batch, Draw, Rows, build_batch, pack, slots_of
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.cache import KVCache
from sameseed.models.block import BlockHead
from sameseed.request import Sequence


class BlockRunner:
    """Runs a block head over sequences that own blocks of its cache."""

    def __init__(self, head: BlockHead, cache: KVCache) -> None:
        self.model = head
        self.cache = cache
        self.blocks = BlockManager(cache.num_blocks, cache.block_size)

    def extend(
        self,
        holders: Seq[Sequence],
        tokens: Seq[Seq[int]],
        hidden: Seq[Tensor],
        wants_logits: bool,
        draws: Seq[Draw] | None = None,
    ) -> tuple[Tensor, Tensor, None]:
        """Add rows to the cache: for each of holder b's tokens one row, from the target's hidden states [n, F].

        Only the number of tokens matters. `wants_logits` and `draws` are ignored: logits and features are empty, and
        there are no choices.
        """
        rows = [Rows(t, s.num_cached, [], [], s.blocks, False) for s, t in zip(holders, tokens, strict=True)]
        batch = build_batch(rows, self.cache.block_size)
        self.model.inject(hidden[0] if len(hidden) == 1 else torch.cat(list(hidden)), batch, self.cache)
        for s, t in zip(holders, tokens, strict=True):
            s.num_cached += len(t)
        nothing = torch.empty(0, 1)
        return nothing, nothing, None

    def guess(self, holders: Seq[Sequence], last: Seq[int], counts: Seq[int]) -> Tensor:
        """Logits [sum of counts, Vd] of the first counts[b] guesses after the token last[b], which follows b's rows.

        The rows of a block stay in the cache behind the holder's rows until they are overwritten.
        """
        return self.model.guess(self._batch(holders, last, counts), self.cache)

    def _batch(self, holders: Seq[Sequence], last: Seq[int], counts: Seq[int]) -> Batch:
        config = self.model.config
        size, first = config.block_size, config.block_size - config.num_guesses
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        ends: list[int] = []
        for holder, token, count in zip(holders, last, counts, strict=True):
            known = holder.num_cached
            logit_rows += range(len(tokens) + first, len(tokens) + first + count)
            tokens += [token] + [config.mask_token] * (size - 1)
            positions += range(known, known + size)
            ends += [known + size - 1] * size
            slots += slots_of(holder.blocks, known, known + size, self.cache.block_size)
        offsets = list(range(0, len(tokens) + 1, size))
        # Every place attends to the whole block, so attention treats each row as the last one with all others before.
        masks = [(1 << size) - 1] * len(tokens)
        numbers = (tokens, positions, slots, offsets, [0] * len(holders), [h.num_cached for h in holders], logit_rows)
        batch = pack(numbers, [h.blocks for h in holders], masks)
        return replace(batch, key_positions=torch.tensor(ends, dtype=torch.int32, device="cpu"))
