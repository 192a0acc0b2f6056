"""Prompts for load tests: built-in text or random tokens, cut to a length in the server's tokens; or from a file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameseed.errors import ConfigError
from sameseed.measure.load.wire import Endpoint
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.workload import ASSETS, read_prompts
from sameseed.models.layouts.base import say_once

if TYPE_CHECKING:
    import httpx

MOST_STOPS = 4  # the limit of OpenAI's API
BUILT_IN = ("prompts.jsonl", "prompts_heldout.jsonl")


@dataclass(frozen=True)
class Shape:
    """Prompt tokens `num_input`, and tokens to generate `num_output`. `num_input` None: prompts as in the file."""

    num_input: int | None
    num_output: int

    @property
    def label(self) -> str:
        return f"{self.num_input}-{self.num_output}" if self.num_input is not None else f"file-{self.num_output}"

    @property
    def needed(self) -> int:
        """Tokens of context that it takes, the prompts of a file not counted."""
        return (self.num_input or 0) + self.num_output

    def scaled(self, factor: float) -> Shape:
        """Both lengths times `factor`, each at least 1."""
        asked = None if self.num_input is None else max(1, round(self.num_input * factor))
        return Shape(asked, max(1, round(self.num_output * factor)))


def parse_shape(text: str, scale: float) -> Shape:
    """Parse IN-OUT in tokens and scale both; each is at least 1. Raises ConfigError."""
    first, _, second = text.partition("-")
    if not (first.isdigit() and second.isdigit()) or not int(first) or not int(second):
        raise ConfigError(f"--lengths takes IN-OUT in tokens, e.g. 2000-200, got {text!r}")
    if not scale > 0:
        raise ConfigError(f"--scale must be above 0, got {scale}")
    return Shape(int(first), int(second)).scaled(scale)


@dataclass(frozen=True)
class PromptSource:
    """Material for prompts: pieces of text and, if the server can tokenize, their tokens.

    `characters`: mean characters per token, to choose a text's length when tokens are unknown.
    """

    pieces: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...] | None
    special: tuple[int, ...] = ()  # tokens that the tokenizer adds before a text
    characters: float = 4.0

    def draw(self, kind: str, count: int, noise: random.Random) -> list[int]:
        """`count` tokens: the pieces in random order; for kind "random", random tokens that occur in the pieces.

        Both begin with the `special` tokens.
        """
        assert self.tokens is not None
        made = list(self.special)
        if kind == "random":
            return [*made, *noise.choices(sorted({t for piece in self.tokens for t in piece}), k=count)][:count]
        while len(made) < count:
            made += [t for piece in noise.sample(self.tokens, len(self.tokens)) for t in piece]
        return made[:count]

    def text(self, count: int, noise: random.Random) -> str:
        """Text of about `count` tokens, by its number of characters."""
        made, wanted = "", int(count * self.characters)
        while len(made) < wanted:
            made += "\n\n".join(noise.sample(self.pieces, len(self.pieces))) + "\n\n"
        return made[:wanted]


async def open_source(client: httpx.AsyncClient, endpoint: Endpoint) -> PromptSource:
    """The built-in text, with the server's tokens if the server has a route /tokenize."""
    prompts = [p for name in BUILT_IN for p in read_prompts(ASSETS / name)]
    pieces = tuple(p.said for p in prompts)
    tokens = [await tokenize(client, endpoint, piece, special=False) for piece in pieces[:1]]
    if tokens[0] is None:
        return PromptSource(pieces, None)
    tokens += [await tokenize(client, endpoint, "\n\n" + piece, special=False) for piece in pieces[1:]]
    begun = await tokenize(client, endpoint, pieces[0], special=True) or []
    special = begun[: len(begun) - len(tokens[0])] if begun[-len(tokens[0]) :] == tokens[0] else []
    found = tuple(tuple(t) for t in tokens if t)
    characters = sum(map(len, pieces)) / max(1, sum(map(len, found)))
    return PromptSource(pieces, found, tuple(special), characters)


async def ask(client: httpx.AsyncClient, endpoint: Endpoint, route: str, **fields: Any) -> dict[str, Any]:
    """The JSON answer of a route outside OpenAI's API; empty if the server does not have it."""
    response = await client.post(f"{endpoint.url}/{route}", json={"model": endpoint.model, **fields})
    return dict(response.json()) if response.status_code == 200 else {}


async def tokenize(client: httpx.AsyncClient, endpoint: Endpoint, text: str, special: bool) -> list[int] | None:
    """Token ids by the server; None if it cannot tokenize. The body has vLLM's and llama-server's field names."""
    fields = {"prompt": text, "content": text, "add_special_tokens": special, "add_special": special}
    found = (await ask(client, endpoint, "tokenize", **fields)).get("tokens")
    return found if isinstance(found, list) and all(isinstance(t, int) for t in found) else None


async def make_prompts(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    kind: str,
    shape: Shape,
    count: int,
    seed: str,
    source: PromptSource | None,
) -> list[dict[str, Any]]:
    """`count` prompts as fields of a request's body. `kind`: "text", "random", or a file. Raises ConfigError.

    Prompts of a file are taken in order from a random start, and wrap around at the end.
    """
    noise = random.Random(f"prompts {seed}")
    if source is None:
        found = read_prompts(Path(kind))
        start = noise.randrange(len(found))
        chosen = [found[(start + i) % len(found)] for i in range(count)]
        if any(len(p.stop) > MOST_STOPS for p in chosen):
            say_once(f"{kind}: of each prompt's stop strings the first {MOST_STOPS} are sent; the API takes no more")
        return [await _body(client, endpoint, p, shape.num_output) for p in chosen]
    assert shape.num_input is not None
    if source.tokens is None and kind == "random":
        raise ConfigError("this server has no /tokenize, so no token is known; leave --prompts at text")
    made: list[dict[str, Any]] = []
    for _ in range(count):
        tokens = [] if source.tokens is None else source.draw(kind, shape.num_input, noise)
        if tokens and not endpoint.chat:
            made.append({"prompt": tokens})
            continue
        told = await ask(client, endpoint, "detokenize", tokens=tokens[len(source.special) :]) if tokens else {}
        text = told.get("prompt", told.get("content"))
        text = text if isinstance(text, str) else source.text(shape.num_input, noise)
        made.append(as_prompt(text, endpoint.chat))
    return made


async def _body(client: httpx.AsyncClient, endpoint: Endpoint, prompt: Prompt, num_output: int) -> dict[str, Any]:
    """A prompt as fields of a request's body. Before later turns stand the server's greedy answers to earlier turns."""
    stop = {"stop": list(prompt.stop)[:MOST_STOPS]} if prompt.stop else {}
    if not endpoint.chat or not prompt.messages:
        text = prompt.said
        tokens = await tokenize(client, endpoint, text, special=True) if prompt.clip and not endpoint.chat else None
        return {"prompt": tokens[: prompt.clip], **stop} if tokens else {**as_prompt(text, endpoint.chat), **stop}
    messages = list(prompt.messages)
    for turn in prompt.then:
        asked = {"messages": messages, "max_tokens": num_output, "temperature": 0.0}
        said = (await ask(client, endpoint, "v1/chat/completions", **asked)).get("choices")
        if not said:
            raise ConfigError(f"{endpoint.url} did not answer the first turn of prompt {prompt.id}; is --chat right?")
        content = said[0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": turn}]
    return {"messages": messages, **stop}


def as_prompt(text: str, chat: bool) -> dict[str, Any]:
    """A text as fields of a request's body: a user message for chat, else a prompt."""
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
