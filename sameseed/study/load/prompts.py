"""Prompts of a length: built-in text or random tokens, cut to a length in the server's own tokens; or a file's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameseed.errors import ConfigError
from sameseed.study.load.wire import Endpoint
from sameseed.study.workload import ASSETS, Prompt, read_prompts

if TYPE_CHECKING:
    import httpx

BUILT_IN = ("prompts.jsonl", "prompts_heldout.jsonl")


@dataclass(frozen=True)
class Shape:
    """Tokens of a prompt, and tokens to write. `num_input` None: prompts as a file has them."""

    num_input: int | None
    num_output: int

    @property
    def label(self) -> str:
        return f"{self.num_input}-{self.num_output}" if self.num_input is not None else f"file-{self.num_output}"


def parse_shape(text: str, scale: float) -> Shape:
    """IN-OUT in tokens, scaled; at least one of each. Raises ConfigError."""
    first, _, second = text.partition("-")
    if not (first.isdigit() and second.isdigit()) or not int(first) or not int(second):
        raise ConfigError(f"--lengths takes IN-OUT in tokens, e.g. 2000-200, got {text!r}")
    if not scale > 0:
        raise ConfigError(f"--scale must be above 0, got {scale}")
    return Shape(max(1, round(int(first) * scale)), max(1, round(int(second) * scale)))


@dataclass(frozen=True)
class PromptSource:
    """Where prompts come from: pieces of text and, where the server tokenizes, their tokens.

    `characters`: of a token, on the average; how long a text must be where there are no tokens.
    """

    pieces: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...] | None
    special: tuple[int, ...] = ()  # what the tokenizer puts before a text
    characters: float = 4.0

    def words(self, count: int, noise: random.Random) -> list[int]:
        """`count` tokens of text, the pieces in an order of their own."""
        assert self.tokens is not None
        made = list(self.special)
        while len(made) < count:
            for i in noise.sample(range(len(self.tokens)), len(self.tokens)):
                made += self.tokens[i]
        return made[:count]

    def random_tokens(self, count: int, noise: random.Random) -> list[int]:
        """`count` random tokens among those that the text has: none of them is special."""
        assert self.tokens is not None
        known = sorted({t for piece in self.tokens for t in piece})
        return [*self.special, *noise.choices(known, k=count)][:count]

    def text(self, count: int, noise: random.Random) -> str:
        """About `count` tokens of text, by its length."""
        made, wanted = "", int(count * self.characters)
        while len(made) < wanted:
            made += "\n\n".join(noise.sample(self.pieces, len(self.pieces))) + "\n\n"
        return made[:wanted]


async def open_source(client: httpx.AsyncClient, endpoint: Endpoint) -> PromptSource:
    """The built-in text, in the server's tokens where it has a route /tokenize."""
    prompts = [p for name in BUILT_IN for p in read_prompts(ASSETS / name)]
    pieces = tuple(_plain(p) for p in prompts)
    tokens = [await tokenize(client, endpoint, piece, special=False) for piece in pieces[:1]]
    if tokens[0] is None:
        return PromptSource(pieces, None)
    tokens += [await tokenize(client, endpoint, "\n\n" + piece, special=False) for piece in pieces[1:]]
    begun = await tokenize(client, endpoint, pieces[0], special=True) or []
    special = begun[: len(begun) - len(tokens[0])] if begun[-len(tokens[0]) :] == tokens[0] else []
    found = tuple(tuple(t) for t in tokens if t)
    characters = sum(map(len, pieces)) / max(1, sum(map(len, found)))
    return PromptSource(pieces, found, tuple(special), characters)


def _plain(prompt: Prompt) -> str:
    return prompt.text if prompt.text is not None else "\n".join(m["content"] for m in prompt.messages)


async def tokenize(client: httpx.AsyncClient, endpoint: Endpoint, text: str, special: bool) -> list[int] | None:
    """Token ids by the server (vLLM's and llama-server's field names in one body); None where it has no such route."""
    body: dict[str, Any] = {"model": endpoint.model, "prompt": text, "content": text}
    body |= {"add_special_tokens": special, "add_special": special}
    response = await client.post(endpoint.url + "/tokenize", json=body)
    if response.status_code != 200:
        return None
    found = response.json().get("tokens")
    return found if isinstance(found, list) and all(isinstance(t, int) for t in found) else None


async def detokenize(client: httpx.AsyncClient, endpoint: Endpoint, tokens: Seq[int]) -> str | None:
    """Text of token ids by the server; None where it has no such route."""
    response = await client.post(endpoint.url + "/detokenize", json={"model": endpoint.model, "tokens": list(tokens)})
    if response.status_code != 200:
        return None
    made = response.json()
    text = made.get("prompt", made.get("content"))
    return text if isinstance(text, str) else None


async def make_prompts(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    kind: str,
    shape: Shape,
    count: int,
    seed: str,
    source: PromptSource | None,
) -> list[dict[str, Any]]:
    """`count` different prompts as fields of a body. `kind`: text, random, or a file. Raises ConfigError."""
    noise = random.Random(f"prompts {seed}")
    if source is None:
        return _of_file(read_prompts(Path(kind)), count, endpoint.chat, noise)
    assert shape.num_input is not None
    made: list[dict[str, Any]] = []
    for _ in range(count):
        if source.tokens is None:
            if kind == "random":
                raise ConfigError("this server has no /tokenize, so no token is known; leave --prompts at text")
            made.append(_as_text(source.text(shape.num_input, noise), endpoint.chat))
            continue
        draw = source.random_tokens if kind == "random" else source.words
        tokens = draw(shape.num_input, noise)
        if not endpoint.chat:
            made.append({"prompt": tokens})
            continue
        text = await detokenize(client, endpoint, tokens[len(source.special) :])
        made.append(_as_text(source.text(shape.num_input, noise) if text is None else text, True))
    return made


def _of_file(prompts: Seq[Prompt], count: int, chat: bool, noise: random.Random) -> list[dict[str, Any]]:
    """Prompts in the file's order, from a random one on, again from the first when they run out."""
    start = noise.randrange(len(prompts))
    chosen = [prompts[(start + i) % len(prompts)] for i in range(count)]
    return [{"messages": list(p.messages)} if chat and p.messages else _as_text(_plain(p), chat) for p in chosen]


def _as_text(text: str, chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


def fields(shape: Shape, sampling: Mapping[str, Any], seed: int, salt: str, strict: bool) -> dict[str, Any]:
    """What a body has beside its prompt. `strict`: OpenAI's own fields only, and no word on the prompt's cache.

    `salt` keeps what other requests left in a server's prefix cache out of reach.
    """
    made: dict[str, Any] = {
        "max_tokens": shape.num_output,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }
    if strict:
        return made
    return made | {"ignore_eos": True, "return_token_ids": True, "cache_salt": salt, "cache_prompt": False}
