"""Seeds of training texts: prompts and documents from a file, or from a recipe's mixture."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from sameseed.errors import ConfigError
from sameseed.lines import KINDS, read_lines
from sameseed.tokenizer import Tokenizer
from sameseed.train import data as corpus
from sameseed.train.distill import training_prompts
from sameseed.train.recipe import load_recipe
from sameseed.train.states import Seed

Prompt = tuple[tuple[int, ...], str]  # its tokens, its domain


@dataclass(frozen=True)
class TextSettings:
    """The texts that the target writes: their number, their length, and the share written greedily.

    `corpus_share`: share of texts that are given documents rather than written by the target.
    """

    num_texts: int = 4000
    prompt_tokens: int = 200
    new_tokens: int = 192
    greedy: float = 0.85
    temperature: float = 0.8
    corpus_share: float = 0.1

    def __post_init__(self) -> None:
        for name in ("num_texts", "prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("greedy", "corpus_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must lie in 0..1, got {getattr(self, name)}")


def recipe_seeds(path: Path, data: Path, tokenizer_file: Path, settings: TextSettings, seed: int) -> list[Seed]:
    """Seeds from the sources of a recipe, by their shares. The tokenizer must come from such a recipe."""
    if not data.is_dir():
        raise ConfigError(f"no data folder at {data}; give the folder that holds the recipe's files with --data")
    recipe = load_recipe(path)
    tokenizer = HFTokenizer.from_file(str(tokenizer_file))
    num_prompts = round(settings.num_texts * (1 - settings.corpus_share))
    rollouts = replace(recipe.draft.rollouts, num_prompts=num_prompts, prompt_tokens=settings.prompt_tokens)
    own = replace(recipe, draft=replace(recipe.draft, rollouts=rollouts))
    prompts = training_prompts(own, data, tokenizer)
    documents = corpus.training_order(recipe, data)[: settings.num_texts - num_prompts]
    longest = settings.prompt_tokens + settings.new_tokens
    texts = [corpus.encode(tokenizer, d)[:longest] for d in documents]
    return mixed(prompts, texts, settings, seed)


def file_seeds(path: Path, tokenizer: Tokenizer, settings: TextSettings, seed: int) -> list[Seed]:
    """Seeds from JSON lines with `prompt`, `messages` or `text` (a given text, trained on as it is).

    If the file has fewer than `num_texts`, prompts are repeated and sampled. Raises ConfigError naming the line.
    """
    if not path.is_file():
        raise ConfigError(f"no prompts at {path}; give a file of JSON lines with 'prompt', 'messages' or 'text'")
    prompts, texts = list[Seq[int]](), list[Seq[int]]()
    for line in read_lines(path, *KINDS):
        longest = settings.prompt_tokens + (settings.new_tokens if line.kind == "text" else 0)
        (texts if line.kind == "text" else prompts).append(line.encode(tokenizer)[:longest])
    if not prompts and not texts:
        raise ConfigError(f"{path} holds no prompts; give JSON lines with 'prompt', 'messages' or 'text'")
    num_corpus = min(len(texts), round(settings.num_texts * settings.corpus_share) if prompts else len(texts))
    wanted = settings.num_texts - num_corpus if prompts else 0
    repeated = [prompts[i % len(prompts)] for i in range(wanted)]
    seeds = mixed(repeated[: len(prompts)], texts[:num_corpus], settings, seed)
    return seeds + [Seed(tuple(ids), settings.new_tokens, settings.temperature) for ids in repeated[len(prompts) :]]


def held_out(path: Path, tokenizer: Tokenizer, context: int, new_tokens: int) -> list[Prompt]:
    """Prompts to measure acceptance on, with domains: JSON lines with `prompt` or `messages`, optionally `domain`.

    A prompt and `new_tokens` must fit into `context`. Raises ConfigError naming the line.
    """
    if not path.is_file():
        raise ConfigError(f"no prompts to measure on at {path}; name a file of JSON lines, or leave it out")
    found = []
    for line in read_lines(path, "messages", "prompt"):
        ids = line.encode(tokenizer)
        if not 1 <= len(ids) <= context - new_tokens:
            raise ConfigError(
                f"{line.where} has {len(ids)} tokens; it needs at least one, and with the {new_tokens} that are "
                f"written behind it at most {context - new_tokens}: the target's context is {context}"
            )
        found.append((ids, str(line.row.get("domain", "prompts"))))
    if not found:
        raise ConfigError(f"{path} holds no prompts to measure on; give JSON lines with 'prompt' or 'messages'")
    return found


def mixed(prompts: Seq[Seq[int]], texts: Seq[Seq[int]], settings: TextSettings, seed: int) -> list[Seed]:
    """Seeds of prompts (about `settings.greedy` of them greedy) and of texts (not very short ones), in seeded order."""
    rng = random.Random(seed)
    seeds = [Seed(tuple(ids), 0) for ids in texts if len(ids) > 3]
    for ids in prompts:
        heat = 0.0 if rng.random() < settings.greedy else settings.temperature
        seeds.append(Seed(tuple(ids), settings.new_tokens, heat))
    rng.shuffle(seeds)
    return seeds
