"""The trainable block head (DFlash: Chen et al., 2026; DSpark: DeepSeek-AI, 2026), for many blocks of a text at once.

A block is a token of the text, its anchor, followed by masks. Its places attend to the target's states at all positions
before the anchor, and to each other. Parameter names are those of the published checkpoints.

Letters as in `models.block`; B texts of a batch, N states of a text, K blocks of a text, S places of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sameseed.models.config import ModelConfig
from sameseed.models.head_config import BlockConfig
from sameseed.models.layers import rope_table
from sameseed_train.model import Attention, Mlp, RMSNorm, rotate


class BlockLayer(nn.Module):
    """A decoder layer that also attends to keys and values computed from the target's states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config, config.hidden_size)
        if config.qk_norm:
            self.self_attn.q_norm = RMSNorm(config.head_dim, config.rms_eps)
            self.self_attn.k_norm = RMSNorm(config.head_dim, config.rms_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, context: Tensor, seen: Tensor, own: Tensor, before: Tensor) -> Tensor:
        """Run blocks x [B, K, S, C] over context [B, N, C]; seen bool [B, K, N]: context positions of a block.

        Rotary tables: own [B, K, S, D] of the blocks, before [N, D] of the context.
        """
        a, c, (b, k, s, _) = self.self_attn, self.config, x.shape
        group, d, normed = c.num_heads // c.num_kv_heads, c.head_dim, self.input_layernorm(x)
        q = self._turned(a.q_proj(normed).view(b, k, s, -1, d), own, "q_norm")  # [B, K, S, H, D]
        q = q.view(b, k, s, -1, group, d).permute(0, 3, 1, 4, 2, 5)  # [B, Hk, K, G, S, D]
        keys = self._turned(a.k_proj(normed).view(b, k, s, -1, d), own, "k_norm").permute(0, 3, 1, 2, 4)
        values = a.v_proj(normed).view(b, k, s, -1, d).permute(0, 3, 1, 2, 4)  # [B, Hk, K, S, D]
        n = context.shape[1]
        known = self._turned(a.k_proj(context).view(b, n, -1, d), before, "k_norm").transpose(1, 2)  # [B, Hk, N, D]
        meant = a.v_proj(context).view(b, n, -1, d).transpose(1, 2)
        scores = (q.flatten(2, 4) @ known.transpose(-1, -2)).view(b, -1, k, group * s, n)
        scores = scores.masked_fill(~seen[:, None, :, None], float("-inf"))
        mine = q.flatten(3, 4) @ keys.transpose(-1, -2)  # [B, Hk, K, G S, S]
        weights = torch.softmax(torch.cat((scores, mine), -1) * d**-0.5, -1)
        out = (weights[..., :n].flatten(2, 3) @ meant).view(b, -1, k, group * s, d) + weights[..., n:] @ values
        out = out.view(b, -1, k, group, s, d).permute(0, 2, 4, 1, 3, 5).reshape(b, k, s, -1)
        h = x + a.o_proj(out)
        return h + self.mlp(self.post_attention_layernorm(h))  # type: ignore[no-any-return]

    def _turned(self, x: Tensor, angles: Tensor, norm: str) -> Tensor:
        """x [..., H, D], normed if the layer has q and k norms, then rotated by angles [..., D]."""
        if self.config.qk_norm:
            x = getattr(self.self_attn, norm)(x)
        cos, sin = angles[..., None, :].chunk(2, dim=-1)
        return rotate(x, cos, sin)


class MarkovHead(nn.Module):
    """A bias on the logits that depends on the token before: markov_w2 times that token's row of markov_w1."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)


class BlockForTraining(nn.Module):
    """A block head. The embedding, and with a whole vocabulary the LM head, are the target's and are not trained."""

    def __init__(self, config: BlockConfig, seed: int) -> None:
        """Initial weights are normal with standard deviation 0.02; the Markov head's bias starts at zero."""
        super().__init__()
        self.config, c = config, config.layer
        self.fc = nn.Linear(config.num_captures * config.target_hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_eps)
        self.layers = nn.ModuleList(BlockLayer(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_eps)
        if config.draft_vocab_size < c.vocab_size:
            self.lm_head = nn.Linear(c.hidden_size, config.draft_vocab_size, bias=False)
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            self.markov_head = MarkovHead(c.vocab_size, config.draft_vocab_size, config.markov_rank)
        table = rope_table(c.rope, c.head_dim, c.max_model_len + config.block_size)
        self.register_buffer("rope", table, persistent=False)  # [P, D]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                if weight.ndim == 2:
                    weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
            if self.markov_head is not None:
                self.markov_head.markov_w2.weight.zero_()

    def forward(self, embedding: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """embedding [B, K, S, C] of blocks, states [B, N, F], anchors int64 [B, K] -> normed outputs of guesses.

        The outputs are [B, K, num_guesses, C]; guess g is for the token g + 1 places after the anchor.
        """
        rope: Tensor = self.rope  # type: ignore[assignment]
        n, size = states.shape[1], self.config.block_size
        context = self.hidden_norm(self.fc(states))  # [B, N, C]
        seen = torch.arange(n, device=states.device) < anchors[..., None]  # [B, K, N]
        own = rope[anchors[..., None] + torch.arange(size, device=states.device)]  # [B, K, S, D]
        x = embedding
        for layer in self.layers:
            x = layer(x, context, seen, own, rope[:n])
        return self.norm(x[:, :, size - self.config.num_guesses :])  # type: ignore[no-any-return]

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())
