"""An inquiry: the prompts, what was answered to each alone, and the server that is asked; which promises there are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from sameseed.study.load import prompts
from sameseed.study.promises.ask import Asker, ServerQuestion
from sameseed.study.promises.evidence import Evidence
from sameseed.study.promises.reading import ServedText
from sameseed.study.promises.weights import Weights
from sameseed.study.prompt_sets import Prompt


@dataclass
class Inquiry:
    """What all promises share. `alone`: greedy answers to each prompt, one by one; `scored`: with log-probabilities.

    `heard`: greedy answers with the index of their prompt, for the oracle. `earlier`: the report of an earlier run.
    """

    asker: Asker
    prompts: Seq[Prompt]
    max_tokens: int
    concurrency: int
    seed: int
    max_model_len: int | None = None
    weights: Weights | None = None
    earlier: Mapping[str, Any] | None = None
    alone: list[ServedText] = field(default_factory=list)
    scored: list[ServedText] = field(default_factory=list)
    heard: list[tuple[int, ServedText]] = field(default_factory=list)

    @property
    def chat(self) -> bool:
        return self.asker.endpoint.chat

    def fields(self, index: int) -> dict[str, Any]:
        """A prompt as fields of a body."""
        prompt = self.prompts[index]
        if self.chat and prompt.messages:
            return {"messages": list(prompt.messages)}
        return prompts.as_prompt(prompt.said, self.chat)

    def question(self, index: int, **more: Any) -> ServerQuestion:
        """The greedy question of a prompt; `more` are settings of ServerQuestion."""
        return ServerQuestion(self.fields(index), more.pop("max_tokens", self.max_tokens), **more)

    def compare(self, evidence: Evidence, way: str, index: int, found: ServedText) -> bool:
        """Hold a greedy answer against that of the prompt alone."""
        if found.error is None:
            self.heard.append((index, found))
        return evidence.compare(f"{self.prompts[index].id}, {way}", self.alone[index], found)


@dataclass(frozen=True)
class Promise:
    """One promise: its name, what it says, and what asks for it."""

    id: str
    name: str
    says: str
    ask: Callable[[Inquiry, Evidence], Awaitable[None]]


PROMISES: dict[str, Promise] = {}


def promise(id: str, name: str) -> Callable[[Any], Any]:
    """Enter a function as the one that asks for a promise; its docstring says what it is."""

    def enter(ask: Callable[[Inquiry, Evidence], Awaitable[None]]) -> Callable[[Inquiry, Evidence], Awaitable[None]]:
        PROMISES[id] = Promise(id, name, " ".join((ask.__doc__ or "").split()), ask)
        return ask

    return enter
