"""A head's batches and loss, and how its weights begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.models.llama import Llama
from sameseed.ops import Ops, normed_rows
from sameseed.scheme import QuantTensor
from sameseed.train.head_model import GuessRows, HeadForTraining
from sameseed.train.losses import fused_soft_cross_entropy, soft_targets
from sameseed.train.recipe import TrainSettings
from sameseed.train.states import Texts, TextStates, captured_layers
from sameseed.train.trainer import TrainJob

NAME = "head"  # of the job, and so of its checkpoint


@dataclass(frozen=True)
class LossSettings:
    """`unroll`: steps that the head takes on its own features; step s counts falloff^s. `alone`: the share of all
    updates, from the first, that learn the first step only, at a fraction of the cost. `argmax_weight`: of the cross
    entropy on the target's likeliest token, beside the KL divergence. `candidates`: tokens that the loss of a batch
    looks at, most of them those to which the target gives most, the others by chance (0: all).
    """

    unroll: int = 4
    falloff: float = 0.8
    alone: float = 0.5
    argmax_weight: float = 0.5
    candidates: int = 0


@dataclass(frozen=True)
class HeadBatch:
    """Rows of texts: tokens int64 [B, N], states float32 [B, N, F], last [R, C] of the rows that guess."""

    tokens: Tensor
    states: Tensor
    last: Tensor
    rows: GuessRows
    unroll: int

    @property
    def num_guesses(self) -> int:
        return int(self.rows.counts.sum())


def dense(ops: Ops, w: QuantTensor) -> Tensor:
    """A stored matrix as float32 [O, K]."""
    plain = ops.unpack(w)
    return scheme.get(plain.format).decode(plain).float()


def make_batch(
    texts: list[TextStates], columns: list[int], width: int, unroll: int, longest: int, device: str
) -> HeadBatch:
    """Rows of some texts; `columns`: places of the head's captures among the stored states, each `width` wide.

    Row t guesses token t + 2, and needs the target's states at t and, for its distribution, at t + 1.
    """
    texts = [TextStates(t.ids[:longest], t.num_given, t.states[: longest - 1]) for t in texts]
    num_rows = torch.tensor([max(0, len(t.states) - 1) for t in texts])
    first = torch.tensor([max(0, t.num_given - 2) for t in texts])
    wide = max(1, int(num_rows.max()))
    tokens = torch.zeros(len(texts), wide, dtype=torch.long)
    states = torch.zeros(len(texts), wide, len(columns) * width)
    last: list[Tensor] = []
    for b, (text, n) in enumerate(zip(texts, num_rows.tolist(), strict=True)):
        if not n:
            continue
        tokens[b, :n] = text.ids[1 : n + 1].long()
        stored = text.states.view(n + 1, -1, width)  # [N + 1, L, C]
        states[b, :n] = stored[:n, columns].flatten(1).float()
        last.append(stored[1 + int(first[b]) :, -1].float())
    rows = GuessRows.of(num_rows, first, unroll, wide)
    joined = torch.cat(last) if last else torch.zeros(0, width)
    moved = GuessRows(rows.num_rows.to(device), rows.index.to(device), rows.counts.to(device))
    return HeadBatch(tokens.to(device), states.to(device), joined.to(device), moved, unroll)


def head_loss(
    head: HeadForTraining, batch: HeadBatch, embedding: Tensor, lm_head: Tensor, wanted: Tensor, settings: LossSettings
) -> list[Tensor]:
    """Loss of every step: a weighted mean of KL + argmax_weight * CE over the rows that guess.

    embedding [V, C]; lm_head [Vd, C]; wanted [R, Vd]: the target's logits.
    """
    targets, entropy = soft_targets(wanted, settings.argmax_weight)
    outputs = head(embedding[batch.tokens], batch.states, batch.rows, batch.unroll)
    place = batch.rows.index[batch.rows.counts] % batch.tokens.shape[1]  # [R] the row's place in its text
    weights = [settings.falloff**s for s in range(batch.unroll)]
    losses = []
    for step, out in enumerate(outputs):
        known = (place >= step).float()  # a path of `step` guesses begins at a row that is there
        shares = known * (weights[step] / sum(weights)) / known.sum().clamp(min=1)
        cross = fused_soft_cross_entropy(out[batch.rows.counts], lm_head, targets, shares)
        losses.append(cross - (shares * entropy).sum())
    return losses


def teacher(target: Llama, last: Tensor, target_ids: Tensor | None) -> Tensor:
    """The target's logits [R, Vd] of what leaves its last layer [R, C], by its own norm, head and format."""
    w = target.weights
    with torch.inference_mode():
        logits = target.ops.product(normed_rows(last, w.norm, target.config.rms_eps), w.lm_head)
    logits = logits.clone()  # out of inference mode
    return logits if target_ids is None else logits.index_select(1, target_ids.long())


def candidates(logits: Tensor, count: int) -> Tensor:
    """Tokens int64 [count] of a teacher's logits [R, V]: likeliest ones, those with the most mass, an eighth others.

    What is left out is what the teacher hardly ever says; chance, from the logits themselves, sees that no token is
    left out for ever.
    """
    mass = torch.softmax(logits, dim=-1).sum(0)
    mass[logits.argmax(-1)] += len(logits)
    order = mass.argsort(descending=True)
    best = count - count // 8
    seed = int(mass[order[0]].double() * 1e6) % 2**31
    others = torch.randperm(len(order) - best, generator=torch.Generator().manual_seed(seed))[: count - best]
    return torch.cat((order[:best], order[best:][others.to(order.device)])).sort().values


def head_job(
    head: HeadForTraining,
    target: Llama,
    texts: Texts,
    captures: tuple[int, ...],
    target_ids: Tensor | None,
    settings: LossSettings,
    train: TrainSettings,
    seed: int,
    folder: Path,
) -> TrainJob:
    """The head's training on stored texts."""
    stored = captured_layers(captures, target.config.num_layers)
    columns = [stored.index(layer) for layer in captures]
    width, device = target.config.hidden_size, str(target.device)
    embedding = dense(target.ops, target.weights.embedding)
    whole = dense(target.ops, target.weights.lm_head) if target_ids is None else None

    def batch(step: int) -> HeadBatch:
        chosen = texts.batch(step, train.rows, seed)
        unroll = 1 if step < settings.alone * train.steps else settings.unroll
        return make_batch(chosen, columns, width, unroll, train.row_tokens, device)

    def loss(batch_: HeadBatch) -> Tensor:
        wanted = teacher(target, batch_.last, target_ids)
        lm_head = whole if whole is not None else head.lm_head.weight
        if 0 < settings.candidates < wanted.shape[1]:
            chosen = candidates(wanted, settings.candidates)
            wanted, lm_head = wanted[:, chosen], lm_head[chosen]
        return torch.stack(head_loss(head, batch_, embedding, lm_head, wanted, settings)).sum()

    count: Callable[[HeadBatch], int] = lambda b: b.num_guesses  # noqa: E731
    return TrainJob(NAME, head, train, batch, loss, folder, count)


def start_from_target(head: HeadForTraining, target: Llama, target_ids: Tensor | None) -> None:
    """Begin as the target's last layer, reading the last captured states, where the shapes allow it.

    Such a head guesses what the target guessed a token before, and learns several times faster than one that begins
    with chance. What reads the embedding begins small.
    """
    s, c, layer = head.shape, target.config, target.weights.layers[-1]
    width, mid = s.hidden_size, head.midlayer
    if width != c.hidden_size:
        return
    with torch.no_grad():
        head.fc.weight[:, -width:] += torch.eye(width, device=head.fc.weight.device)
        head.norm.weight.copy_(target.weights.norm)
        mid.hidden_norm.weight.copy_(layer.input_norm)
        mid.post_attention_layernorm.weight.copy_(layer.post_norm)
        if target_ids is not None:
            head.lm_head.weight.copy_(dense(target.ops, target.weights.lm_head)[target_ids.long()])
        if s.head_dim == c.head_dim and s.num_heads == c.num_heads and s.num_kv_heads % c.num_kv_heads == 0:
            _start_attention(head, target)
        gate, up = _stack(target.ops, layer.gate_up).chunk(2)
        num = min(s.intermediate_size, c.intermediate_size)
        mid.mlp.gate_proj.weight[:num] = gate[:num]
        mid.mlp.up_proj.weight[:num] = up[:num]
        mid.mlp.down_proj.weight[:, :num] = dense(target.ops, layer.down)[:, :num]


def _start_attention(head: HeadForTraining, target: Llama) -> None:
    """The half of q, k and v that reads features, and o; a KV head of the target may stand for several."""
    s, c, layer, a = head.shape, target.config, target.weights.layers[-1], head.midlayer.self_attn
    sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
    q, k, v = _stack(target.ops, layer.qkv).split_with_sizes(sizes)
    copies = s.num_kv_heads // c.num_kv_heads
    k, v = (x.view(c.num_kv_heads, c.head_dim, -1).repeat_interleave(copies, 0).flatten(0, 1) for x in (k, v))
    for projection, weight in ((a.q_proj, q), (a.k_proj, k), (a.v_proj, v)):
        projection.weight[:, s.hidden_size :] = weight
    a.o_proj.weight.copy_(dense(target.ops, layer.o))


def _stack(ops: Ops, weights: QuantTensor | tuple[QuantTensor, ...]) -> Tensor:
    return torch.cat([dense(ops, w) for w in (weights if isinstance(weights, tuple) else (weights,))])
