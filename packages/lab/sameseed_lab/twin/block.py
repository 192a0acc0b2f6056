"""The twin of a block head: its layers are placed as a model's, fc and LM head as those of an EAGLE-3 head's twin.

Every place of a block, and every context row that fc makes, carries the constant, so that all norms agree. The Markov
head's rank grows with zeros: further columns of its embedding are 0, those of its projection random.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sameseed.models.head_config import BlockConfig
from sameseed_lab.twin.head import HeadTwinSource
from sameseed_lab.twin.source import QUIET, RANDOM, Image


class BlockTwinSource(HeadTwinSource):
    """Tensor source of the big block head."""

    def _entering(self) -> tuple[Tensor, ...]:
        return self._hidden()  # q, k and v read the residual stream, as in a model

    def _make_image(self, kind: str) -> Image:
        if kind not in ("markov_w1", "markov_w2"):
            return super()._make_image(kind)
        assert isinstance(self.head.config, BlockConfig)
        columns = torch.arange(self.head.config.markov_rank)
        live, other = columns[: self.head.markov_rank], columns[self.head.markov_rank :]
        if kind == "markov_w1":
            rows = torch.arange(self.layout.config.vocab_size)
            rows[self.layout.small.vocab_size :] = RANDOM  # no text has a padding token
            return Image(rows, (live,), muted=other)
        rows = torch.arange(len(self.head.target_ids))
        rows[self.head.num_live :] = QUIET  # padding tokens get no bias
        return Image(rows, (live,))
