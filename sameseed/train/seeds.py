"""Where the texts of a training begin: prompts and documents of a file, or of a recipe's mixture."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from sameseed.errors import ConfigError, RequestError
from sameseed.tokenizer import Tokenizer
from sameseed.train import data as corpus
from sameseed.train.distill import training_prompts
from sameseed.train.recipe import load_recipe
from sameseed.train.states import Seed

KINDS = {"messages": list, "prompt": str, "text": str}  # of lines, by their key


@dataclass(frozen=True)
class TextSettings:
    """What the target writes: how many texts, how long, and how many of them greedily.

    `corpus_share`: of all texts, those that are documents as they are rather than the target's own.
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
    """Seeds from the sources of a recipe, each by its share; the tokenizer must be one that a recipe made."""
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
    """Seeds from JSON lines with `prompt`, `messages` or `text` (learned from as it is).

    Where there are fewer than `num_texts`, prompts come again, sampled. Raises ConfigError that names the line.
    """
    if not path.is_file():
        raise ConfigError(f"no prompts at {path}; give a file of JSON lines with 'prompt', 'messages' or 'text'")
    prompts, texts = list[Seq[int]](), list[Seq[int]]()
    for line in read_lines(path, tokenizer):
        longest = settings.prompt_tokens + (settings.new_tokens if line.kind == "text" else 0)
        (texts if line.kind == "text" else prompts).append(line.ids[:longest])
    if not prompts and not texts:
        raise ConfigError(f"{path} holds no prompts; give JSON lines with 'prompt', 'messages' or 'text'")
    num_corpus = min(len(texts), round(settings.num_texts * settings.corpus_share) if prompts else len(texts))
    wanted = settings.num_texts - num_corpus if prompts else 0
    repeated = [prompts[i % len(prompts)] for i in range(wanted)]
    seeds = mixed(repeated[: len(prompts)], texts[:num_corpus], settings, seed)
    return seeds + [Seed(tuple(ids), settings.new_tokens, settings.temperature) for ids in repeated[len(prompts) :]]


def held_out(path: Path, tokenizer: Tokenizer, context: int, new_tokens: int) -> list[Line]:
    """Prompts to count acceptance on: JSON lines with `prompt` or `messages`, optionally `domain`.

    `new_tokens` must fit behind each. Raises ConfigError that names the line.
    """
    if not path.is_file():
        raise ConfigError(f"no prompts to measure on at {path}; name a file of JSON lines, or leave it out")
    found = list(read_lines(path, tokenizer))
    for line in found:
        if line.kind == "text":
            raise ConfigError(f"{line.where}: acceptance is counted behind a 'prompt' or 'messages', not in a 'text'")
        if not 1 <= len(line.ids) <= context - new_tokens:
            raise ConfigError(
                f"{line.where} has {len(line.ids)} tokens; it needs at least one, and with the {new_tokens} that are "
                f"written behind it at most {context - new_tokens}: the target's context is {context}"
            )
    if not found:
        raise ConfigError(f"{path} holds no prompts to measure on; give JSON lines with 'prompt' or 'messages'")
    return found


@dataclass(frozen=True)
class Line:
    """A line of a prompt file: where it is, for messages; "prompt", "messages" or "text"; its tokens; its domain."""

    where: str
    kind: str
    ids: tuple[int, ...]
    domain: str


def read_lines(path: Path, tokenizer: Tokenizer) -> Iterator[Line]:
    """The lines of a prompt file. Raises ConfigError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a file of JSON lines in UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            row: Any = json.loads(line)
            row = row if isinstance(row, dict) else {}
            kind = next((k for k, t in KINDS.items() if isinstance(row.get(k), t) and row[k]), None)
            if kind is not None:
                ids = tokenizer.chat(row[kind]) if kind == "messages" else tokenizer.encode(row[kind])
                yield Line(where, kind, tuple(ids), str(row.get("domain", "prompts")))
                continue
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is no JSON ({error}); one object a line") from None
        except RequestError as error:
            raise ConfigError(f"{where}: {error}") from None
        raise ConfigError(f"{where}: expected an object with 'prompt', 'messages' or 'text'")


def mixed(prompts: Seq[Seq[int]], texts: Seq[Seq[int]], settings: TextSettings, seed: int) -> list[Seed]:
    """Prompts, most of them greedy, and texts, in a seeded order; what is too short to learn from is left out."""
    rng = random.Random(seed)
    seeds = [Seed(tuple(ids), 0) for ids in texts if len(ids) > 3]
    for ids in prompts:
        heat = 0.0 if rng.random() < settings.greedy else settings.temperature
        seeds.append(Seed(tuple(ids), settings.new_tokens, heat))
    rng.shuffle(seeds)
    return seeds
