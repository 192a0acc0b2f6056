"""The trainable Llama: a plain `nn.Module` whose parameter names are those of a Hugging Face checkpoint.

Letters: B rows of a batch, S tokens of a row, C hidden, H/Hk heads / KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sameseed.errors import ConfigError
from sameseed.models.config import LLAMA, ModelConfig, sizes_of
from sameseed_train.losses import fused_cross_entropy


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama model, as in its Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 2048


def shape_of(c: ModelConfig) -> ModelShape:
    """The sizes of a model with this config."""
    sizes = {f.name: getattr(c, f.name) for f in fields(ModelShape) if hasattr(c, f.name)}
    return ModelShape(**sizes, rope_theta=c.rope.theta, max_positions=c.max_model_len)


def llama_config(shape: ModelShape | ModelConfig, max_positions: int, theta: float) -> dict[str, Any]:
    """The config.json of a model of this size, readable by `transformers` and sameseed; without an end token."""
    made = {**LLAMA, **sizes_of(shape), "max_position_embeddings": max_positions, "rms_norm_eps": shape.rms_eps}
    made |= {"rope_scaling": None, "rope_theta": theta, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    return dict(sorted(made.items()))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)  # under autocast x may be bfloat16


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions `[..., S]`, each `[..., S, D/2]` (Su et al., 2021)."""
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)  # [D/2]
    angles = positions.float()[..., None] * inverse  # [..., S, D/2]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of x `[..., D]` by cos, sin that broadcast to `[..., D/2]`, as Hugging Face stores Llama."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


ATTENTION_BLOCK = 64  # queries that are processed together


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention of q `[B, H, S, D]` to k and v `[B, Hk, S, D]`; returns `[B, H, S, D]`.

    A block of queries is multiplied only with the keys up to its end, and the queries of one KV head are stacked. This
    halves the work of a full masked product, and is faster than PyTorch's attention on a CPU for such small heads.
    """
    b, heads, s, d = q.shape
    kv_heads, repeats = k.shape[1], heads // k.shape[1]
    out = []
    for start in range(0, s, ATTENTION_BLOCK):
        end = min(s, start + ATTENTION_BLOCK)
        rows = q[:, :, start:end].reshape(b, kv_heads, repeats * (end - start), d) * d**-0.5
        seen = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start).repeat(repeats, 1)
        scores = (rows @ k[:, :, :end].transpose(-1, -2)).float().masked_fill(~seen, -1e30)
        shares = torch.softmax(scores, dim=-1).to(v.dtype)
        out.append((shares @ v[:, :, :end]).view(b, heads, end - start, d))
    return torch.cat(out, dim=2)


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions; `width`: of the input of q, k and v."""

    def __init__(self, shape: ModelShape | ModelConfig, width: int) -> None:
        super().__init__()
        self.shape = shape
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.k_proj = nn.Linear(width, kv_heads, bias=False)
        self.v_proj = nn.Linear(width, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        """Over rows x [B, S, C]; seen bool [B, S, S]: which places a place attends to, if not all before it."""
        b, s, _ = x.shape
        d, repeats = self.shape.head_dim, self.shape.num_heads // self.shape.num_kv_heads
        cos, sin = cos[..., None, :], sin[..., None, :]  # [..., S, 1, D/2]: the same for all heads
        q = rotate(self.q_proj(x).view(b, s, -1, d), cos, sin).transpose(1, 2)  # [B, H, S, D]
        k = rotate(self.k_proj(x).view(b, s, -1, d), cos, sin).transpose(1, 2)  # [B, Hk, S, D]
        v = self.v_proj(x).view(b, s, -1, d).transpose(1, 2)
        if seen is None:
            out = causal_attention(q, k, v)
        else:
            k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """The gated feed-forward block: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One transformer layer: attention, then the feed-forward block, each with a norm before it and a residual."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, seen)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


def read_rows(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Run a layer over whole rows `[B, S, C]`; `compile_layers` compiles this function."""
    return layer(x, cos, sin)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)


class LlamaForTraining(nn.Module):
    """A Llama model with tied embeddings; `state_dict` names equal those of `transformers`."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        """Initial weights are normal with standard deviation 0.02; those of o and down smaller by sqrt(2 * layers)."""
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.read_rows: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor] = read_rows
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim < 2:
                    continue
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * self.shape.num_layers) ** 0.5 if small else 0.02
                weight.normal_(0.0, std, generator=generator)

    def compile_layers(self) -> None:
        """Compile the layers for ordinary rows. Raises ConfigError where there is no C++ compiler (CPU only)."""
        if self.device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise ConfigError("train.compile needs a C++ compiler; install g++, or set compile = false in the recipe")
        self.read_rows = torch.compile(read_rows, dynamic=False)

    def hidden(self, ids: Tensor, positions: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """Token ids `[B, S]` to normed hidden states `[B, S, C]`; `positions` `[B, S]`, `seen` bool `[B, S, S]`."""
        places = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
        cos, sin = rope_table(places, self.shape.head_dim, self.shape.rope_theta)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = self.read_rows(layer, x, cos, sin) if seen is None else layer(x, cos, sin, seen)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids `[B, S]` to logits `[B, S, V]`."""
        return self.hidden(ids) @ self.model.embed_tokens.weight.T

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy over targets `[B, S]` that are not negative; ids `[B, S]`."""
        hidden = self.hidden(ids).flatten(0, 1)  # [B*S, C]
        return fused_cross_entropy(hidden, self.model.embed_tokens.weight, targets.flatten())

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.embed_tokens.weight.device

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())
