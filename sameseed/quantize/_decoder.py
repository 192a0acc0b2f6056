"""A decoder layer in plain float32 PyTorch, for calibration: only one layer is in memory at a time.

Letters besides those of `ops`: B rows of the calibration set, S tokens of a row, I feed-forward width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sameseed import scheme as formats
from sameseed.models.config import ModelConfig
from sameseed.models.layers import rope_table
from sameseed.models.weights import TensorSource
from sameseed.ops import reference
from sameseed.scheme import QuantTensor

Q, K, V, O = (f"self_attn.{n}_proj" for n in "qkvo")  # noqa: E741 - the field's own names
GATE, UP, DOWN = (f"mlp.{n}_proj" for n in ("gate", "up", "down"))
# Linear layers that read the same input, in the order of the forward pass. With one scheme they form one product.
STAGES: dict[str, tuple[str, ...]] = {"qkv": (Q, K, V), "o": (O,), "gate_up": (GATE, UP), "down": (DOWN,)}
INPUT_NORM, POST_NORM = "input_layernorm", "post_attention_layernorm"
NORM_OF = {"qkv": INPUT_NORM, "gate_up": POST_NORM}  # stage -> the norm whose output it reads
CHUNK = 8192  # tokens that pass a layer at one time
CPU = torch.device("cpu")


@dataclass
class Linear:
    """A linear layer: weight [O, K], bias [O], float32. Once quantized, `weight` holds the decoded values of `q`."""

    weight: Tensor
    bias: Tensor | None = None
    q: QuantTensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., O]; x is first rounded as products with the stored weight round it."""
        return F.linear(x if self.q is None else as_read(x, self.q), self.weight, self.bias)

    def store(self, q: QuantTensor) -> None:
        self.q, self.weight = q, formats.get(q.format).decode(q)

    def to(self, device: torch.device) -> Linear:
        bias = None if self.bias is None else self.bias.to(device)
        return Linear(self.weight.to(device), bias, None if self.q is None else moved(self.q, device))


def moved(q: QuantTensor, device: torch.device) -> QuantTensor:
    """A stored weight with its parts on `device`."""
    return replace(q, parts={name: part.to(device) for name, part in q.parts.items()})


def as_read(x: Tensor, q: QuantTensor) -> Tensor:
    """x [..., K] as a product with `q` reads it: rounded to int8, fp8 or bf16 if `q.activations` says so."""
    if q.activations == "outliers":
        rest, outliers = formats.split_outliers(x)
        return as_read(rest, replace(q, activations="int8")) + outliers
    if q.activations != "int8":
        return formats.float_rows(x, q)
    codes, scales = formats.quantize_rows(x, q.group)
    return (codes.float().view(*scales.shape, q.group) * scales[..., None]).flatten(-2)


@dataclass
class Block:
    """One decoder layer: its linear layers and norms by name (without the prefix `model.layers.N.`)."""

    index: int
    linears: dict[str, Linear]
    norms: dict[str, Tensor]

    @property
    def prefix(self) -> str:
        """The prefix of the layer's tensor names in a checkpoint."""
        return f"model.layers.{self.index}."

    def copy(self) -> Block:
        """A new block with the same tensors; replacing a tensor in the copy does not change this block."""
        return Block(self.index, {n: replace(linear) for n, linear in self.linears.items()}, dict(self.norms))

    def to(self, device: torch.device) -> Block:
        return Block(
            self.index,
            {name: linear.to(device) for name, linear in self.linears.items()},
            {name: norm.to(device) for name, norm in self.norms.items()},
        )


def read_block(config: ModelConfig, source: TensorSource, index: int, device: torch.device = CPU) -> Block:
    """Layer `index` of a model, float32, on `device`."""
    at = f"model.layers.{index}."
    biased = {Q: config.qkv_bias, K: config.qkv_bias, V: config.qkv_bias, O: config.o_bias}

    def read(name: str) -> Tensor:
        return source.tensor(at + name).to(device).float()

    linears = {
        name: Linear(read(f"{name}.weight"), read(f"{name}.bias") if biased.get(name, config.mlp_bias) else None)
        for names in STAGES.values()
        for name in names
    }
    norms = {name: read(f"{name}.weight") for name in (INPUT_NORM, POST_NORM)}
    if config.qk_norm:
        norms |= {name: read(f"{name}.weight") for name in ("self_attn.q_norm", "self_attn.k_norm")}
    return Block(index, linears, norms)


class DecoderLayers:
    """The forward pass of a decoder layer: the input of each product, and the output of the layer."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device = CPU) -> None:
        self.config = config
        self.device = device
        self.rope = rope_table(config.rope, config.head_dim, length).to(device)
        self.eps = config.rms_eps

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., C] divided by its root mean square, times weight [C]."""
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def attend(self, block: Block, x: Tensor) -> Tensor:
        """The input of `o_proj` [B, S, H D], from the input x [B, S, C] of q, k and v."""
        c = self.config
        rows, length = x.shape[:2]
        q = block.linears[Q](x).view(rows, length, c.num_heads, c.head_dim)
        k, v = (block.linears[n](x).view(rows, length, c.num_kv_heads, c.head_dim) for n in (K, V))
        if c.qk_norm:
            q, k = self.norm(q, block.norms["self_attn.q_norm"]), self.norm(k, block.norms["self_attn.k_norm"])
        positions = torch.arange(length, device=x.device).repeat(rows)
        if block.index not in c.still_layers:
            q, k = (reference.rope(t.flatten(0, 1), positions, self.rope).view_as(t) for t in (q, k))
        q, k, v = (t.repeat_interleave(c.num_heads // t.shape[2], 2).transpose(1, 2) for t in (q, k, v))  # [B, H, S, D]
        window, mask = c.windows[block.index], None
        if window is not None:
            distance = positions[:length, None] - positions[None, :length]
            mask = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=c.score_factor)
        return out.transpose(1, 2).flatten(2)

    def after_attention(self, block: Block, h: Tensor) -> Tensor:
        """h [B, S, C] plus the output of attention."""
        return h + block.linears[O](self.attend(block, self.norm(h, block.norms[INPUT_NORM])))

    def inner(self, block: Block, x: Tensor) -> Tensor:
        """The input of `down_proj` [B, S, I], from the input x [B, S, C] of gate and up."""
        return F.silu(block.linears[GATE](x)) * block.linears[UP](x)

    def layer(self, block: Block, h: Tensor) -> Tensor:
        """The output of a layer [B, S, C] for the input h."""
        return self.after_mlp(block, self.after_attention(block, h))

    def after_mlp(self, block: Block, h: Tensor) -> Tensor:
        """h [B, S, C] plus the output of the feed-forward block."""
        return h + block.linears[DOWN](self.inner(block, self.norm(h, block.norms[POST_NORM])))

    def inputs(self, block: Block, stage: str, h: Tensor) -> Tensor:
        """The input of a stage's products; h: input of the layer (qkv, o) or of its second half (gate_up, down)."""
        if stage in ("qkv", "o"):
            x = self.norm(h, block.norms[INPUT_NORM])
            return x if stage == "qkv" else self.attend(block, x)
        x = self.norm(h, block.norms[POST_NORM])
        return x if stage == "gate_up" else self.inner(block, x)


def chunks(h: Tensor) -> Iterator[Tensor]:
    """Views of the hidden states h [B, S, C], some rows each."""
    yield from torch.split(h, max(1, CHUNK // h.shape[1]))
