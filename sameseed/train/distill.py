"""The draft stage: the target continues training prompts, and the draft learns the target's distribution on them.

On-policy text is what acceptance is made of: while speculating, the draft only ever reads text that the target chose.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sameseed.train import data as corpus
from sameseed.train.checkpoint import read_tensors, save_tensors
from sameseed.train.data import Document
from sameseed.train.losses import fused_distillation
from sameseed.train.model import LlamaForTraining
from sameseed.train.recipe import Recipe
from sameseed.train.rollout import prompt_of, write
from sameseed.train.tokenizer import PAD, token_id
from sameseed.train.trainer import Log, TrainJob, progress_bar

# Marks a token of a prompt in a stored row: the draft reads it, but no loss counts it.
PROMPT_BIT = 1 << 20
PART = 512  # prompts whose continuations are kept at once, so that an interruption costs little
LEAST_SHARE = 0.04  # of all prompts, for the smallest source


def training_prompts(recipe: Recipe, data: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Prompts cut from training documents, each source by its share of the bytes trained on, in a seeded order."""
    rng = random.Random(recipe.seed + 1)
    sources = [(s, corpus.source_documents(s, data, recipe.seed)) for s in recipe.source]
    sizes = [s.epochs * sum(d.num_bytes for d in documents) for s, documents in sources]
    prompts: list[list[int]] = []
    for (_, documents), size in zip(sources, sizes, strict=True):
        wanted = round(recipe.draft.rollouts.num_prompts * max(LEAST_SHARE, size / sum(sizes)))
        prompts += prompts_from(documents, wanted, recipe.draft.rollouts.prompt_tokens, tokenizer, rng)
    rng.shuffle(prompts)
    return prompts


def prompts_from(
    documents: list[Document], wanted: int, limit: int, tokenizer: Tokenizer, rng: random.Random
) -> list[list[int]]:
    """At most `wanted` prompts; a document may give several, a prompt comes once."""
    found: dict[tuple[int, ...], None] = {}
    for attempt in range(4 * wanted):
        if len(found) == wanted:
            break
        prompt = prompt_of(tokenizer, documents[attempt % len(documents)], limit, rng)
        if prompt is not None:
            found[tuple(prompt)] = None
    return [list(p) for p in found]


def rollout_rows(
    recipe: Recipe,
    data: Path,
    out: Path,
    tokenizer: Tokenizer,
    target: LlamaForTraining,
    log: Log,
    *,
    digest: str,
    quiet: bool,
) -> Tensor:
    """The target's own text as rows int32 `[num_rows, S+1]`; parts kept for this `digest` are not written again."""
    prompts = training_prompts(recipe, data, tokenizer)
    texts: list[list[int]] = []
    with progress_bar(quiet) as bar:
        task = bar.add_task("rollouts", total=len(prompts), loss=0.0, rate=0.0)
        for number, start in enumerate(range(0, len(prompts), PART)):
            path = out / "rollouts" / digest / f"{number:03}.safetensors"
            if not path.exists():
                save_rollouts(recipe, prompts[start : start + PART], tokenizer, target, number, path)
            stored, _ = read_tensors(path)
            part = [t.tolist() for t in torch.split(stored["ids"], stored["lengths"].tolist())]
            texts += part
            log.write(stage="rollouts", part=number, prompts=len(part), tokens=sum(map(len, part)))
            bar.update(task, completed=start + len(part))
    return corpus.pack(texts, recipe.draft.train.row_tokens + 1, token_id(tokenizer, PAD))


def save_rollouts(
    recipe: Recipe, prompts: list[list[int]], tokenizer: Tokenizer, target: LlamaForTraining, number: int, path: Path
) -> None:
    """Write one part: ids of prompt (marked) and continuation, one text after another, and their lengths."""
    settings, rng = recipe.draft.rollouts, random.Random(recipe.seed + 2 + number)
    heat = [0.0 if rng.random() < settings.greedy else settings.temperature for _ in prompts]
    written = write(
        target,
        prompts,
        tokenizer,
        new_tokens=settings.new_tokens,
        batch=settings.batch,
        temperatures=heat,
        seed=recipe.seed + 1000 * number,
    )
    texts = [[t | PROMPT_BIT for t in r.prompt] + r.new for r in written]
    ids = torch.tensor([t for text in texts for t in text], dtype=torch.int32)
    lengths = torch.tensor([len(t) for t in texts], dtype=torch.int32)
    save_tensors({"ids": ids, "lengths": lengths}, path, {"prompts": len(prompts)})


def start_from_target(draft: LlamaForTraining, target: LlamaForTraining) -> None:
    """Set the draft's embedding to the principal components of the target's: words start where the target has them."""
    weight = target.model.embed_tokens.weight.detach().to(draft.device)
    width = min(draft.shape.hidden_size, target.shape.hidden_size)
    _, _, basis = torch.linalg.svd(weight, full_matrices=False)
    with torch.no_grad():
        draft.model.embed_tokens.weight[:, :width] = weight @ basis[:width].T


def draft_batch(recipe: Recipe, rollouts: Tensor, rows: Tensor) -> Callable[[int], Tensor]:
    """step -> rows `[B, S+1]`: corpus rows (as many as `corpus_share` says, evenly spread), then rollouts."""
    settings = recipe.draft.train

    def batch(step: int) -> Tensor:
        share = recipe.draft.corpus_share * settings.rows
        own = int(share * (step + 1)) - int(share * step)
        # Each of the two is read in its own order, whatever the share: position = rows read before this step.
        first = int(share * step)
        index = torch.arange(first, first + own) % rows.shape[0]
        other = torch.arange(step * settings.rows - first, (step + 1) * settings.rows - first - own)
        return torch.cat((rows[index].long(), rollouts[permuted(other, rollouts.shape[0], recipe.seed)].long()))

    return batch


def permuted(index: Tensor, size: int, seed: int) -> Tensor:
    """Places of `index` in an endless stream that goes through 0..size-1 in another order on each pass."""
    places = []
    for i in index.tolist():
        epoch, place = divmod(i, size)
        places.append(int(torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch))[place]))
    return torch.tensor(places, dtype=torch.long)


def draft_job(
    recipe: Recipe, target: LlamaForTraining, rollouts: Tensor, rows: Tensor, pad: int, out: Path
) -> TrainJob:
    """The draft's training: the target's distribution on rows of its own text and of the corpus."""
    draft = LlamaForTraining(recipe.draft.shape, recipe.seed + 7)
    start_from_target(draft, target)  # before it is moved: the first weights are the CPU's on every device
    draft.to(target.device)
    target.eval()

    def loss(batch: Tensor) -> Tensor:
        batch = batch.to(target.device)
        ids = batch & ~PROMPT_BIT
        counts = (batch[:, 1:] < PROMPT_BIT) & (ids[:, 1:] != pad)  # [B, S]
        with torch.no_grad():
            t_hidden = target.hidden(ids[:, :-1]).flatten(0, 1)  # [B*S, C]
        return fused_distillation(
            draft.hidden(ids[:, :-1]).flatten(0, 1),
            draft.model.embed_tokens.weight,
            t_hidden,
            target.model.embed_tokens.weight.detach(),
            counts.flatten(),
            recipe.draft.argmax_weight,
        )

    return TrainJob("draft", draft, recipe.draft.train, draft_batch(recipe, rollouts, rows), loss, out)
