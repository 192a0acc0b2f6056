"""Training of an EAGLE-3 head: batches, loss, initial weights and export."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.models.config import RopeConfig
from sameseed.models.decoder import Decoder
from sameseed.models.safetensors_file import write_model
from sameseed.ops import Ops, normed_rows
from sameseed.scheme import QuantScheme, QuantTensor
from sameseed_train.head_model import GuessRows, HeadForTraining
from sameseed_train.head_recipe import HeadRecipe, LossSettings
from sameseed_train.losses import fused_soft_cross_entropy, soft_targets
from sameseed_train.model import llama_config
from sameseed_train.own import Own
from sameseed_train.states import TextStates
from sameseed_train.trainer import TrainJob

NAME = "head"  # name of the job and of its checkpoint


@dataclass(frozen=True)
class HeadBatch:
    """Rows of texts: tokens int64 [B, N], states float32 [B, N, F].

    last [R, C]: the target's states for R guesses; written int64 [R]: the tokens that the text has there.
    """

    tokens: Tensor
    states: Tensor
    last: Tensor
    written: Tensor
    rows: GuessRows
    unroll: int


def dense(ops: Ops, w: QuantTensor | tuple[QuantTensor, ...]) -> Tensor:
    """A stored matrix, or several joined along O, decoded to float32 [O, K]."""
    if isinstance(w, tuple):
        return torch.cat([dense(ops, one) for one in w])
    plain = ops.unpack(w)
    return scheme.get(plain.format).decode(plain).float()


def make_batch(texts: list[TextStates], columns: list[int], width: int, unroll: int, device: str) -> HeadBatch:
    """Rows of some texts; `columns`: indices of the head's captures among the stored states, each `width` wide.

    Row t guesses token t + 2. It reads the target's states at t; the states at t + 1 give the target's distribution.
    """
    num_rows = torch.tensor([max(0, len(t.states) - 1) for t in texts])
    first = torch.tensor([max(0, t.num_given - 2) for t in texts])
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
    rows = GuessRows.of(num_rows, first, unroll, wide, device)
    told = torch.cat(last).to(device), torch.cat(written).to(device)
    return HeadBatch(tokens.to(device), states.to(device), *told, rows, unroll)


def head_loss(
    head: HeadForTraining, batch: HeadBatch, embedding: Tensor, lm_head: Tensor, wanted: Tensor, settings: LossSettings
) -> list[Tensor]:
    """The loss of every step: a weighted mean of KL + argmax_weight * CE over the rows that guess.

    embedding [V, C]; lm_head [Vd, C]; wanted [R, Vd]: the target's logits.
    """
    targets, entropy = soft_targets(wanted, settings.argmax_weight)
    outputs = head(embedding[batch.tokens], batch.states, batch.rows, batch.unroll)
    place = batch.rows.index[batch.rows.counts] % batch.tokens.shape[1]  # [R] the row's place in its text
    weights = [settings.falloff**s for s in range(batch.unroll)]
    losses = []
    for step, out in enumerate(outputs):
        known = (place >= step).float()  # the first row of a path of `step` guesses must exist
        shares = known * (weights[step] / sum(weights)) / known.sum().clamp(min=1)
        cross = fused_soft_cross_entropy(out[batch.rows.counts], lm_head, targets, shares)
        losses.append(cross - (shares * entropy).sum())
    return losses


def teacher(target: Decoder, last: Tensor) -> Tensor:
    """The target's logits [R, V] from the output of its last layer [R, C], with its own norm, LM head and format."""
    w = target.weights
    with torch.inference_mode():
        logits = target.ops.product(normed_rows(last, w.norm, target.config.rms_eps), w.lm_head)
    return logits.clone()  # out of inference mode


class Vocabulary:
    """The tokens that a head learns, and which of them the loss of a batch covers.

    lm_head [Vd, C]: the target's rows of these tokens, decoded. `count`: tokens per batch (0: all of them).
    """

    def __init__(self, target: Decoder, counts: Tensor, target_ids: Tensor | None, count: int) -> None:
        """`counts` int64 [V]: how often each token is written in the texts."""
        self._target = target
        whole, device = dense(target.ops, target.weights.lm_head), target.device
        ids = torch.arange(len(whole)) if target_ids is None else target_ids.cpu()
        self.lm_head = whole if target_ids is None else whole[target_ids]
        self._place = torch.full((len(whole),), -1).index_copy(0, ids, torch.arange(len(ids))).to(device)
        self._share = (counts[ids] / (1 + counts.sum())).to(device)  # below 1 together
        self._count = count if count < len(ids) else 0

    def candidates(self, written: Tensor) -> Tensor | None:
        """Tokens int64 [count] for the loss of a batch with the tokens `written` int64 [R]; None: all.

        Those written come first, then the most frequent of all texts, then an eighth of random ones, seeded by the
        batch. The target hardly ever writes the others; the random ones make sure that none is left out for ever.
        """
        if not self._count:
            return None
        own = self._place[written]
        mass = self._share.clone()
        mass.index_put_((own[own >= 0],), torch.ones((), device=mass.device), accumulate=True)
        order = mass.argsort(descending=True, stable=True)
        best = self._count - self._count // 8
        generator = torch.Generator().manual_seed(int(written.sum()))
        others = torch.randperm(len(order) - best, generator=generator)[: self._count - best].to(order.device)
        return torch.cat((order[:best], order[best:][others])).sort().values

    def teach(self, last: Tensor, chosen: Tensor | None) -> Tensor:
        """The target's logits float32 [R, Vd or count] from the output of its last layer [R, C]."""
        w = self._target.weights
        weight = self.lm_head if chosen is None else self.lm_head[chosen]
        kind = last.device.type
        exact = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
        with torch.no_grad(), exact:
            rows = torch.nn.functional.rms_norm(last, w.norm.shape, w.norm, self._target.config.rms_eps)
            return rows @ weight.T


def head_job(head: HeadForTraining, own: Own, target_ids: Tensor | None, recipe: HeadRecipe, folder: Path) -> TrainJob:
    """The head's training on the target's own texts."""
    target, settings, train = own.target, recipe.loss, recipe.train
    columns = own.columns(head.config.captures(own.num_layers))
    width, device = target.config.hidden_size, str(target.device)
    embedding = dense(target.ops, target.weights.embedding)
    tokens = Vocabulary(target, own.texts.counts(len(embedding)), target_ids, settings.candidates)

    def batch(step: int) -> list[HeadBatch]:
        unroll = 1 if step < settings.alone * train.steps else settings.unroll
        return [make_batch(part, columns, width, unroll, device) for part in own.parts(recipe, step)]

    def loss(batch_: HeadBatch) -> Tensor:
        chosen = tokens.candidates(batch_.written)
        wanted = tokens.teach(batch_.last, chosen)
        lm_head = tokens.lm_head if target_ids is None else head.lm_head.weight
        lm_head = lm_head if chosen is None else lm_head[chosen]
        return torch.stack(head_loss(head, batch_, embedding, lm_head, wanted, settings)).sum()

    count: Callable[[HeadBatch], int] = lambda b: int(b.rows.counts.sum())  # noqa: E731
    return TrainJob(NAME, head, train, batch, loss, folder, count)


def start_from_target(head: HeadForTraining, target: Decoder, target_ids: Tensor | None) -> None:
    """Initialize the head from the target's last layer, reading the last captured states.

    Attention is copied only where the head counts allow it; a KV head of the target may be copied to several. Weights
    that read the embedding stay small. Such a head at first guesses what the target guessed a token before, and learns
    several times faster than a head with random weights.
    """
    own, c, layer, ops = head.config.layer, target.config, target.weights.layers[-1], target.ops
    width, mid, a = c.hidden_size, head.midlayer, head.midlayer.self_attn
    with torch.no_grad():
        head.fc.weight[:, -width:] += torch.eye(width, device=head.fc.weight.device)
        head.norm.weight.copy_(target.weights.norm)
        mid.hidden_norm.weight.copy_(layer.input_norm)
        mid.post_attention_layernorm.weight.copy_(layer.post_norm)
        if target_ids is not None:
            head.lm_head.weight.copy_(dense(ops, target.weights.lm_head)[target_ids])
        if own.num_heads == c.num_heads and own.num_kv_heads % c.num_kv_heads == 0:
            sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
            q, k, v = dense(ops, layer.qkv).split_with_sizes(sizes)
            copies = own.num_kv_heads // c.num_kv_heads
            k, v = (x.view(c.num_kv_heads, c.head_dim, -1).repeat_interleave(copies, 0).flatten(0, 1) for x in (k, v))
            for projection, weight in ((a.q_proj, q), (a.k_proj, k), (a.v_proj, v)):
                projection.weight[:, width:] = weight  # the half that reads features
            a.o_proj.weight.copy_(dense(ops, layer.o))
        gate, up = dense(ops, layer.gate_up).chunk(2)
        num = min(own.intermediate_size, c.intermediate_size)
        mid.mlp.gate_proj.weight[:num] = gate[:num]
        mid.mlp.up_proj.weight[:num] = up[:num]
        mid.mlp.down_proj.weight[:, :num] = dense(ops, layer.down)[:, :num]


def export_head(
    head: HeadForTraining,
    target_ids: Tensor | None,
    folder: Path,
    dtype: str = "bfloat16",
    facts: dict[str, Any] | None = None,
) -> None:
    """Write the head in the plain EAGLE-3 layout (`LlamaForCausalLMEagle3`), which vLLM reads too.

    `target_ids` int64 [Vd]: the target's token id of each token of the head. d2t int64 [Vd] holds offsets
    (id = i + d2t[i]); t2d bool [V] marks the tokens that the head has. The embedding is not written, because it is the
    target's; nor is the LM head if the vocabulary is whole. `facts`: more of its config.json (`head.target_facts`).
    """
    c, layer = head.config, head.config.layer
    tensors = {n: p.to(getattr(torch, dtype)) for n, p in head.named_parameters()}
    tensors |= vocabulary_tensors(target_ids, layer.vocab_size)
    config = llama_config(layer, layer.max_model_len, layer.rope.theta) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": c.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(c.aux_layers or ()), "use_aux_hidden_state": True},
        "norm_before_residual": False,
        "rope_scaling": rope_scaling(layer.rope),
        "target_hidden_size": c.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    write_model(folder, tensors, {"config.json": config | (facts or {})})


def pack_head(folder: Path, out: Path, quant: QuantScheme) -> None:
    """Write the head in `folder` to `out` with its matrices in the formats of `quant`, in compressed-tensors' layout.

    Raises ConfigError for a format that has no such layout.
    """
    tensors, groups = dict[str, Tensor](), dict[str, dict[str, Any]]()
    for name, tensor in load_file(str(folder / "model.safetensors")).items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or module.endswith("embed_tokens") or "markov" in module:
            tensors[name] = tensor
            continue
        own = quant.at(module)
        q = own.encode(tensor)
        said = scheme.get(q.format).config(q)
        if not said:
            raise ConfigError(f"a head cannot be stored as {own.weights}; --store takes e.g. w8a8 or w4a16-g32")
        tensors |= scheme.get(q.format).checkpoint(module, q)
        (group,) = said["config_groups"].values()  # type: ignore[attr-defined]
        group = groups.setdefault(json.dumps(group), {**group, "targets": []})
        group["targets"].append(module)
        layout = {**said, "config_groups": {f"group_{i}": g for i, g in enumerate(groups.values())}, "ignore": []}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_model(out, tensors, {"config.json": config | {"quantization_config": layout}})


def vocabulary_tensors(target_ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """d2t and t2d of a head with the target's tokens `target_ids`; no tensors for None (all tokens)."""
    if target_ids is None:
        return {}
    ids = target_ids.cpu()
    marks = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marks}


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The `rope_scaling` entry of a config.json; None without scaling."""
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    if rope.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_len,
        }
    return None
