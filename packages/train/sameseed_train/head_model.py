"""The trainable EAGLE-3 head, unrolled on its own features as in drafting (training-time test: Li et al., 2025).

Row t of a text pairs the target's hidden states at position t with token t + 1 and drafts token t + 2. At unrolled
step s, the feature of row t is the head's own output of row t - 1 at step s - 1. The row attends to the rows up to
t - s of step 0, which drafting would find in its KV cache, and to its own path. Parameter names are those of the
published checkpoint.

Letters as in `models.eagle`; B texts of a batch, N rows of a text, A rows that are run, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sameseed.models.config import ModelConfig, RopeConfig
from sameseed.models.head_config import HeadConfig
from sameseed.models.layers import rope_table
from sameseed_train.learning import Right
from sameseed_train.losses import fused_soft_cross_entropy, soft_targets
from sameseed_train.model import Attention, Mlp, RMSNorm, llama_config, rotate
from sameseed_train.recipe import HeadRecipe
from sameseed_train.states import TextStates


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The `rope_scaling` entry of a config.json; None without scaling."""
    if rope.kind == "default":
        return None
    bands = {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    more = {**bands, "original_max_position_embeddings": rope.original_max_len} if rope.kind == "llama3" else {}
    return {"rope_type": rope.kind, "factor": rope.factor, **more}


class HeadLayer(nn.Module):
    """The decoder layer of a head; q, k and v read [norm(embedding); norm(feature)]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)


@dataclass(frozen=True)
class DraftRows:
    """The rows of a batch of texts that are run as queries. All rows give keys and values."""

    index: Tensor  # int64 [A]: in the flattened [B, N], ascending: rows that draft or lead to a row that drafts
    counts: Tensor  # bool [A]: the rows whose drafts are trained on

    @classmethod
    def of(cls, num_rows: Tensor, first: Tensor, num_steps: int, width: int, device: str = "cpu") -> DraftRows:
        """Rows that draft are `first`[b] to num_rows[b] - 1; the `num_steps` - 1 before them lead to these."""
        place = torch.arange(width)[None, :]  # [1, N]
        inside = place < num_rows[:, None]
        runs = inside & (place >= first[:, None] - num_steps + 1)
        index = runs.flatten().nonzero().flatten()
        counts = (inside & (place >= first[:, None])).flatten()[index]
        return cls(index.to(device), counts.to(device))


@dataclass(frozen=True)
class HeadBatch:
    """Rows of texts; row t drafts token t + 2 of its text."""

    rows: DraftRows
    unroll: int
    tokens: Tensor  # int64 [B, N]
    states: Tensor  # float32 [B, N, F]
    last: Tensor  # [R, C]: the target's states for R drafts
    written: Tensor  # int64 [R]: the tokens that the text has there

    @property
    def num_trained(self) -> int:
        return int(self.rows.counts.sum())


class HeadForTraining(nn.Module):
    """An EAGLE-3 head. The embedding, and with a whole vocabulary the LM head, are the target's."""

    def __init__(self, config: HeadConfig, seed: int) -> None:
        """Initial weights are normal with standard deviation 0.02."""
        super().__init__()
        self.config, c = config, config.layer
        self.fc = nn.Linear(config.num_captures * config.target_hidden_size, c.hidden_size, bias=False)
        self.midlayer = HeadLayer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_eps)
        if config.draft_vocab_size < c.vocab_size:
            self.lm_head = nn.Linear(c.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("rope", rope_table(c.rope, c.head_dim, c.max_model_len), persistent=False)  # [P, D]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                if weight.ndim == 2:
                    weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def batch(self, texts: Seq[TextStates], columns: list[int], unroll: int, whole: bool = False) -> HeadBatch:
        """Rows of some texts; `columns`: the head's captures among the stored states; `whole`: prompts count too."""
        width, device = self.config.target_hidden_size, str(self.device)
        num_rows = torch.tensor([max(0, len(t.states) - 1) for t in texts])
        first = torch.tensor([0 if whole else max(0, t.num_given - 2) for t in texts])
        wide = max(1, int(num_rows.max()))
        tokens = torch.zeros(len(texts), wide, dtype=torch.long)
        states = torch.zeros(len(texts), wide, len(columns) * width)
        last, written = [torch.zeros(0, width)], [torch.zeros(0, dtype=torch.long)]
        for b, (text, n) in enumerate(zip(texts, num_rows.tolist(), strict=True)):
            if not n:
                continue
            tokens[b, :n] = text.ids[1 : n + 1].long()
            stored = text.states.view(n + 1, -1, width)  # [N + 1, L, C]
            states[b, :n] = stored[:n, columns].flatten(1).float()
            last.append(stored[1 + int(first[b]) :, -1].float())
            written.append(text.ids[2 + int(first[b]) :].long())
        rows = DraftRows.of(num_rows, first, unroll, wide, device)
        parts = (t.to(device) for t in (tokens, states, torch.cat(last), torch.cat(written)))
        return HeadBatch(rows, unroll, *parts)

    def loss(self, batch: HeadBatch, embedding: Tensor, lm_head: Tensor, wanted: Tensor, recipe: HeadRecipe) -> Tensor:
        """Weighted sum of drafts' KL + argmax_weight * CE; embedding [V, C], lm_head [Vd, C]; wanted logits [R, Vd]."""
        targets, entropy = soft_targets(wanted, recipe.loss.argmax_weight)
        place = batch.rows.index[batch.rows.counts] % batch.tokens.shape[1]  # [R] the row's place in its text
        weights, losses = [recipe.loss.falloff**s for s in range(batch.unroll)], []
        for step, out in enumerate(self(embedding[batch.tokens], batch.states, batch.rows, batch.unroll)):
            known = (place >= step).float()  # the first row of a path of `step` drafts must exist
            shares = known * (weights[step] / sum(weights)) / known.sum().clamp(min=1)
            cross = fused_soft_cross_entropy(out[batch.rows.counts], lm_head, targets, shares)
            losses.append(cross - (shares * entropy).sum())
        return torch.stack(losses).sum()

    def right(
        self, text: TextStates, columns: list[int], embedding: Tensor, lm_head: Tensor, ids: Tensor, num: int
    ) -> Right:
        """Whether chains of `num` drafts are right along a text; `ids`: the target's id of each token of the head."""
        if len(text.states) < 2:
            return [[] for _ in range(num)]
        batch = self.batch([text], columns, num)
        outputs = (out[batch.rows.counts] for out in self(embedding[batch.tokens], batch.states, batch.rows, num))
        first = int(text.num_given > 1)  # the first token comes from the pass over the prompt
        best = (ids[(out @ lm_head.T).argmax(-1).cpu()] for out in outputs)
        return [(b == batch.written.cpu())[first:].tolist() for b in best]

    def layout(self, dtype: str) -> dict[str, Any]:
        """config.json in the plain EAGLE-3 layout (`LlamaForCausalLMEagle3`), which vLLM reads too."""
        c, layer = self.config, self.config.layer
        return llama_config(layer, layer.max_model_len, layer.rope.theta) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": c.draft_vocab_size,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(c.aux_layers or ()),
                "use_aux_hidden_state": True,
            },
            "norm_before_residual": False,
            "rope_scaling": rope_scaling(layer.rope),
            "target_hidden_size": c.target_hidden_size,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }

    def forward(self, embedding: Tensor, states: Tensor, rows: DraftRows, num_steps: int) -> list[Tensor]:
        """embedding [B, N, C], states [B, N, F] -> at step s normed outputs [A, C], valid for rows t >= s."""
        layer, a = self.midlayer, self.midlayer.self_attn
        (b, n, _), d = states.shape, self.config.layer.head_dim
        cos, sin = self.rope[:n].chunk(2, dim=-1)  # type: ignore[index]  # [N, D/2]
        features = self.fc(states)  # [B, N, C]
        entering = layer.input_layernorm(embedding)
        keys, values, outputs = list[Tensor](), list[Tensor](), list[Tensor]()
        for step in range(num_steps):
            x = torch.cat((entering, layer.hidden_norm(features)), dim=-1)  # [B, N, 2 C]
            q, k, v = (p(x).view(b, n, -1, d).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
            q = rotate(q, cos, sin)  # [B, H, N, D]
            keys.append(rotate(k, cos, sin))  # [B, Hk, N, D]
            values.append(v)
            attended = self._attend(q, keys, values, rows)  # [A, H D]
            h = features.flatten(0, 1)[rows.index] + layer.self_attn.o_proj(attended)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            outputs.append(self.norm(h))
            if step + 1 < num_steps:
                own = torch.zeros_like(features).flatten(0, 1).index_copy(0, rows.index, h)
                features = _later(own.view_as(features), 1, dim=1)
        return outputs

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], rows: DraftRows) -> Tensor:
        """Attention [A, H D] at step s, of row t: to rows up to t - s of step 0, and row t - s + r of step r = 1..s."""
        b, heads, n, d = q.shape
        step, group = len(keys) - 1, heads // self.config.layer.num_kv_heads
        q = q.view(b, -1, group, n, d)  # [B, Hk, G, N, D]
        scores = q.flatten(2, 3) @ keys[0].transpose(-1, -2)  # [B, Hk, G N, N]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1 - step)  # key j > t - s
        scores = scores.view(b, -1, group, n, n).masked_fill(hidden, float("-inf"))
        path = [_later(k, step - r, dim=2).unsqueeze(2) for r, k in enumerate(keys) if r]  # [B, Hk, 1, N, D]
        own = [(q * k).sum(-1, keepdim=True) for k in path]  # [B, Hk, G, N, 1]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1) * d**-0.5, dim=-1)
        out = (weights[..., :n].flatten(2, 3) @ values[0]).view_as(q)
        for r in range(1, step + 1):
            out = out + weights[..., n + r - 1 : n + r] * _later(values[r], step - r, dim=2).unsqueeze(2)
        return out.reshape(b, heads, n, d).transpose(1, 2).reshape(b * n, heads * d)[rows.index]


def _later(x: Tensor, count: int, dim: int) -> Tensor:
    """Shift x along `dim`: entry t becomes the old entry t - count; the first `count` entries are zeros."""
    if not count:
        return x
    size = x.shape[dim]
    count = min(count, size)
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, count)), x.narrow(dim, 0, size - count)), dim=dim)
