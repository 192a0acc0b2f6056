"""Seeds of training texts: prompts and documents from a file, or from a recipe's sources.

The first n seeds are the same however many are asked for, so that a run may add texts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from sameseed.errors import ConfigError
from sameseed.lines import KINDS, Line, read_lines
from sameseed.tokenizer import Tokenizer
from sameseed_train.prompts import conversations
from sameseed_train.recipe import SourceSettings
from sameseed_train.states import Seed

Prompt = tuple[tuple[int, ...], str]  # its tokens, its domain
MISSES = 10000  # prompts in a row that may be too long
LEAST = 4  # tokens of a given text that is learned from: two guesses


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


def recipe_seeds(
    sources: Seq[SourceSettings], data: Path, tokenizer: Tokenizer, settings: TextSettings, seed: int
) -> Iterator[Seed]:
    """Endless seeds from the sources of a recipe, by their shares. Raises ConfigError."""
    if not data.is_dir():
        raise ConfigError(f"no data folder at {data}; give the folder that holds the recipe's files with --data")
    rng, longest, missed = random.Random(f"{seed}/seeds"), settings.prompt_tokens, 0
    for asked in conversations(sources, data, seed, held_out=False):
        given, greedy = rng.random() < settings.corpus_share, rng.random() < settings.greedy and not asked.times
        ids = asked.whole(tokenizer)[: longest + settings.new_tokens] if given else asked.prompt(tokenizer)
        fits = len(ids) >= LEAST if given else 0 < len(ids) <= longest
        missed = 0 if fits else missed + 1
        if missed > MISSES:
            raise ConfigError(
                f"of {MISSES} prompts none has at most {longest} tokens; raise texts.prompt_tokens, or change sources"
            )
        if fits:
            heat = 0.0 if greedy or given else settings.temperature
            yield Seed(tuple(ids), 0 if given else settings.new_tokens, heat)


def file_seeds(path: Path, tokenizer: Tokenizer, settings: TextSettings, seed: int) -> Iterator[Seed]:
    """Seeds from JSON lines with `prompt`, `messages` or `text` (a given text, trained on as it is), in seeded order.

    Prompts are repeated without end, then all sampled; given texts are not. Raises ConfigError naming the line.
    """
    if not path.is_file():
        raise ConfigError(f"no prompts at {path}; give a file of JSON lines with 'prompt', 'messages' or 'text'")
    lines = [(line.kind, _fitting(line, tokenizer, settings)) for line in read_lines(path, *KINDS)]
    if not lines:
        raise ConfigError(f"{path} holds no prompts; give JSON lines with 'prompt', 'messages' or 'text'")
    prompts = [ids for kind, ids in lines if ids and kind != "text"]
    texts = [ids for kind, ids in lines if ids and kind == "text"]
    rng = random.Random(seed)
    rng.shuffle(prompts)
    rng.shuffle(texts)
    asked = itertools.count()
    while texts or prompts:
        if texts and (not prompts or rng.random() < settings.corpus_share):
            yield Seed(texts.pop(), 0)
        elif prompts:
            times, place = divmod(next(asked), len(prompts))
            greedy = rng.random() < settings.greedy and not times
            yield Seed(prompts[place], settings.new_tokens, 0.0 if greedy else settings.temperature)


def _fitting(line: Line, tokenizer: Tokenizer, settings: TextSettings) -> tuple[int, ...]:
    """A line's ids, cut to the recipe's lengths; none if a conversation is too long to be cut, or a text too short."""
    ids = line.encode(tokenizer)
    if line.kind == "text":
        return ids[: settings.prompt_tokens + settings.new_tokens] if len(ids) >= LEAST else ()
    if line.kind == "messages" and len(ids) > settings.prompt_tokens:
        return ()  # its end asks for the answer
    return ids[: settings.prompt_tokens]


def recipe_held_out(
    sources: Seq[SourceSettings], data: Path, tokenizer: Tokenizer, settings: TextSettings, seed: int, count: int
) -> list[Prompt]:
    """The first `count` different prompts from held-out documents of a recipe's sources, with their domains."""
    found: dict[tuple[int, ...], str] = {}
    for asked in itertools.islice(conversations(sources, data, seed, held_out=True), 20 * count):
        ids = tuple(asked.prompt(tokenizer))
        if 0 < len(ids) <= settings.prompt_tokens and len(found) < count:
            found[ids] = asked.source.domain
    return list(found.items())


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
