"""Twins of draft heads: a head for a target's twin, which drafts what the small head drafts for the small target.

The rules are those of `layout.py`. fc copies the constant into the head's residual stream, for its padding tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.models.head_config import HeadConfig
from sameseed.models.weights import TensorSource
from sameseed_lab.twin.layout import PENALTY, TwinLayout, make_layout
from sameseed_lab.twin.source import NONE, QUIET, Image, TwinSource

DRAFT_VOCAB = 32000  # draft vocabulary of published heads for targets with a large vocabulary
NAMES = "midlayer"


@dataclass(frozen=True)
class HeadLayout:
    """The placement of a small head in a big one. `target_ids` [Vd']: target token id of each draft token."""

    layout: TwinLayout  # of the head's layers
    target: TwinLayout
    config: HeadConfig
    target_ids: Tensor
    num_live: int  # draft tokens of the small head; they come first

    @property
    def raw(self) -> dict[str, Any]:
        """config.json without the dtype."""
        layers = {"eagle_aux_hidden_state_layer_ids": list(self.config.aux_layers or ()), "use_aux_hidden_state": True}
        own = {"draft_vocab_size": self.config.draft_vocab_size, "eagle_config": layers}
        return {**self.layout.raw, "architectures": ["LlamaForCausalLMEagle3"], **own}


def make_head_layout(
    head: HeadConfig,
    target_ids: Tensor | None,  # [Vd]: the target's id of each draft token; None: the same ids
    target: TwinLayout,
    raw: Mapping[str, Any],
    num_tokens: int | None = None,  # in the twin's draft vocabulary; None: DRAFT_VOCAB, if it can be padded
    name: str = "the shape",
) -> HeadLayout:
    """The layout of a head's twin for its target's twin. `raw`: the head's config.json. Raises ConfigError."""
    head.check_target(target.small)
    _check_kind(head)
    num_layers = head.layer.num_layers
    shape = replace(target.config, num_layers=num_layers, windows=(None,) * num_layers, tied_embeddings=False)
    layout = make_layout(head.layer, shape, raw, name)
    same = ("copies", "constant", "constant_value")
    if any(getattr(layout, name) != getattr(target, name) for name in same):
        raise ConfigError(
            f"the head has head_dim {head.layer.head_dim} and rms_norm_eps {head.layer.rms_eps:g}, its target "
            f"{target.small.head_dim} and {target.small.rms_eps:g}; a twin needs them to be the same"
        )
    live = torch.arange(head.draft_vocab_size) if target_ids is None else target_ids.long()
    ids = _draft_ids(live, target.config.vocab_size, layout.constant is not None, num_tokens)
    config = replace(
        head,
        layer=layout.config,
        draft_vocab_size=len(ids),
        target_hidden_size=target.config.hidden_size,
        aux_layers=tuple(target.layers[i] + 1 for i in head.captures(target.small.num_layers)),
    )
    return HeadLayout(layout, target, config, ids, len(live))


def _check_kind(head: HeadConfig) -> None:
    """Raise ConfigError for a head that no twin can equal."""
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    odd = [f"with {flag}" for flag in flags if getattr(head, flag)]
    if head.kind != "eagle3":
        odd.insert(0, f"of kind {head.kind!r}")
    if head.layer.qk_norm:
        odd.append("with norms of queries and keys")
    if head.layer.hidden_size != head.target_hidden_size:
        odd.append("of another width than its target")
    if odd:
        raise ConfigError(f"no twin is made of a head {odd[0]}; take a plain EAGLE-3 head of the target's width")


def _draft_ids(live: Tensor, vocab_size: int, padded: bool, num_tokens: int | None) -> Tensor:
    """Target ids of the draft tokens: the head's own, then padding that it never drafts. Raises ConfigError."""
    free = torch.ones(vocab_size, dtype=torch.bool)
    free[live] = False
    largest = vocab_size if padded else len(live)
    wanted = min(max(len(live), DRAFT_VOCAB), largest) if num_tokens is None else num_tokens
    if not len(live) <= wanted <= largest:
        raise ConfigError(f"the draft vocabulary must have {len(live)} to {largest} tokens, got {wanted}")
    return torch.cat([live, free.nonzero().flatten()[: wanted - len(live)]])


class HeadTwinSource(TwinSource):
    """Tensor source of the big head. `small`: the small head's checkpoint. `target`: the checkpoint of its target."""

    def __init__(
        self,
        head: HeadLayout,
        small: TensorSource,
        target: TensorSource,
        shapes: Mapping[str, Any],
        at: str,
        seed: int = 0,
    ) -> None:
        """`shapes`: of the small head's own tensors (others it shares with its target). `at`: name of its layer."""
        own = head.config.tensors(NAMES)
        if "embed_tokens.weight" not in shapes:
            del own["embed_tokens.weight"]  # the twin also shares its target's embedding
        super().__init__(head.layout, small, seed, own, f"{at}.self_attn.o_proj.weight")
        self.head = head
        self._target = target
        self._at = at
        self._borrows = "lm_head.weight" not in shapes

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
            out[constant - start, constant] = 1  # copies the constant of the first captured layer
        return out

    def _small_rows(self, name: str, start: int, stop: int) -> Tensor:
        if name == "lm_head.weight" and self._borrows:
            tied = self.head.target.small.tied_embeddings
            return self._target.rows("model.embed_tokens.weight" if tied else name, start, stop)
        return super()._small_rows(name, start, stop)

    def _small_name(self, name: str) -> str:
        return name.replace(NAMES, self._at, 1) if name.startswith(NAMES) else name

    def _entering(self) -> tuple[Tensor, ...]:
        """Columns of q, k and v, one tensor per copy: normed embeddings, then normed features."""
        width = self.layout.config.hidden_size
        return tuple(torch.cat([places, places + width]) for places in self._hidden())

    def _make_image(self, kind: str) -> Image:
        width, count, constant = self.layout.config.hidden_size, self.head.config.num_captures, self.layout.constant
        if kind == "lm_head":
            rows = torch.arange(len(self.head.target_ids))
            rows[self.head.num_live :] = QUIET
            return Image(rows, self._hidden()[:1], constant=None if constant is None else (constant, 0.0, -PENALTY))
        if kind == "fc":
            first, *muted = (torch.cat([places + i * width for i in range(count)]) for places in self._hidden())
            if constant is not None:
                muted.append(torch.arange(count) * width + constant)
            return Image(self._outputs(), (first,), muted=torch.cat(muted) if muted else NONE)
        return super()._make_image(kind)
