"""Prompts for load tests: built-in text or random tokens, cut to a length in the server's tokens; or from a file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameseed.errors import ConfigError, say_once
from sameseed.measure.load.wire import Endpoint
from sameseed.measure.prompt_sets import Prompt
from sameseed.measure.workload import ASSETS, read_prompts

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


class PromptSource:
    """Prompts, cut to a length: "text" (packaged texts in random order), "random" (tokens of them); or a file's."""

    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, kind: str) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self.client, self.endpoint, self.kind = client, endpoint, kind
        self.packaged = kind in ("text", "random")
        files = [ASSETS / name for name in BUILT_IN] if self.packaged else [Path(kind)]
        self.prompts = [prompt for file in files for prompt in read_prompts(file)]
        self.tokens: list[list[int]] = []  # of each packaged text; empty if the server cannot tokenize
        self.special: list[int] = []  # tokens that the tokenizer adds before a text
        self.characters = 4.0  # per token, to choose a text's length when tokens are unknown

    async def open(self) -> None:
        """Ask the server for the tokens of the packaged texts, if it has a route /tokenize."""
        texts = [p.said for p in self.prompts] if self.packaged else []
        first = await self.tokenize(texts[0], special=False) if texts else None
        if first is None:
            return
        self.tokens = [first, *[await self.tokenize("\n\n" + text, special=False) or [] for text in texts[1:]]]
        self.characters = sum(map(len, texts)) / max(1, sum(map(len, self.tokens)))
        begun = await self.tokenize(texts[0], special=True) or []
        if begun[-len(first) :] == first:
            self.special = begun[: len(begun) - len(first)]

    async def make(self, shape: Shape, count: int, seed: str) -> list[dict[str, Any]]:
        """`count` prompts as fields of a body; those of a file in order from a random start. Raises ConfigError."""
        noise = random.Random(f"prompts {seed}")
        if self.packaged:
            return [await self._drawn(shape.num_input or 0, noise) for _ in range(count)]
        start = noise.randrange(len(self.prompts))
        chosen = [self.prompts[(start + i) % len(self.prompts)] for i in range(count)]
        if any(len(p.stop) > MOST_STOPS for p in chosen):
            say_once(
                f"{self.kind}: only the first {MOST_STOPS} stop strings of a prompt are sent, as the API takes no more"
            )
        return [await self._body(p, shape.num_output) for p in chosen]

    async def _drawn(self, count: int, noise: random.Random) -> dict[str, Any]:
        """A prompt of `count` tokens, as fields of a request's body."""
        if not self.tokens and self.kind == "random":
            raise ConfigError("this server has no /tokenize, so no token is known; leave --prompts at text")
        tokens = list(self.special)
        if self.kind == "random":
            tokens += noise.choices(sorted({t for piece in self.tokens for t in piece}), k=count)
        while self.tokens and len(tokens) < count:
            tokens += [t for piece in noise.sample(self.tokens, len(self.tokens)) for t in piece]
        tokens = tokens[:count]
        if tokens and not self.endpoint.chat:
            return {"prompt": tokens}
        told = await self.ask("detokenize", tokens=tokens[len(self.special) :]) if tokens else {}
        text = told.get("prompt", told.get("content"))
        if not isinstance(text, str):  # about so many tokens, by their characters
            text, texts = "", [p.said for p in self.prompts]
            while len(text) < int(count * self.characters):
                text += "\n\n".join(noise.sample(texts, len(texts))) + "\n\n"
            text = text[: int(count * self.characters)]
        return as_prompt(text, self.endpoint.chat)

    async def _body(self, prompt: Prompt, num_output: int) -> dict[str, Any]:
        """A prompt as fields of a body. Before later turns stand the server's greedy answers to earlier turns."""
        stop = {"stop": list(prompt.stop)[:MOST_STOPS]} if prompt.stop else {}
        if not self.endpoint.chat or not prompt.messages:
            cut = bool(prompt.clip) and not self.endpoint.chat
            tokens = await self.tokenize(prompt.said, special=True) if cut else None
            own = {"prompt": tokens[: prompt.clip]} if tokens else as_prompt(prompt.said, self.endpoint.chat)
            return own | stop
        messages = list(prompt.messages)
        for turn in prompt.then:
            asked = {"messages": messages, "max_tokens": num_output, "temperature": 0.0}
            said = (await self.ask("v1/chat/completions", **asked)).get("choices")
            if not said:
                url = self.endpoint.url
                raise ConfigError(f"{url} did not answer the first turn of prompt {prompt.id}; is --chat right?")
            content = said[0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": turn}]
        return {"messages": messages, **stop}

    async def ask(self, route: str, **fields: Any) -> dict[str, Any]:
        """The JSON answer of a route outside OpenAI's API; empty if the server does not have it."""
        body = {"model": self.endpoint.model, **fields}
        response = await self.client.post(f"{self.endpoint.url}/{route}", json=body)
        return dict(response.json()) if response.status_code == 200 else {}

    async def tokenize(self, text: str, special: bool) -> list[int] | None:
        """Token ids by the server; None if it cannot tokenize. The body has vLLM's and llama-server's field names."""
        fields = {"prompt": text, "content": text, "add_special_tokens": special, "add_special": special}
        found = (await self.ask("tokenize", **fields)).get("tokens")
        return found if isinstance(found, list) and all(isinstance(t, int) for t in found) else None


def as_prompt(text: str, chat: bool) -> dict[str, Any]:
    """A text as fields of a request's body: a user message for chat, else a prompt."""
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
