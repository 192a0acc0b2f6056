"""`sameseed train draft`: train a small Llama on a target's distribution, over texts that the target writes.

With `parallel` the draft learns to draft that many tokens in one pass (`train/parallel.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sameseed.batch import MAX_NODES
from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig
from sameseed.models.decoder import Decoder
from sameseed.models.loader import load_tokenizer, open_checkpoint, read_config, resolve_model
from sameseed.ops import normed_rows
from sameseed_train.checkpoint import export_model
from sameseed_train.losses import fused_soft_cross_entropy, soft_targets
from sameseed_train.model import LlamaForTraining, ModelShape
from sameseed_train.own import Own, OwnRecipe, Sources, Trained, check_run, dense, write_all, write_results
from sameseed_train.own_card import write_draft_card
from sameseed_train.parallel import MaskedRows, MaskSettings, mask_of, masked_rows
from sameseed_train.recipe import TrainSettings
from sameseed_train.states import TextStates
from sameseed_train.trainer import Log, TrainJob, train

NAME = "draft"  # of the job, and so of its checkpoint


@dataclass(frozen=True)
class DraftSize:
    """Sizes of the draft, as in a Hugging Face config.json; 0: derived from the target's (`draft_shape`)."""

    num_layers: int = 2
    hidden_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0


@dataclass(frozen=True)
class DraftRecipe(OwnRecipe):
    """Everything that determines a draft's weights, except the data and the machine's arithmetic.

    `begin`: an existing draft whose weights and sizes training starts from. `parallel`: number of tokens to draft in
    one pass, over mask tokens (0: one token per pass); `mask_token`: id of the masks (-1: one that no text has).
    `keep`, `least_kept`: a share max(keep^i, least_kept) of the guesses behind i masks is trained on.
    """

    name: str = "draft"
    begin: str = ""
    parallel: int = 0
    mask_token: int = -1
    keep: float = 0.7
    least_kept: float = 0.2
    size: DraftSize = field(default_factory=DraftSize)
    argmax_weight: float = 0.5
    train: TrainSettings = field(default_factory=lambda: TrainSettings(600, rows=12, warmup=30, decay=0.5))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel != 0 and not 2 <= self.parallel <= MAX_NODES:
            raise ConfigError(f"parallel must be 2..{MAX_NODES} tokens, or 0 for a token a pass, got {self.parallel}")
        if not 0.0 <= self.least_kept <= self.keep <= 1.0:
            raise ConfigError(
                f"0 <= least_kept <= keep <= 1 must hold, got keep {self.keep:g} and least_kept {self.least_kept:g}"
            )


def draft_shape(recipe: DraftRecipe, target: ModelConfig) -> ModelShape:
    """The draft's sizes for a target. Raises ConfigError for impossible sizes."""
    size = recipe.size
    dim = size.head_dim or target.head_dim
    hidden = size.hidden_size or target.hidden_size // 2
    kv_heads = size.num_kv_heads or max(1, target.num_kv_heads // 2)
    heads = size.num_heads or kv_heads * (target.num_heads // target.num_kv_heads)
    if min(size.num_layers, hidden, dim, kv_heads, heads) < 1 or dim % 2 or heads % kv_heads:
        raise ConfigError(
            f"a draft of {size.num_layers} layers, {heads} heads and {kv_heads} KV heads of {dim} is no model: sizes "
            "must be at least 1, head_dim even, num_heads a multiple of num_kv_heads"
        )
    return ModelShape(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        num_layers=size.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=size.intermediate_size or 8 * hidden // 3,
        max_positions=target.max_model_len,
    )


def run_draft(
    recipe: DraftRecipe,
    sources: Sources,
    out: Path,
    *,
    backend: str = "auto",
    device: str = "cpu",
    resume: bool = False,
    quiet: bool = False,
) -> Trained:
    """Train a draft for `recipe.target` into `out/draft`, a Hugging Face folder with the target's tokenizer.

    `backend` computes the target. With `resume`, written texts are kept and training continues from its last
    checkpoint; then only the settings in `resume.EDITABLE` may differ from the first run. Raises ConfigError or
    ModelLoadError with the remedy.
    """
    if sources.measure is not None:
        raise ConfigError("a draft is not measured in training; leave --measure out, and use sameseed bench --prompts")
    folder, config = check_run(recipe, sources, out, resume)
    draft, mask = begin_draft(recipe, config)
    masks = None
    if recipe.parallel:
        masks = MaskSettings(recipe.parallel, mask_of(mask, folder, config), recipe.keep, recipe.least_kept)
    log = Log(out / "log.jsonl")
    own = write_all(recipe, sources, folder, (), NAME, log, backend=backend, device=device, quiet=quiet)
    if not recipe.begin:
        with torch.no_grad():
            components(draft.model.embed_tokens.weight, dense(own.target.ops, own.target.weights.lm_head).cpu())
    draft.to(device)
    parts = draft, own, recipe, out
    job = draft_job(*parts) if masks is None else parallel_job(*parts, masks)
    said = None if masks is None else {"pard_token": masks.mask, "spd_type": "pard", "para_num": masks.tokens}
    progress = train(job, log, quiet=quiet)
    export_model(draft, out / "draft", None, config.eos_token_ids, more=said)
    for name, content in load_tokenizer(folder).as_files().items():
        (out / "draft" / name).write_text(content, encoding="utf-8")
    results = write_results(out, recipe, own.texts, draft.num_parameters(), progress)
    write_draft_card(recipe, draft.shape, results, out / "draft")
    return Trained(out / "draft", results)


def components(embedding: Tensor, weight: Tensor) -> None:
    """Set the first columns of embedding [V, C] to the principal components of weight [V, K]."""
    width = min(embedding.shape[1], weight.shape[1])
    _, basis = torch.linalg.eigh((weight.T @ weight).double())  # in ascending order
    embedding[:, :width] = weight @ basis.flip(1)[:, :width].to(weight.dtype)


def begin_draft(recipe: DraftRecipe, target: ModelConfig) -> tuple[LlamaForTraining, int]:
    """A new draft or the one that `recipe.begin` names; and the requested mask id, else the draft's own, else -1.

    Raises ConfigError for a draft that cannot be trained here.
    """
    if not recipe.begin:
        return LlamaForTraining(draft_shape(recipe, target), recipe.seed), recipe.mask_token
    if recipe.size != DraftSize():
        raise ConfigError(f"--begin {recipe.begin} has sizes of its own; leave out those of the recipe, or --begin")
    folder = resolve_model(recipe.begin)
    c = read_config(folder)
    plain = c.architecture == "LlamaForCausalLM" and c.tied_embeddings and c.rope.kind == "default"
    if not plain or c.qkv_bias or c.o_bias or c.mlp_bias:
        raise ConfigError(
            f"--begin {recipe.begin}: only a Llama with tied embeddings, plain rope and no biases is trained here; "
            "leave it out, and a new draft is made"
        )
    if c.vocab_size != target.vocab_size:
        raise ConfigError(
            f"--begin {recipe.begin} has {c.vocab_size} tokens, the target {target.vocab_size}; take a draft of its own"
        )
    sizes = (c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size)
    longest = min(c.max_model_len, target.max_model_len)
    draft = LlamaForTraining(ModelShape(c.vocab_size, *sizes, c.rms_eps, c.rope.theta, longest), recipe.seed)
    with torch.no_grad(), open_checkpoint(folder) as source:
        source.check(c)
        for name, weight in draft.named_parameters():
            weight.copy_(source.rows(name, 0, len(weight)) if weight.dim() == 2 else source.tensor(name))
    own = -1 if c.mask_token is None else c.mask_token
    return draft, own if recipe.mask_token < 0 else recipe.mask_token


def teacher(target: Decoder, last: Tensor) -> Tensor:
    """The target's logits [R, V] from the output of its last layer [R, C], with its own norm, LM head and format."""
    w = target.weights
    with torch.inference_mode():
        logits = target.ops.product(normed_rows(last, w.norm, target.config.rms_eps), w.lm_head)
    return logits.clone()  # out of inference mode


DraftBatch = tuple[Tensor, Tensor, Tensor]


def draft_batch(texts: list[TextStates], width: int, device: str) -> DraftBatch:
    """Padded texts: ids int64 [B, T]; counts bool [B, T]: places whose next token is trained on.

    The first such place of a text is its last given token. last [R, C]: the target's states at these places.
    """
    lengths = [len(t.states) for t in texts]
    ids = torch.zeros(len(texts), max(lengths), dtype=torch.long)
    counts = torch.zeros_like(ids, dtype=torch.bool)
    last = []
    for b, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        first = min(n, max(0, text.num_given - 1))
        ids[b, :n] = text.ids[:n].long()
        counts[b, first:n] = True
        last.append(text.states[first:n, -width:].float())
    return ids.to(device), counts.to(device), torch.cat(last).to(device)


def draft_job(draft: LlamaForTraining, own: Own, recipe: DraftRecipe, folder: Path) -> TrainJob:
    """The draft's training on the target's texts: KL(target || draft) + argmax_weight * CE on the target's argmax."""
    target, device, width = own.target, str(own.target.device), own.target.config.hidden_size

    def batch(step: int) -> DraftBatch:
        return draft_batch(own.batch(recipe, step), width, device)

    def loss(rows: DraftBatch) -> Tensor:
        ids, counts, last = rows
        targets, entropy = soft_targets(teacher(target, last), recipe.argmax_weight)
        shares = torch.full_like(entropy, 1.0 / max(1, len(entropy)))
        hidden = draft.hidden(ids)[counts]  # [R, C]
        cross = fused_soft_cross_entropy(hidden, draft.model.embed_tokens.weight, targets, shares)
        return cross - (shares * entropy).sum()

    count: Callable[[DraftBatch], int] = lambda rows: int(rows[1].sum())  # noqa: E731
    return TrainJob(NAME, draft, recipe.train, batch, loss, folder, count)


def parallel_job(draft: LlamaForTraining, own: Own, recipe: DraftRecipe, folder: Path, masks: MaskSettings) -> TrainJob:
    """Like `draft_job`, with masks behind the texts' tokens: masks learn the target's distribution too."""
    target, device, width = own.target, str(own.target.device), own.target.config.hidden_size

    def batch(step: int) -> MaskedRows:
        return masked_rows(own.batch(recipe, step), width, masks, recipe.seed + step, device)

    def loss(rows: MaskedRows) -> Tensor:
        targets, entropy = soft_targets(teacher(target, rows.last), recipe.argmax_weight)
        shares = torch.full_like(rows.places, 1.0 / max(1, len(rows.places)), dtype=entropy.dtype)
        hidden = draft.hidden_where(rows.ids, rows.positions, rows.seen)[rows.counts]  # [R, C]
        cross = fused_soft_cross_entropy(hidden, draft.model.embed_tokens.weight, targets, shares, rows.places)
        return cross - (shares * entropy[rows.places]).sum()

    return TrainJob(NAME, draft, recipe.train, batch, loss, folder, lambda rows: len(rows.places))
