"""`sameseed train head`: an EAGLE-3 head learns to predict a target on the target's own texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sameseed import scheme
from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig
from sameseed.models.decoder import Decoder
from sameseed.models.eagle_loader import embedding_signs
from sameseed.models.head_config import ROTATED_FOR, TARGET_SIGNS, read_head_config, rotation_of
from sameseed.models.safetensors_file import write_model
from sameseed.scheme import QuantScheme
from sameseed_train.card import sizes
from sameseed_train.head_model import HeadBatch, HeadForTraining
from sameseed_train.learning import NUM_DRAFT_TOKENS, Own, Right, Sources, Trained, dense, learn
from sameseed_train.recipe import HeadRecipe, head_config
from sameseed_train.states import StoredTexts, TextStates
from sameseed_train.trainer import TrainJob


def run_head(recipe: HeadRecipe, sources: Sources, out: Path, **how: Any) -> Trained:
    """Train a head for `recipe.target` into `out/head`, which `--draft` accepts; `how`: see `learning.learn`."""
    done = learn(recipe, sources, out, partial(HeadLearner, recipe), **how)
    if recipe.store:
        pack_head(done.folder, out / "packed", QuantScheme.parse(recipe.store))
        shutil.copy(done.folder / "README.md", out / "packed")
    return done


class HeadLearner:
    """A head in training (see `learning.Learner`)."""

    name = "head"
    measured = True

    def __init__(self, recipe: HeadRecipe, folder: Path, target: ModelConfig) -> None:
        """`folder`: the target's. Raises ConfigError for settings that do not suit it."""
        self._recipe, self._folder = recipe, folder
        self.config = head_config(recipe, target)
        self.layers = self.config.aux_layers or ()
        self.model = HeadForTraining(self.config, recipe.seed)
        if recipe.store:  # fails now, not at the end
            in_few_bits(self.model.state_dict(), QuantScheme.parse(recipe.store))
        tokens = f"{self.config.draft_vocab_size} of the target's {target.vocab_size} tokens"
        self.about = f"EAGLE-3 head (Li et al., 2025) for `{recipe.target}`: {sizes(self.config.layer)}, {tokens}"

    def job(self, own: Own, out: Path, device: str) -> TrainJob:
        """The head's training, from initial weights of the target."""
        head, recipe, target = self.model, self._recipe, own.target
        columns = own.columns(self.config)
        embedding = dense(target.ops, target.weights.embedding)
        ids = frequent_tokens(own.texts, own.begun["num_texts"], self.config.draft_vocab_size, len(embedding))
        self._ids = None if ids is None else ids.to(device)
        rotation = rotation_of(self._folder)
        self._known = {TARGET_SIGNS: embedding_signs(target)} | ({} if rotation is None else {ROTATED_FOR: rotation})
        self.facts = {"layers": self.layers, "embedding": target.weights.embedding.format}
        shape = (-1, len(own.states.captures), target.config.hidden_size)
        seen = torch.cat([text.states.view(shape)[:, columns[-1]] for text in own.batch(0)])
        start_from_target(head, target, self._ids, seen.float().to(target.device))
        head.to(device)
        tokens = Vocabulary(target, own.texts.counts(len(embedding)), self._ids, recipe.loss.candidates)

        def batch(step: int) -> list[HeadBatch]:
            unroll = 1 if step < recipe.loss.alone * recipe.train.steps else recipe.loss.unroll
            return [head.batch(texts, columns, unroll, recipe.loss.learn_prompts) for texts in own.parts(step)]

        def loss(batch_: HeadBatch) -> Tensor:
            chosen = tokens.candidates(batch_.written)
            lm_head = tokens.lm_head if self._ids is None else head.lm_head.weight
            lm_head = lm_head if chosen is None else lm_head[chosen]
            return head.loss(batch_, embedding, lm_head, tokens.teach(batch_.last, chosen), recipe)

        return TrainJob(self.name, head, recipe.train, batch, loss, out, lambda batch_: batch_.num_trained)

    def export(self, folder: Path) -> None:
        export_head(self.model, self._ids, folder, facts=self._known)

    def right(self, folder: Path, own: Own) -> Callable[[TextStates], Right]:
        """What tells which drafts of the exported head are right along a text."""
        tensors = load_file(str(folder / "model.safetensors"))
        ids = torch.arange(self.config.draft_vocab_size) + tensors.pop("d2t", 0)  # the target's ids of its tokens
        tensors.pop("t2d", None)
        head = HeadForTraining(read_head_config(folder), 0)
        head.load_state_dict({n: t.float() for n, t in tensors.items()})
        head.to(own.target.device)
        columns, weights = own.columns(self.config), own.target.weights
        lm_head = dense(own.target.ops, weights.lm_head) if self._ids is None else head.lm_head.weight
        embedding = dense(own.target.ops, weights.embedding)
        return lambda text: head.right(text, columns, embedding, lm_head, ids, NUM_DRAFT_TOKENS)


class Vocabulary:
    """The tokens that a head learns: lm_head [Vd, C] has the target's rows, `count` of them are in a batch's loss."""

    def __init__(self, target: Decoder, counts: Tensor, target_ids: Tensor | None, count: int) -> None:
        """`counts` int64 [V]: how often each token is written in the texts. `count` 0: all tokens."""
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
        batch. The target hardly ever generates the others; the random ones make sure that none is left out for ever.
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


def start_from_target(head: HeadForTraining, target: Decoder, target_ids: Tensor | None, seen: Tensor) -> None:
    """Initialize the head from the target's last layer, reading the last captured states; `seen` [R, C]: some of them.

    Such a head at first drafts what the target chose a token before, and learns several times faster than a head with
    random weights. Attention is copied only where the head counts allow it; a KV head of the target may be copied to
    several. A narrower feed-forward gets the columns that contribute most. Weights that read the embedding stay small.
    """
    ops, weights, c = target.ops, target.weights, target.config
    own, layer, source = head.config.layer, head.midlayer, weights.layers[-1]
    with torch.no_grad():
        head.fc.weight[:, -c.hidden_size :] += torch.eye(c.hidden_size, device=head.device)
        head.norm.weight.copy_(weights.norm)
        layer.hidden_norm.weight.copy_(source.input_norm)
        if target_ids is not None:
            head.lm_head.weight.copy_(dense(ops, weights.lm_head)[target_ids])
        layer.post_attention_layernorm.weight.copy_(source.post_norm)
        if own.num_heads == c.num_heads and own.num_kv_heads % c.num_kv_heads == 0:
            sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
            q, k, v = dense(ops, source.qkv).split_with_sizes(sizes)
            copies = own.num_kv_heads // c.num_kv_heads
            k, v = (x.view(c.num_kv_heads, c.head_dim, -1).repeat_interleave(copies, 0).flatten(0, 1) for x in (k, v))
            attention = layer.self_attn
            for projection, weight in ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v)):
                projection.weight[:, -c.hidden_size :] = weight  # the half that reads features
            attention.o_proj.weight.copy_(dense(ops, source.o))
        (gate, up), down = dense(ops, source.gate_up).chunk(2), dense(ops, source.down)
        num = min(own.intermediate_size, c.intermediate_size)
        rows = torch.nn.functional.rms_norm(seen, source.post_norm.shape, source.post_norm, c.rms_eps)
        size = (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)).norm(dim=0) * down.norm(dim=0)
        best = size.topk(num).indices.sort().values  # all of them, in order, where the head is as wide as the target
        layer.mlp.gate_proj.weight[:num] = gate[best]
        layer.mlp.up_proj.weight[:num] = up[best]
        layer.mlp.down_proj.weight[:, :num] = down[:, best]


def export_head(
    head: HeadForTraining,
    target_ids: Tensor | None,
    folder: Path,
    dtype: str = "bfloat16",
    facts: dict[str, Any] | None = None,
) -> None:
    """Write the head in the published layout.

    `target_ids` int64 [Vd]: the target's token id of each token of the head. d2t int64 [Vd] holds offsets
    (id = i + d2t[i]); t2d bool [V] marks the tokens that the head has. The embedding is not written, because it is the
    target's; nor is the LM head if the vocabulary is whole. `facts`: more of its config.json.
    """
    tensors = {n: p.to(getattr(torch, dtype)) for n, p in head.named_parameters()}
    if target_ids is not None:
        ids = target_ids.cpu()
        marks = torch.zeros(head.config.layer.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marks}
    write_model(folder, tensors, {"config.json": head.layout(dtype) | (facts or {})})


def pack_head(folder: Path, out: Path, quant: QuantScheme) -> None:
    """Write the head in `folder` to `out` with its matrices in the formats of `quant`. Raises ConfigError."""
    tensors, layout = in_few_bits(load_file(str(folder / "model.safetensors")), quant)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_model(out, tensors, {"config.json": config | {"quantization_config": layout}})


def in_few_bits(weights: Mapping[str, Tensor], quant: QuantScheme) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A head's tensors in compressed-tensors' layout, and its `quantization_config`. Raises ConfigError without one."""
    tensors, groups, layout = dict[str, Tensor](), dict[str, dict[str, Any]](), dict[str, Any]()
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or module.endswith("embed_tokens"):
            tensors[name] = tensor
            continue
        own = quant.at(module)
        q = own.encode(tensor)
        said = scheme.get(q.format).config(q)
        if "config_groups" not in said:
            raise ConfigError(f"a head cannot be stored as {own.weights}; --store takes e.g. w8a8 or w4a16-g32")
        tensors |= scheme.get(q.format).checkpoint(module, q)
        (group,) = said["config_groups"].values()  # type: ignore[attr-defined]
        group = groups.setdefault(json.dumps(group), {**group, "targets": []})
        group["targets"].append(module)
        layout = {**said, "config_groups": {f"group_{i}": g for i, g in enumerate(groups.values())}, "ignore": []}
    return tensors, layout


def frequent_tokens(texts: StoredTexts, first: int, count: int, vocab_size: int) -> Tensor | None:
    """The `count` most frequent tokens of the `first` texts (a resume adds others), ascending; None: all tokens."""
    if count >= vocab_size:
        return None
    return texts.counts(vocab_size, first).argsort(descending=True, stable=True)[:count].sort().values
