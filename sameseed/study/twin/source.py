"""The weights of a twin, row by row: a small model's own in their places (`layout.py`), and random ones around them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import TensorSource, expected_shapes
from sameseed.scheme import QuantScheme, QuantTensor
from sameseed.study.twin.layout import PENALTY, SIGNAL, TwinLayout

# What a row is that carries none of the small model's, in a map of rows.
RANDOM = -1
ZERO = -2
QUIET = -3  # random, but 0 where inputs are not


@dataclass(frozen=True)
class Image:
    """How a matrix [O, K] of the small model lies in one [O', K'] of the big one."""

    rows: Tensor  # int64 [O']: the small row there, or RANDOM, ZERO, QUIET
    columns: tuple[Tensor, ...]  # int64 [K] each: where a small row's values go, once for each
    factor: float  # what they are multiplied with: a power of two
    muted: Tensor  # int64: further columns that are 0 in rows of the small model, and in QUIET ones
    constant: tuple[int, float, float] | None = None  # column of the constant; its value in small rows, in QUIET ones

    def to(self, device: str) -> Image:
        """The same with its maps on `device`."""
        columns = tuple(c.to(device) for c in self.columns)
        return Image(self.rows.to(device), columns, self.factor, self.muted.to(device), self.constant)


class TwinSource:
    """A `Source` of the big model, in the small one's type; norms that it cannot hold exactly are float32.

    Random weights have variance 1/K, as a trained model's have more or less. Matrices are put together on `device`:
    numbers are moved, halved and doubled, so that their bits are the same on all.
    """

    def __init__(self, layout: TwinLayout, small: TensorSource, seed: int = 0, device: str = "cpu") -> None:
        self.layout = layout
        self.small = small
        self.device = device
        self._type = small.dtype("model.embed_tokens.weight")
        self._noise = RandomCheckpoint(layout.config, seed, self._type, device=device)
        self._shapes = expected_shapes(layout.config)
        self._live_layer = {big: i for i, big in enumerate(layout.layers)}
        self._image = lru_cache(maxsize=2)(self._placed_image)  # chunk after chunk of one matrix

    def scheme(self, name: str) -> QuantScheme | None:
        """None: nothing is quantized."""
        return None

    def stored(self, name: str) -> QuantTensor:
        """Nothing is stored in a scheme."""
        raise NotImplementedError

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self.tensor(name).dtype if "norm" in name else self._type

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        if "norm" not in name:
            return self.rows(name, 0, self._shapes[name][0])
        value = self._norm(name)
        rounded = value.to(self._type)
        return rounded if torch.equal(rounded.double(), value) else value.float()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of a matrix."""
        out = self._noise.rows(name, start, stop)  # [n, K']
        image = self._image(name)
        if image is None:
            return out
        rows = image.rows[start:stop]
        out[rows == ZERO] = 0
        quiet = (rows == QUIET).nonzero()  # [m, 1]
        if len(quiet):
            for column in (*image.columns, image.muted):
                out[quiet, column] = 0
            if image.constant is not None:
                # Padding tokens: nothing random beside so large a value, which would be rounded with it.
                out[quiet] = 0
                out[quiet, image.constant[0]] = image.constant[2]
        live = (rows >= 0).nonzero().squeeze(1)
        if len(live):
            out[live] = self._live(name, image, rows[live], out[live])
        return out

    def _live(self, name: str, image: Image, rows: Tensor, out: Tensor) -> Tensor:
        """`out` [n, K'] with small rows [n] in their columns."""
        first, last = int(rows.min()), int(rows.max())
        values = self._small_rows(name, first, last + 1).to(self.device)[rows - first]
        values = (values.float() * image.factor).to(self._type)  # exact
        out[:, image.muted] = 0
        for column in image.columns:
            out[:, column] = values
        if image.constant is not None:
            out[:, image.constant[0]] = image.constant[1]
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

    # --- norms ---

    def _norm(self, name: str) -> Tensor:
        """Weights float64 [C'] of a norm."""
        at, words = self.layout, name.split(".")
        if words[1] == "layers" and int(words[2]) not in self._live_layer:
            return torch.full((at.config.hidden_size,), at.norm_scale, dtype=torch.float64)
        own = self.small.tensor(self._small_name(name))
        return self._placed_norm(own, "input_layernorm" in name, name == "model.norm.weight")

    def _placed_norm(self, small: Tensor, read_by_q: bool, last: bool) -> Tensor:
        """Weights of a norm of the small model in their places; `last`: it is the one before the LM head."""
        at = self.layout
        out = torch.full((at.config.hidden_size,), at.norm_scale, dtype=torch.float64)
        own = small.double() * at.norm_scale
        # Only q reads the second copy: what else follows a norm would count it.
        shares = (1.0, at.copy_share if read_by_q else 0.0)
        for first, share in zip(at.copies, shares, strict=False):
            out[first : first + len(own)] = own * share
        if at.constant is not None:
            out[at.constant] = at.norm_scale * SIGNAL / at.constant_value if last else 0.0
        return out

    # --- matrices ---

    def _placed_image(self, name: str) -> Image | None:
        image = self._make_image(name)
        return None if image is None else image.to(self.device)

    def _make_image(self, name: str) -> Image | None:
        """Where the small model lies in a matrix; None: nowhere, all is random."""
        words = name.split(".")
        if words[1] != "layers":
            return self._vocabulary(head=name == "lm_head.weight")
        kind = words[-2].removesuffix("_proj")
        live = int(words[2]) in self._live_layer
        if not live:
            zero = torch.full((self._shapes[name][0],), ZERO if kind in ("v", "up") else RANDOM)
            return Image(zero, (), 1.0, _none())
        return {
            "q": self._q, "k": self._k, "v": self._v, "o": self._o,
            "gate": self._gate, "up": self._up, "down": self._down,
        }[kind]()  # fmt: skip

    def _hidden(self) -> tuple[Tensor, ...]:
        """The stream's dimensions, copy by copy."""
        return tuple(torch.arange(self.layout.small.hidden_size) + first for first in self.layout.copies)

    def _entering(self) -> tuple[Tensor, ...]:
        """The columns of q, k and v that read the stream, copy by copy."""
        return self._hidden()

    def _vocabulary(self, head: bool) -> Image:
        at = self.layout
        size, tied = at.small.vocab_size, at.config.tied_embeddings
        rows = torch.arange(at.config.vocab_size)
        rows[size:] = QUIET if head or tied else RANDOM
        copies = self._hidden()
        if head:
            constant = None if at.constant is None else (at.constant, 0.0, -PENALTY)
            return Image(rows, copies[:1], 1.0, _none(), constant)
        # What an embedding holds is in the stream for good: 0 but for the copies and the constant. As a tied head it
        # adds the same to all logits of the small model's tokens.
        others = torch.ones(at.config.hidden_size, dtype=torch.bool)
        others[torch.cat(copies)] = False
        constant = None if at.constant is None else (at.constant, at.constant_value, -PENALTY)
        return Image(rows, copies, 1.0, others.nonzero().squeeze(1), constant)

    def _head_rows(self, heads: tuple[int | None, ...], within: Tensor, spare: int, surplus: int) -> Tensor:
        """Map of the rows of q, k or v: `within` [D] are the small head's places in a big one.

        `spare`: what the other rows of its heads are; `surplus`: those of other heads.
        """
        dim, small = self.layout.config.head_dim, self.layout.small.head_dim
        rows = torch.full((len(heads), dim), surplus)
        for i, head in enumerate(heads):
            if head is not None:
                rows[i] = spare
                rows[i, within] = torch.arange(small) + head * small
        return rows.view(-1)

    def _q(self) -> Image:
        at = self.layout
        rows = self._head_rows(at.heads, torch.tensor(at.pairs), RANDOM, RANDOM)
        return Image(rows, self._entering(), at.query_scale, _none())

    def _k(self) -> Image:
        rows = self._head_rows(self.layout.kv_heads, torch.tensor(self.layout.pairs), ZERO, RANDOM)
        return self._one_copy(rows)

    def _v(self) -> Image:
        rows = self._head_rows(self.layout.kv_heads, torch.arange(self.layout.small.head_dim), ZERO, ZERO)
        return self._one_copy(rows)

    def _one_copy(self, rows: Tensor) -> Image:
        """A matrix that reads the first copy of the stream, and not the second."""
        first, *others = self._entering()
        return Image(rows, (first,), 1.0, torch.cat(others) if others else _none())

    def _outputs(self) -> Tensor:
        """Map of the rows of o and down: every copy, and nothing beside."""
        rows = torch.full((self.layout.config.hidden_size,), QUIET)
        for columns in self._hidden():
            rows[columns] = torch.arange(len(columns))
        return rows

    def _o(self) -> Image:
        at = self.layout
        group = at.config.num_heads // at.config.num_kv_heads
        places = torch.arange(at.small.head_dim)
        columns = torch.empty(at.small.num_heads, at.small.head_dim, dtype=torch.int64)
        muted = [_none()]
        for i, head in enumerate(at.heads):
            if head is not None:
                columns[head] = places + i * at.config.head_dim
            elif at.kv_heads[i // group] is not None:  # it reads values of the small model: nobody asked it to
                muted.append(places + i * at.config.head_dim)
        return Image(self._outputs(), (columns.view(-1),), 1.0, torch.cat(muted))

    def _gate(self) -> Image:
        return self._neurons(RANDOM)

    def _up(self) -> Image:
        return self._neurons(ZERO)

    def _neurons(self, surplus: int) -> Image:
        rows = torch.arange(self.layout.config.intermediate_size)
        rows[self.layout.small.intermediate_size :] = surplus
        return Image(rows, self._hidden()[:1], 1.0, _none())  # the norm before it leaves 0 of a second copy

    def _down(self) -> Image:
        columns = torch.arange(self.layout.small.intermediate_size)
        return Image(self._outputs(), (columns,), 1.0, _none())


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.int64)
