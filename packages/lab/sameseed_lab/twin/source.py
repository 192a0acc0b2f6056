"""The weights of a twin, row by row: the small model's in their places (`layout.py`), random weights elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import Shapes, TensorSource
from sameseed_lab.twin.layout import PENALTY, SIGNAL, TwinLayout

# Entries of a row map for rows without weights of the small model.
RANDOM = -1
ZERO = -2
QUIET = -3  # random, but 0 in the columns whose inputs are not 0
BEFORE_Q = ("input_layernorm.weight", "hidden_norm.weight")
NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Image:
    """The placement of a matrix [O, K] of the small model in a matrix [O', K'] of the big one."""

    rows: Tensor  # int64 [O']: index of the small model's row, or RANDOM, ZERO, QUIET
    columns: tuple[Tensor, ...]  # int64 [K] each: columns of a small row's values; each tensor holds one copy
    factor: float = 1.0  # factor of the small model's values: a power of two
    muted: Tensor = NONE  # int64: further columns that are 0 in rows of the small model and in QUIET rows
    constant: tuple[int, float, float] | None = None  # column of the constant; its value in small rows, in QUIET ones


class TwinSource(RandomCheckpoint):
    """Tensor source of the big model, in the small one's dtype; norms that this cannot hold exactly are float32."""

    def __init__(
        self,
        layout: TwinLayout,
        small: TensorSource,
        seed: int = 0,
        shapes: Shapes | None = None,
        typical: str = "model.embed_tokens.weight",
    ) -> None:
        """`shapes`: of the tensors, if not a whole model's. `typical`: the tensor of `small` whose dtype is used."""
        super().__init__(layout.config, seed, small.dtype(typical), shapes)
        self.shapes = self._shapes
        self.layout = layout
        self.small = small
        self._live_layer = {big: i for i, big in enumerate(layout.layers)}
        self._image = lru_cache(maxsize=2)(self._placed_image)  # cached, because a matrix is read chunk by chunk

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self.tensor(name).dtype if "norm" in name else self._dtype

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        if "norm" not in name:
            return super().tensor(name)
        at = self.layout
        value = torch.full((at.config.hidden_size,), at.norm_scale, dtype=torch.float64)
        if self._is_live(name):
            own = self.small.tensor(self._small_name(name)).double() * at.norm_scale
            # Only q reads the second copy of the residual stream; other matrices after this norm must not.
            shares = (1.0, at.copy_share if name.endswith(BEFORE_Q) else 0.0)
            for first, share in zip(at.copies, shares, strict=False):
                value[first : first + len(own)] = own * share
            if at.constant is not None:
                last = name in ("model.norm.weight", "norm.weight")  # the norm before the LM head
                value[at.constant] = at.norm_scale * SIGNAL / at.constant_value if last else 0.0
        rounded = value.to(self._dtype)
        return rounded if torch.equal(rounded.double(), value) else value.float()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of a matrix."""
        image = self._image(name)
        rows = image.rows[start:stop]
        zero, quiet = rows == ZERO, rows == QUIET
        if bool(zero.all()):  # the common case for many matrices: skip generating noise
            return torch.zeros(stop - start, self._shapes[name][1], dtype=self._dtype)
        out = super().rows(name, start, stop)  # [n, K']
        if bool(zero.any()):
            out[zero] = 0
        if bool(quiet.any()):
            part = out if bool(quiet.all()) else out[quiet]
            for column in (*image.columns, image.muted):
                part.index_fill_(1, column, 0)
            if image.constant is not None:
                # Padding tokens: no random values beside this large one, since they would share a quantization scale.
                part.zero_()
                part[:, image.constant[0]] = image.constant[2]
            if part is not out:
                out[quiet] = part
        live = (rows >= 0).nonzero().squeeze(1)
        if len(live):
            first, last = int(rows[live].min()), int(rows[live].max())
            values = self._small_rows(name, first, last + 1)[rows[live] - first]
            values = (values.float() * image.factor).to(self._dtype)  # exact
            own = out[live]
            own[:, image.muted] = 0
            for column in image.columns:
                own[:, column] = values
            if image.constant is not None:
                own[:, image.constant[0]] = image.constant[1]
            out[live] = own
        return out

    def _small_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.small.rows(self._small_name(name), start, stop)

    def _small_name(self, name: str) -> str:
        if name == "lm_head.weight" and self.layout.small.tied_embeddings:
            return "model.embed_tokens.weight"
        words = name.split(".")
        if words[1] == "layers":
            words[2] = str(self._live_layer[int(words[2])])
        return ".".join(words)

    def _is_live(self, name: str) -> bool:
        words = name.split(".")
        return words[1] != "layers" or int(words[2]) in self._live_layer

    def _placed_image(self, name: str) -> Image:
        """The image of a matrix."""
        kind = name.split(".")[-2].removesuffix("_proj")
        if self._is_live(name):
            return self._make_image(kind)
        return Image(torch.full((self._shapes[name][0],), ZERO if kind in ("v", "up") else RANDOM), ())

    def _hidden(self) -> tuple[Tensor, ...]:
        """Dimensions of the residual stream that hold the small model, one tensor per copy."""
        return tuple(torch.arange(self.layout.small.hidden_size) + first for first in self.layout.copies)

    def _entering(self) -> tuple[Tensor, ...]:
        """Columns of q, k and v that read the residual stream, one tensor per copy."""
        return self._hidden()

    def _make_image(self, kind: str) -> Image:
        """The image of a matrix of a live layer, of the embedding or of the LM head."""
        at, copies, pairs = self.layout, self._entering(), torch.tensor(self.layout.pairs)
        second = copies[1] if len(copies) > 1 else NONE
        if kind in ("embed_tokens", "lm_head"):
            return self._vocabulary(kind == "lm_head")
        if kind == "q":
            return Image(self._head_rows(at.heads, pairs, RANDOM, RANDOM), copies, at.query_scale)
        if kind == "k":
            return Image(self._head_rows(at.kv_heads, pairs, ZERO, RANDOM), copies[:1], muted=second)
        if kind == "v":
            places = torch.arange(at.small.head_dim)
            return Image(self._head_rows(at.kv_heads, places, ZERO, ZERO), copies[:1], muted=second)
        if kind == "o":
            return self._attention_output()
        neurons = torch.arange(at.config.intermediate_size)
        if kind == "down":
            return Image(self._outputs(), (neurons[: at.small.intermediate_size],))
        neurons[at.small.intermediate_size :] = RANDOM if kind == "gate" else ZERO
        return Image(neurons, self._hidden()[:1])  # the norm before it sets a second copy to 0

    def _vocabulary(self, head: bool) -> Image:
        at = self.layout
        rows = torch.arange(at.config.vocab_size)
        rows[at.small.vocab_size :] = QUIET if head or at.config.tied_embeddings else RANDOM
        copies, value = self._hidden(), 0.0 if head else at.constant_value
        constant = None if at.constant is None else (at.constant, value, -PENALTY)
        if head:
            return Image(rows, copies[:1], constant=constant)
        # The residual stream keeps everything an embedding adds, so an embedding row is 0 except for the copies and the
        # constant. With a tied head, the constant adds the same value to all logits of the small model's tokens.
        others = torch.ones(at.config.hidden_size, dtype=torch.bool)
        others[torch.cat(copies)] = False
        return Image(rows, copies, muted=others.nonzero().squeeze(1), constant=constant)

    def _head_rows(self, heads: tuple[int | None, ...], within: Tensor, spare: int, surplus: int) -> Tensor:
        """Row map of q, k or v: small heads' rows at `within` [D], `spare` beside them, `surplus` in other heads."""
        dim, small = self.layout.config.head_dim, self.layout.small.head_dim
        rows = torch.full((len(heads), dim), surplus)
        for i, head in enumerate(heads):
            if head is not None:
                rows[i] = spare
                rows[i, within] = torch.arange(small) + head * small
        return rows.view(-1)

    def _outputs(self) -> Tensor:
        """Row map of o and down: the small model's rows in every copy, QUIET rows elsewhere."""
        rows = torch.full((self.layout.config.hidden_size,), QUIET)
        for columns in self._hidden():
            rows[columns] = torch.arange(len(columns))
        return rows

    def _attention_output(self) -> Image:
        at = self.layout
        group = at.config.num_heads // at.config.num_kv_heads
        places = torch.arange(at.small.head_dim)
        columns = torch.empty(at.small.num_heads, at.small.head_dim, dtype=torch.int64)
        muted = list[Tensor]()
        for i, head in enumerate(at.heads):
            if head is not None:
                columns[head] = places + i * at.config.head_dim
            elif at.kv_heads[i // group] is not None:  # a surplus query head on a live KV head: its output is not 0
                muted.append(places + i * at.config.head_dim)
        return Image(self._outputs(), (columns.view(-1),), muted=torch.cat(muted) if muted else NONE)
