"""Twins of draft heads: an EAGLE-3 head for a target's twin, which drafts what the small head drafts for the target.

What the twin's captured layers hold is the small target's own: live dimensions, a constant, and zeros. The rules are
those of `layout.py`; fc brings the constant along into the head's stream, so that its padding tokens lose as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.models.eagle_config import HeadConfig, expected_tensors
from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import TensorSource
from sameseed.study.twin.layout import PENALTY, TwinLayout, make_layout, raw_config
from sameseed.study.twin.source import QUIET, Image, TwinSource

DRAFT_VOCAB = 32000  # tokens of a published head for a large vocabulary
NAMES = "midlayer"


@dataclass(frozen=True)
class HeadLayout:
    """Where a small head lies in a big one. `target_ids` [Vd']: the target's token of each of its own."""

    layout: TwinLayout  # of its one layer
    target: TwinLayout
    config: HeadConfig
    target_ids: Tensor
    num_live: int  # tokens of the small head: the first of them

    def raw_config(self, raw: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """config.json; `raw` is the small head's."""
        made = raw_config(self.layout, raw, dtype)
        return {
            **made,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.config.draft_vocab_size,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.config.aux_layers or ()),
                "use_aux_hidden_state": True,
            },
        }


def make_head_layout(
    head: HeadConfig,
    target_ids: Tensor | None,
    target: TwinLayout,
    raw: Mapping[str, Any],
    num_tokens: int | None = None,
    name: str = "the shape",
) -> HeadLayout:
    """Place a head (config.json `raw`; its tokens are the target's `target_ids` [Vd]) beside its target's twin.

    `num_tokens`: the twin's draft vocabulary, None: as large as published ones are, where it can be padded. Raises
    ConfigError where the head is of a kind, or has dimensions, of which no twin is exact.
    """
    head.check_target(target.small)
    _check_head(head)
    shape = replace(target.config, num_layers=1, windows=(None,), tied_embeddings=False)
    layout = make_layout(head.layer, shape, raw, name)
    if (layout.copies, layout.constant, layout.constant_value) != (
        target.copies,
        target.constant,
        target.constant_value,
    ):
        raise ConfigError(
            f"the head has head_dim {head.layer.head_dim} and rms_norm_eps {head.layer.rms_eps:g}, its target "
            f"{target.small.head_dim} and {target.small.rms_eps:g}; a twin needs them to be the same"
        )
    live = torch.arange(head.draft_vocab_size) if target_ids is None else target_ids.long()
    ids = _padded(live, target.config.vocab_size, num_tokens, layout.constant is not None)
    config = replace(
        head,
        layer=layout.config,
        draft_vocab_size=len(ids),
        target_hidden_size=target.config.hidden_size,
        aux_layers=tuple(target.layers[i] + 1 for i in head.captures(target.small.num_layers)),
    )
    return HeadLayout(layout, target, config, ids, len(live))


def _check_head(head: HeadConfig) -> None:
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    odd = ["of EAGLE-1"] if head.kind != "eagle3" else [f"with {f}" for f in flags if getattr(head, f)]
    if odd or head.layer.hidden_size != head.target_hidden_size:
        raise ConfigError(
            f"no twin is made of a head {odd[0] if odd else 'of another width than its target'}; take a plain EAGLE-3 "
            "head of the target's width"
        )


def _padded(live: Tensor, vocab_size: int, num_tokens: int | None, can_pad: bool) -> Tensor:
    """The target's token of each of the big head's: the small head's own, then tokens that it does not guess."""
    largest = vocab_size if can_pad else len(live)
    wanted = min(max(len(live), DRAFT_VOCAB), largest) if num_tokens is None else num_tokens
    if not len(live) <= wanted <= largest:
        raise ConfigError(
            f"the draft vocabulary must have {len(live)} to {largest} tokens, got {wanted}: the head's own, and "
            "padding where the target's twin has padding too"
        )
    free = torch.ones(vocab_size, dtype=torch.bool)
    free[live] = False
    return torch.cat([live, free.nonzero().flatten()[: wanted - len(live)]])


class HeadTwinSource(TwinSource):
    """A `Source` of the big head. `small`: the small head's checkpoint; `target`: that of its target."""

    def __init__(
        self,
        head: HeadLayout,
        small: TensorSource,
        target: TensorSource,
        shapes: Mapping[str, Any],
        at: str,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """`shapes`: of the tensors that the small head has (some it may share with its target), `at`: its layer."""
        self.head = head
        self.layout = head.layout
        self.small = small
        self.device = device
        self._target = target
        self._at = at
        self._type = small.dtype(f"{at}.self_attn.o_proj.weight")
        self.shapes = expected_tensors(head.config, NAMES)
        if "embed_tokens.weight" not in shapes:
            del self.shapes["embed_tokens.weight"]  # the twin shares its target's, too
        self._shapes = self.shapes
        self._borrows = "lm_head.weight" not in shapes
        self._noise = RandomCheckpoint(head.layout.config, seed, self._type, self.shapes, device)
        self._image = lru_cache(maxsize=2)(self._placed_image)

    def dtype(self, name: str) -> torch.dtype:
        return torch.int64 if name == "d2t" else super().dtype(name)

    def tensor(self, name: str) -> Tensor:
        if name == "d2t":
            return self.head.target_ids - torch.arange(len(self.head.target_ids))
        return super().tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        out = super().rows(name, start, stop)
        constant = self.layout.constant
        if name == "fc.weight" and constant is not None and start <= constant < stop:
            out[constant - start] = 0
            out[constant - start, constant] = 1  # of the first captured layer
        return out

    def _small_rows(self, name: str, start: int, stop: int) -> Tensor:
        if name == "lm_head.weight" and self._borrows:
            tied = self.head.target.small.tied_embeddings
            return self._target.rows("model.embed_tokens.weight" if tied else name, start, stop)
        return self.small.rows(self._small_name(name), start, stop)

    def _small_name(self, name: str) -> str:
        return name.replace(NAMES, self._at, 1) if name.startswith(NAMES) else name

    def _norm(self, name: str) -> Tensor:
        own = self.small.tensor(self._small_name(name))
        read_by_q = name.endswith(("input_layernorm.weight", "hidden_norm.weight"))
        return self._placed_norm(own, read_by_q, name == "norm.weight")

    def _make_image(self, name: str) -> Image | None:
        kind = name.split(".")[-2].removesuffix("_proj")
        return {
            "embed_tokens": lambda: self._vocabulary(head=False), "lm_head": self._lm_head, "fc": self._fc,
            "q": self._q, "k": self._k, "v": self._v, "o": self._o,
            "gate": self._gate, "up": self._up, "down": self._down,
        }[kind]()  # fmt: skip

    def _entering(self) -> tuple[Tensor, ...]:
        """Columns of q, k and v: normed embeddings, then normed features."""
        width = self.layout.config.hidden_size
        return tuple(torch.cat([places, places + width]) for places in self._hidden())

    def _fc(self) -> Image:
        width, count = self.layout.config.hidden_size, self.head.config.num_captures
        first, *others = (torch.cat([places + i * width for i in range(count)]) for places in self._hidden())
        constant = self.layout.constant
        muted = others if constant is None else [*others, torch.arange(count) * width + constant]
        return Image(self._outputs(), (first,), 1.0, torch.cat(muted) if muted else torch.empty(0, dtype=torch.int64))

    def _lm_head(self) -> Image:
        rows = torch.arange(len(self.head.target_ids))
        rows[self.head.num_live :] = QUIET
        constant = None if self.layout.constant is None else (self.layout.constant, 0.0, -PENALTY)
        return Image(rows, self._hidden()[:1], 1.0, torch.empty(0, dtype=torch.int64), constant)
