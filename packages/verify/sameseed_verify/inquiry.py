"""An inquiry: the prompts, the server, and its answer to each prompt alone. Also the register of promises."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from sameseed_verify import prompts
from sameseed_verify.ask import Asker, ServerQuestion
from sameseed_verify.evidence import Evidence
from sameseed_verify.prompts import Prompt
from sameseed_verify.reading import ServedText
from sameseed_verify.weights import Weights


@dataclass
class Inquiry:
    """State shared by all promises. `alone`: greedy answer to each prompt, requested one at a time.

    `scored`: the greedy answers with log-probabilities. `heard`: further greedy answers with the index of their prompt,
    for the oracle. `earlier`: the report of an earlier run.
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
        """A prompt as fields of a request's body."""
        prompt = self.prompts[index]
        if self.chat and prompt.messages:
            return {"messages": list(prompt.messages)}
        return prompts.as_prompt(prompt.said, self.chat)

    def question(self, index: int, **more: Any) -> ServerQuestion:
        """The greedy question for a prompt; `more`: fields of ServerQuestion."""
        return ServerQuestion(self.fields(index), more.pop("max_tokens", self.max_tokens), **more)

    def compare(self, evidence: Evidence, way: str, index: int, found: ServedText) -> bool:
        """Compare a greedy answer with the answer to the prompt alone; True if they are equal."""
        if found.error is None:
            self.heard.append((index, found))
        return evidence.compare(f"{self.prompts[index].id}, {way}", self.alone[index], found)


@dataclass(frozen=True)
class Promise:
    """One promise: its name, its statement `says`, and the function that tests it."""

    id: str
    name: str
    says: str
    ask: Callable[[Inquiry, Evidence], Awaitable[None]]


PROMISES: dict[str, Promise] = {}


def promise(id: str, name: str) -> Callable[[Any], Any]:
    """Register a function as the test of a promise; its docstring is the promise's statement in reports."""

    def enter(ask: Callable[[Inquiry, Evidence], Awaitable[None]]) -> Callable[[Inquiry, Evidence], Awaitable[None]]:
        PROMISES[id] = Promise(id, name, " ".join((ask.__doc__ or "").split()), ask)
        return ask

    return enter
