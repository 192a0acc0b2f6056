"""Training of a block head: batches, loss, initial weights and export."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sameseed.models.decoder import Decoder
from sameseed.models.head_config import BlockConfig
from sameseed.models.safetensors_file import write_model
from sameseed_train.block_model import BlockForTraining, BlockLayer
from sameseed_train.head_job import NAME, Vocabulary, dense, rope_scaling, vocabulary_tensors
from sameseed_train.head_recipe import HeadRecipe
from sameseed_train.losses import fused_soft_cross_entropy, soft_targets
from sameseed_train.model import llama_config
from sameseed_train.own import Own
from sameseed_train.states import TextStates
from sameseed_train.trainer import TrainJob


@dataclass(frozen=True)
class BlockBatch:
    """Blocks of some texts, with G guesses each, K blocks per text.

    tokens int64 [B, K, G]: the text's token before each guess, so the anchor's token comes first. states float32
    [B, N, F]; anchors int64 [B, K]: positions in the text. counts bool [B, K, G]: guesses that are trained on. places
    int64 [B, K, G]: the row of each guess in `last` [P, C], the target's last-layer states before the guessed tokens;
    written int64 [P]: the tokens that the texts have there.
    """

    tokens: Tensor
    states: Tensor
    anchors: Tensor
    counts: Tensor
    places: Tensor
    last: Tensor
    written: Tensor


def choose_anchors(text: TextStates, most: int, generator: torch.Generator | None) -> Tensor:
    """Positions int64 of at most `most` anchors: random, or without a generator the first ones.

    The target wrote these tokens (or the whole text is trained on), and it has states before them.
    """
    first = max(1, text.num_given)
    able = torch.arange(first, max(first, len(text.states)))
    chosen = able if generator is None else able[torch.randperm(len(able), generator=generator)]
    return chosen[:most].sort().values


def block_batch(
    texts: list[TextStates], anchors: list[Tensor], columns: list[int], width: int, num_guesses: int, device: str
) -> BlockBatch:
    """Blocks at `anchors` of each text; `columns`: indices of the head's captures among the stored states."""
    num = max(1, *(len(a) for a in anchors))
    longest = max(len(t.states) for t in texts)
    tokens = torch.zeros(len(texts), num, num_guesses, dtype=torch.long)
    places, at = torch.zeros_like(tokens), torch.ones(len(texts), num, dtype=torch.long)
    counts = torch.zeros_like(tokens, dtype=torch.bool)
    states = torch.zeros(len(texts), longest, len(columns) * width)
    last, written, before = list[Tensor](), list[Tensor](), 0
    for b, (text, own) in enumerate(zip(texts, anchors, strict=True)):
        stored = text.states.view(len(text.states), -1, width)  # [N, L, C]
        states[b, : len(stored)] = stored[:, columns].flatten(1).float()
        after = own[:, None] + torch.arange(num_guesses)  # position of the token before each guess
        inside = after.clamp(max=len(stored) - 1)
        at[b, : len(own)], counts[b, : len(own)] = own, after < len(stored)
        tokens[b, : len(own)] = text.ids.long()[inside]
        first = int(own.min()) if len(own) else len(stored)
        places[b, : len(own)] = before + inside - first
        last.append(stored[first:, -1].float())
        written.append(text.ids[first + 1 :].long())
        before += len(stored) - first
    parts = (tokens, states, at, counts, places, torch.cat(last), torch.cat(written))
    return BlockBatch(*(t.to(device) for t in parts))


def inputs(config: BlockConfig, batch: BlockBatch, embedding: Tensor) -> Tensor:
    """The embeddings [B, K, S, C] of every block's input: its anchor token, then masks."""
    shape = (*batch.anchors.shape, config.block_size)
    ids = torch.full(shape, config.mask_token, device=batch.tokens.device)
    ids[..., 0] = batch.tokens[..., 0]
    return embedding[ids]


def whole_rows(head: BlockForTraining, outputs: Tensor, before: Tensor) -> Tensor:
    """Rows [R, C + A] whose product with `whole_weight` gives the logits, with Markov head, after tokens `before`."""
    if head.markov_head is None:
        return outputs
    return torch.cat((outputs, head.markov_head.markov_w1(before)), dim=-1)


def whole_weight(head: BlockForTraining, lm_head: Tensor) -> Tensor:
    """LM head and Markov head side by side: [Vd, C + A]."""
    if head.markov_head is None:
        return lm_head
    return torch.cat((lm_head, head.markov_head.markov_w2.weight), dim=-1)


def block_loss(
    head: BlockForTraining, batch: BlockBatch, embedding: Tensor, lm_head: Tensor, wanted: Tensor, recipe: HeadRecipe
) -> Tensor:
    """Weighted mean over guesses of KL + argmax_weight * CE; guess g has the weight exp(-g / decay).

    lm_head [Vd, C + A]: `whole_weight`, or some of its rows; wanted [P, Vd]: the target's logits.
    """
    targets, entropy = soft_targets(wanted, recipe.loss.argmax_weight)
    outputs = head(inputs(head.config, batch, embedding), batch.states, batch.anchors)
    counts, places = batch.counts, batch.places[batch.counts]
    rows = whole_rows(head, outputs[counts], batch.tokens[counts])
    weights = torch.tensor([math.exp(-g / recipe.block.decay) for g in range(counts.shape[-1])], device=counts.device)
    shares = (weights / weights.sum() / counts.sum((0, 1)).clamp(min=1)).expand(counts.shape)[counts]
    cross = fused_soft_cross_entropy(rows, lm_head, targets, shares, places)
    loss: Tensor = cross - (shares * entropy[places]).sum()
    return loss


def block_job(
    head: BlockForTraining, own: Own, target_ids: Tensor | None, recipe: HeadRecipe, folder: Path
) -> TrainJob:
    """The head's training on the target's own texts."""
    target = own.target
    columns = own.columns(head.config.captures(own.num_layers))
    width, device = target.config.hidden_size, str(target.device)
    embedding = dense(target.ops, target.weights.embedding)
    tokens = Vocabulary(target, own.texts.counts(len(embedding)), target_ids, recipe.loss.candidates)

    def batch(step: int) -> list[BlockBatch]:
        generator, batches = torch.Generator().manual_seed(recipe.seed + step), list[BlockBatch]()
        for texts in own.parts(recipe, step):
            anchors = [choose_anchors(text, recipe.block.anchors, generator) for text in texts]
            batches.append(block_batch(texts, anchors, columns, width, head.config.num_guesses, device))
        return batches

    def loss(batch_: BlockBatch) -> Tensor:
        chosen = tokens.candidates(batch_.written)
        lm_head = whole_weight(head, tokens.lm_head if target_ids is None else head.lm_head.weight)
        lm_head = lm_head if chosen is None else lm_head[chosen]
        return block_loss(head, batch_, embedding, lm_head, tokens.teach(batch_.last, chosen), recipe)

    return TrainJob(NAME, head, recipe.train, batch, loss, folder, lambda b: int(b.counts.sum()))


def start_from_target(head: BlockForTraining, target: Decoder, target_ids: Tensor | None) -> None:
    """Initialize the head from the target's last layers where the shapes allow it, reading the last captured states."""
    own, c, ops = head.config.layer, target.config, target.ops
    kept = target.weights.layers[-len(head.layers) :]
    alike = (own.num_heads, own.num_kv_heads, own.intermediate_size) == (
        c.num_heads,
        c.num_kv_heads,
        c.intermediate_size,
    )
    with torch.no_grad():
        head.fc.weight[:, -c.hidden_size :] += torch.eye(c.hidden_size, device=head.fc.weight.device)
        head.norm.weight.copy_(target.weights.norm)
        head.hidden_norm.weight.copy_(kept[-1].input_norm)
        if target_ids is not None:
            head.lm_head.weight.copy_(dense(ops, target.weights.lm_head)[target_ids])
        sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        for module, source in zip(head.layers, kept, strict=False) if alike else ():
            layer = cast(BlockLayer, module)
            layer.input_layernorm.weight.copy_(source.input_norm)
            layer.post_attention_layernorm.weight.copy_(source.post_norm)
            parts = dense(ops, source.qkv).split_with_sizes(sizes)
            for name, weight in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                getattr(layer.self_attn, name).weight.copy_(weight)
            for name, value in (("q_norm", source.q_norm), ("k_norm", source.k_norm)):
                if own.qk_norm and value is not None:
                    getattr(layer.self_attn, name).weight.copy_(value)
            layer.self_attn.o_proj.weight.copy_(dense(ops, source.o))
            gate, up = dense(ops, source.gate_up).chunk(2)
            layer.mlp.gate_proj.weight.copy_(gate)
            layer.mlp.up_proj.weight.copy_(up)
            layer.mlp.down_proj.weight.copy_(dense(ops, source.down))


def export_block(
    head: BlockForTraining,
    target_ids: Tensor | None,
    folder: Path,
    dtype: str = "bfloat16",
    facts: dict[str, Any] | None = None,
) -> None:
    """Write the head in the layout of speculators (`dspark`, or `dflash` without a Markov head).

    Arguments as in `head_job.export_head`.
    """
    c = head.config
    tensors = {n: p.to(getattr(torch, dtype)) for n, p in head.named_parameters()}
    tensors |= vocabulary_tensors(target_ids, c.layer.vocab_size)
    layer = llama_config(c.layer, c.layer.max_model_len, c.layer.rope.theta) | {
        "architectures": [c.layer.architecture],
        "model_type": "qwen3" if c.layer.qk_norm else "llama",
        "rope_scaling": rope_scaling(c.layer.rope),
        "tie_word_embeddings": False,
    }
    config = {**c.settings(), "torch_dtype": dtype, "transformer_layer_config": layer} | (facts or {})
    write_model(folder, tensors, {"config.json": config})
