"""mtp drafter: the target's block for multi-token prediction (DeepSeek-V3, 2024) drafts a chain."""

from __future__ import annotations

from dataclasses import dataclass

from sameseed.batch import MAX_NODES
from sameseed.drafters.eagle import EagleDrafter
from sameseed.fields import within


class MtpDrafter(EagleDrafter):
    """The block inside the target's checkpoint, applied again for each token; it keeps a cache of one layer."""

    @dataclass(frozen=True)
    class Options(EagleDrafter.Options):
        top_k: int = within(1, 1, MAX_NODES, help="as eagle's, but a chain unless it is given")

    owns = "head"
    inside = True


DRAFTER = MtpDrafter
