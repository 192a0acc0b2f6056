"""`sameseed train draft`: train a small Llama on a target's distribution, over texts that the target generates.

With `parallel` the draft learns to draft K tokens in one pass, over mask tokens (PARD: An et al., 2025). A token of a
text is followed by up to K - 1 masks, at the positions of the tokens after it. Each mask attends to the text up to that
token and to the masks before itself, as in drafting. A share max(keep^i, least_kept) of the masks at place i is trained
on (conditional drop), each together with all masks before it.

Letters: B texts of a batch, N tokens of a text, S = N + masks, R rows that are trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig, read_json
from sameseed.models.decoder import Decoder
from sameseed.models.loader import load_tokenizer, open_checkpoint, read_config, resolve_model
from sameseed.ops import normed_rows
from sameseed_train.card import sizes
from sameseed_train.checkpoint import export_model, load_exported
from sameseed_train.learning import NUM_DRAFT_TOKENS, Own, Right, Sources, Trained, dense, learn
from sameseed_train.losses import fused_soft_cross_entropy, soft_targets
from sameseed_train.model import LlamaForTraining, shape_of
from sameseed_train.recipe import DraftRecipe, DraftSize, draft_shape
from sameseed_train.states import TextStates
from sameseed_train.trainer import TrainJob


def run_draft(recipe: DraftRecipe, sources: Sources, out: Path, **how: Any) -> Trained:
    """Train a draft for `recipe.target` into `out/draft`, a Hugging Face folder; `how`: see `learning.learn`."""
    if sources.measure is not None and recipe.parallel:
        raise ConfigError("a draft in parallel is not measured here; leave --measure out, use sameseed bench --prompts")
    return learn(recipe, sources, out, partial(DraftLearner, recipe), **how)


class DraftLearner:
    """A draft in training (see `learning.Learner`)."""

    name = "draft"
    layers: tuple[int, ...] = ()

    def __init__(self, recipe: DraftRecipe, folder: Path, target: ModelConfig) -> None:
        """`folder`: the target's. Raises ConfigError for settings that do not suit it."""
        self._folder, self._config = folder, target
        self.model, mask = begin_draft(recipe, target)
        self._recipe = replace(recipe, mask_token=mask_of(mask, folder, target)) if recipe.parallel else recipe
        self.measured = not recipe.parallel
        self.about = f"Llama draft for `{recipe.target}`: {sizes(self.model.shape)}, the target's tokenizer"

    def job(self, own: Own, out: Path, device: str) -> TrainJob:
        """The draft's training: KL(target || draft) + argmax_weight * CE on the target's argmax."""
        recipe, draft, target = self._recipe, self.model, own.target
        if not recipe.begin:
            with torch.no_grad():
                components(draft.model.embed_tokens.weight, dense(target.ops, target.weights.lm_head).cpu())
        draft.to(device)
        self.facts = {"embedding": target.weights.embedding.format}

        def batch(step: int) -> MaskedRows:
            texts, seed = own.batch(step), recipe.seed + step
            return masked_rows(texts, target.config.hidden_size, recipe, seed, str(target.device))

        def loss(rows: MaskedRows) -> Tensor:
            targets, entropy = soft_targets(teacher(target, rows.last), recipe.argmax_weight)
            shares = torch.full_like(rows.places, 1.0 / max(1, len(rows.places)), dtype=entropy.dtype)
            masked = (rows.positions, rows.seen) if recipe.parallel else ()
            hidden = draft.hidden(rows.ids, *masked)[rows.counts]  # [R, C]
            cross = fused_soft_cross_entropy(hidden, draft.model.embed_tokens.weight, targets, shares, rows.places)
            return cross - (shares * entropy[rows.places]).sum()

        return TrainJob(self.name, draft, recipe.train, batch, loss, out, lambda rows: len(rows.places))

    def export(self, folder: Path) -> None:
        mask, parallel = self._recipe.mask_token, self._recipe.parallel
        more = {"pard_token": mask, "spd_type": "pard", "para_num": parallel} if parallel else None
        export_model(self.model, folder, None, self._config.eos_token_ids, more=more)
        for name, content in load_tokenizer(self._folder).as_files().items():
            (folder / name).write_text(content, encoding="utf-8")

    def right(self, folder: Path, own: Own) -> Callable[[TextStates], Right]:
        """What tells which drafts of the exported model are right: one pass, since accepted tokens equal the text."""
        draft = load_exported(folder, str(own.target.device))

        def right(text: TextStates) -> Right:
            best = draft(text.ids[None, :-1].long().to(draft.device))[0].argmax(-1).cpu()
            return [(best == text.ids[1:])[text.num_given :].tolist()] * NUM_DRAFT_TOKENS

        return right


def components(embedding: Tensor, weight: Tensor) -> None:
    """Set the first columns of embedding [V, C] to the principal components of weight [V, K]."""
    width = min(embedding.shape[1], weight.shape[1])
    _, basis = torch.linalg.eigh((weight.T @ weight).double())  # in ascending order
    embedding[:, :width] = weight @ basis.flip(1)[:, :width].to(weight.dtype)


def begin_draft(recipe: DraftRecipe, target: ModelConfig) -> tuple[LlamaForTraining, int]:
    """A new draft or the one that `recipe.begin` names, and its mask's id (-1: none is known). Raises ConfigError."""
    if not recipe.begin:
        return LlamaForTraining(draft_shape(recipe, shape_of(target)), recipe.seed), recipe.mask_token
    if recipe.size != DraftSize():
        raise ConfigError(f"--begin {recipe.begin} has sizes of its own; leave out those of the recipe, or --begin")
    folder = resolve_model(recipe.begin)
    c = read_config(folder)
    plain = c.architecture == "LlamaForCausalLM" and c.tied_embeddings and c.rope.kind == "default"
    if not plain or c.qkv_bias or c.o_bias or c.mlp_bias:
        raise ConfigError(f"--begin {recipe.begin} is no Llama (tied embeddings, plain rope, no biases); leave it out")
    if c.vocab_size != target.vocab_size:
        raise ConfigError(f"--begin {recipe.begin} has {c.vocab_size} tokens, not {target.vocab_size}; take another")
    layers = recipe.begin_layers or range(c.num_layers)
    if not all(0 <= j < c.num_layers for j in layers):
        raise ConfigError(f"begin_layers {list(layers)}: --begin {recipe.begin} has layers 0 to {c.num_layers - 1}")
    longest = min(c.max_model_len, target.max_model_len)
    draft = LlamaForTraining(replace(shape_of(c), num_layers=len(layers), max_positions=longest), recipe.seed)
    with torch.no_grad(), open_checkpoint(folder) as source:
        source.check(c)
        for own_name, weight in draft.named_parameters():
            name = re.sub(r"(?<=layers\.)\d+", lambda i: str(layers[int(i[0])]), own_name)
            weight.copy_(source.rows(name, 0, len(weight)) if weight.dim() == 2 else source.tensor(name))
    own = -1 if c.mask_token is None else c.mask_token
    return draft, own if recipe.mask_token < 0 else recipe.mask_token


def teacher(target: Decoder, last: Tensor) -> Tensor:
    """The target's logits [R, V] from the output of its last layer [R, C], with its own norm, LM head and format."""
    w = target.weights
    with torch.inference_mode():
        logits = target.ops.product(normed_rows(last, w.norm, target.config.rms_eps), w.lm_head)
    return logits.clone()  # out of inference mode


@dataclass(frozen=True)
class MaskedRows:
    """Padded texts with their masks."""

    ids: Tensor  # int64 [B, S], as are the positions
    positions: Tensor
    seen: Tensor  # bool [B, S, S]: which rows a row attends to
    counts: Tensor  # bool [B, S]: rows that are trained on
    places: Tensor  # int64 [R]: for each of these, in order, its row in `last`
    last: Tensor  # [., C]: the target's states at the positions after which rows draft


def chain_lengths(count: int, recipe: DraftRecipe, generator: torch.Generator) -> Tensor:
    """Masks after each of `count` tokens, int64: at least i with probability max(keep^i, least_kept), at most K - 1."""
    rates = torch.tensor([max(recipe.keep**i, recipe.least_kept) for i in range(1, recipe.parallel)])
    drawn = torch.rand(count, 1, generator=generator)
    return (drawn < rates).sum(-1)


TextRows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def text_rows(text: TextStates, width: int, recipe: DraftRecipe, generator: torch.Generator) -> TextRows:
    """One text's ids, positions [S], seen [S, S] and counts [S], as in `MaskedRows`, and its `last` [., C]."""
    n = len(text.states)
    first = min(n, max(0, text.num_given - 1))
    known, starts = torch.arange(n), torch.arange(first, n)
    lengths = torch.minimum(chain_lengths(len(starts), recipe, generator), n - 1 - starts)
    chains = torch.repeat_interleave(torch.arange(len(starts)), lengths)
    ends = torch.repeat_interleave(starts, lengths)  # the last token that a mask sees
    depths = 1 + torch.arange(len(chains)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = torch.cat((known, ends + depths))
    chain = torch.cat((torch.full((n,), -1), chains))  # -1: the text itself
    seen = (chain[:, None] == chain) & (positions <= positions[:, None])
    seen[n:, :n] = known <= ends[:, None]
    ids = torch.cat((text.ids[:n].long(), torch.full((len(chains),), recipe.mask_token)))
    return ids, positions, seen, positions >= first, text.states[first:n, -width:].float()


def masked_rows(texts: list[TextStates], width: int, recipe: DraftRecipe, seed: int, device: str) -> MaskedRows:
    """Texts with masks after tokens to train on; `width`: C; `seed`: of the random drop."""
    generator = torch.Generator().manual_seed(seed)
    each = [text_rows(text, width, recipe, generator) for text in texts]
    ids, positions, counts = (pad_sequence([rows[i] for rows in each], batch_first=True) for i in (0, 1, 3))
    seen = torch.eye(ids.shape[1], dtype=torch.bool).repeat(len(texts), 1, 1)  # padding sees itself
    places, before = list[Tensor](), 0
    for b, (_, own_positions, own_seen, own_counts, last) in enumerate(each):
        seen[b, : len(own_seen), : len(own_seen)] = own_seen
        at = own_positions[own_counts]
        places.append(before + at - (int(at.min()) if len(at) else 0))
        before += len(last)
    last = torch.cat([states for *_, states in each])
    return MaskedRows(*(t.to(device) for t in (ids, positions, seen, counts, torch.cat(places), last)))


def mask_of(asked: int, folder: Path, target: ModelConfig) -> int:
    """The id of the mask token: `asked`, or for -1 the padding token or a free id. Raises ConfigError without one."""
    if asked >= target.vocab_size:
        raise ConfigError(f"mask_token {asked} is none of the target's {target.vocab_size} tokens; name one that is")
    if asked >= 0:
        return asked
    pad = None if folder.is_file() else read_json(folder / "config.json").get("pad_token_id")
    ends = (*target.eos_token_ids, target.bos_token_id)
    if isinstance(pad, int) and 0 <= pad < target.vocab_size and pad not in ends:
        return pad
    used = set(load_tokenizer(folder).vocabulary().values())
    free = next((t for t in range(target.vocab_size) if t not in used), None)
    if free is None:
        raise ConfigError("every token of the target may be written; name one that no text has with --mask-token ID")
    return free
