"""The trainable block head (DFlash: Chen et al., 2026; DSpark: DeepSeek-AI, 2026), for many blocks of a text at once.

A block is a token of the text, its anchor, followed by masks. Its places attend to the target's states at all positions
before the anchor, and to each other. Parameter names are those of the published checkpoints.

Letters as in `models.block`; B texts of a batch, N states of a text, K blocks of a text, S places of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sameseed.models.config import ModelConfig
from sameseed.models.head_config import BlockConfig
from sameseed.models.layers import rope_table
from sameseed_train.head_model import DraftHead, Drafts, rope_scaling
from sameseed_train.head_recipe import HeadRecipe
from sameseed_train.learning import Right
from sameseed_train.model import Attention, Mlp, RMSNorm, llama_config, rotate
from sameseed_train.states import TextStates


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


@dataclass(frozen=True)
class BlockBatch:
    """Blocks of some texts, with G drafts each, K blocks per text.

    tokens int64 [B, K, G]: the text's token before each draft, so the anchor's token comes first. states float32
    [B, N, F]; anchors int64 [B, K]: positions in the text. counts bool [B, K, G]: drafts that are trained on. places
    int64 [B, K, G]: the row of each draft in `last` [P, C], the target's last-layer states before the drafted tokens;
    written int64 [P]: the tokens that the texts have there.
    """

    tokens: Tensor
    states: Tensor
    anchors: Tensor
    counts: Tensor
    places: Tensor
    last: Tensor
    written: Tensor

    @property
    def num_trained(self) -> int:
        return int(self.counts.sum())


def choose_anchors(text: TextStates, most: int, generator: torch.Generator | None) -> Tensor:
    """Positions int64 of at most `most` anchors: random, or without a generator the first ones.

    The target wrote these tokens (or the whole text is trained on), and it has states before them.
    """
    first = max(1, text.num_given)
    able = torch.arange(first, max(first, len(text.states)))
    chosen = able if generator is None else able[torch.randperm(len(able), generator=generator)]
    return chosen[:most].sort().values


class BlockForTraining(DraftHead):
    """A block head."""

    config: BlockConfig

    def __init__(self, config: BlockConfig, seed: int) -> None:
        """Initial weights as in `DraftHead.fill`, but the Markov head's bias starts at zero."""
        super().__init__()
        self.config, c = config, config.layer
        self.fc = nn.Linear(config.num_captures * config.target_hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_eps)
        self.layers = nn.ModuleList(BlockLayer(c) for _ in range(c.num_layers))
        self.add_output(config)
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            self.markov_head = MarkovHead(c.vocab_size, config.draft_vocab_size, config.markov_rank)
        table = rope_table(c.rope, c.head_dim, c.max_model_len + config.block_size)
        self.register_buffer("rope", table, persistent=False)  # [P, D]
        self.fill(seed)
        if self.markov_head is not None:
            nn.init.zeros_(self.markov_head.markov_w2.weight)

    def batch(self, texts: Seq[TextStates], columns: list[int], anchors: list[Tensor]) -> BlockBatch:
        """Blocks at `anchors` of each text; `columns`: indices of the head's captures among the stored states."""
        width, num_drafts = self.config.target_hidden_size, self.config.num_guesses
        num = max(1, *(len(a) for a in anchors))
        longest = max(len(t.states) for t in texts)
        tokens = torch.zeros(len(texts), num, num_drafts, dtype=torch.long)
        places, at = torch.zeros_like(tokens), torch.ones(len(texts), num, dtype=torch.long)
        counts = torch.zeros_like(tokens, dtype=torch.bool)
        states = torch.zeros(len(texts), longest, len(columns) * width)
        last, written, before = list[Tensor](), list[Tensor](), 0
        for b, (text, own) in enumerate(zip(texts, anchors, strict=True)):
            stored = text.states.view(len(text.states), -1, width)  # [N, L, C]
            states[b, : len(stored)] = stored[:, columns].flatten(1).float()
            after = own[:, None] + torch.arange(num_drafts)  # position of the token before each draft
            inside = after.clamp(max=len(stored) - 1)
            at[b, : len(own)], counts[b, : len(own)] = own, after < len(stored)
            tokens[b, : len(own)] = text.ids.long()[inside]
            first = int(own.min()) if len(own) else len(stored)
            places[b, : len(own)] = before + inside - first
            last.append(stored[first:, -1].float())
            written.append(text.ids[first + 1 :].long())
            before += len(stored) - first
        parts = (tokens, states, at, counts, places, torch.cat(last), torch.cat(written))
        return BlockBatch(*(t.to(self.device) for t in parts))

    def lesson(
        self, texts: Seq[TextStates], columns: list[int], recipe: HeadRecipe, step: int, generator: torch.Generator
    ) -> BlockBatch:
        return self.batch(texts, columns, [choose_anchors(text, recipe.block.anchors, generator) for text in texts])

    def outputs(self, batch: BlockBatch, embedding: Tensor) -> Tensor:
        """Normed outputs [B, K, G, C] of the blocks' drafts; a block's input is its anchor token, then masks."""
        ids = torch.full((*batch.anchors.shape, self.config.block_size), self.config.mask_token, device=self.device)
        ids[..., 0] = batch.tokens[..., 0]
        return self(embedding[ids], batch.states, batch.anchors)  # type: ignore[no-any-return]

    def output_rows(self, outputs: Tensor, before: Tensor) -> Tensor:
        """Rows [R, C + A] whose product with `output_weight` gives the logits after the tokens `before` [R]."""
        if self.markov_head is None:
            return outputs
        return torch.cat((outputs, self.markov_head.markov_w1(before)), dim=-1)

    def output_weight(self, lm_head: Tensor) -> Tensor:
        """LM head and Markov head side by side: [Vd, C + A]."""
        if self.markov_head is None:
            return lm_head
        return torch.cat((lm_head, self.markov_head.markov_w2.weight), dim=-1)

    def drafts(self, batch: BlockBatch, embedding: Tensor, recipe: HeadRecipe) -> list[Drafts]:
        counts = batch.counts
        rows = self.output_rows(self.outputs(batch, embedding)[counts], batch.tokens[counts])
        decay = [math.exp(-g / recipe.block.decay) for g in range(counts.shape[-1])]
        weights = torch.tensor(decay, device=counts.device)
        shares = (weights / weights.sum() / counts.sum((0, 1)).clamp(min=1)).expand(counts.shape)[counts]
        return [(rows, batch.places[counts], shares)]

    def right(
        self, text: TextStates, columns: list[int], embedding: Tensor, lm_head: Tensor, ids: Tensor, num: int
    ) -> Right:
        """As `HeadForTraining.right`."""
        count = max(0, len(text.ids) - 1 - max(1, text.num_given))
        right = [[False] * count for _ in range(num)]
        if not count:
            return right
        batch = self.batch([text], columns, [choose_anchors(text, count, None)])
        rows = self.output_rows(self.outputs(batch, embedding)[0].flatten(0, 1), batch.tokens[0].flatten())
        best = ids[(rows @ self.output_weight(lm_head).T).argmax(-1).cpu()].view(count, -1)
        for k, anchor in enumerate(batch.anchors[0].tolist()):
            for g in range(min(num, count - k)):
                right[g][k + g] = int(best[k, g]) == int(text.ids[anchor + 1 + g])
        return right

    def layout(self, dtype: str) -> dict[str, Any]:
        """config.json in the layout of speculators (`dspark`, or `dflash` without a Markov head)."""
        c = self.config.layer
        layer = llama_config(c, c.max_model_len, c.rope.theta) | {
            "architectures": [c.architecture],
            "model_type": "qwen3" if c.qk_norm else "llama",
            "rope_scaling": rope_scaling(c.rope),
            "tie_word_embeddings": False,
        }
        return {**self.config.settings(), "torch_dtype": dtype, "transformer_layer_config": layer}

    def forward(self, embedding: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """embedding [B, K, S, C] of blocks, states [B, N, F], anchors int64 [B, K] -> normed outputs of the drafts.

        The outputs are [B, K, num_guesses, C]; draft g is for the token g + 1 places after the anchor.
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
