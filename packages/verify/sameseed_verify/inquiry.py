"""An inquiry: the prompts, the server, its answer to each prompt alone; and the evidence on a promise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from sameseed_verify import prompts
from sameseed_verify.ask import Asker, ServedText, ServerQuestion
from sameseed_verify.prompts import Prompt

HOLDS, BROKEN, NOT_SHOWN = "holds", "broken", "not shown"
LEAST_TEXTS, LEAST_TOKENS = 4, 64  # least amounts compared for a promise to hold
MOST_SHOWN = 5  # most differences that are kept in detail
AROUND = 40  # characters shown on each side of a difference


def option(metavar: str | None = None) -> Any:
    """Help settings of a field that may stay unset: its metavar, and no "(default: None)"."""
    return arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class VerifyServerArgs:
    """Does a server with OpenAI's API return the same text for the same request?

    Alone, under load, streamed, from the prefix cache, with speculation off and on.

    Exit code 0: all promises hold; 1: one is broken; 3: not shown; 2: bad usage.
    """

    url: Annotated[str, Positional]  # the server's address
    name: Annotated[str | None, option("NAME")] = None  # the model's name on the server; unset: the first listed
    chat: Annotated[bool, option()] = False  # /v1/chat/completions instead of /v1/completions
    prompts: Annotated[Path | None, option("FILE")] = None  # .jsonl or .txt; unset: built-in
    num_prompts: Annotated[int | None, option("N")] = None  # most prompts; unset: what --requests allow
    max_tokens: int = 48  # longest answer
    requests: int = 200  # most requests
    seconds: float = 300.0  # most seconds; a running request is waited for
    concurrency: int = 4  # requests at once, for checks under load
    timeout: float = 120.0  # seconds for one request
    seed: int = 1  # of sampled texts and of the load's order
    only: Annotated[tuple[str, ...], option("ID")] = ()  # check only these promises, e.g. load stream; unset: all
    again: Annotated[Path | None, option("FILE")] = None  # compare with the last report in this file
    api_key_file: Annotated[Path | None, option("FILE")] = None  # the key, on its first line
    api_key_variable: str = "SAMESEED_API_KEY"  # environment variable with the key, if there is no file
    html: Annotated[Path | None, option("FILE")] = None  # write the report as one page
    out: Annotated[Path | None, option("FILE")] = None  # append the report (one JSON line) to a file
    json: Annotated[bool, option()] = False  # the report to stdout instead of a table


@dataclass
class Evidence:
    """The evidence on one promise."""

    compared: int = 0  # texts, with so many `tokens`, of which `differing` differed
    tokens: int = 0
    differing: int = 0
    failed: int = 0  # requests without an answer
    differences: list[dict[str, Any]] = field(default_factory=list)  # the first ones, with their text
    numbers: dict[str, float] = field(default_factory=dict)  # counts by name
    notes: list[str] = field(default_factory=list)
    missing: str = ""  # why the promise cannot be shown

    def compare(self, where: str, expected: ServedText, found: ServedText) -> bool:
        """Compare two answers, and count them unless both are empty; False if they differ or one is missing."""
        if expected.error is not None or found.error is not None:
            self.failed += 1
            return False
        equal = expected.text == found.text and expected.finish_reason == found.finish_reason
        if equal and not found.text:
            return True
        self.compared += 1
        self.tokens += max(expected.num_tokens, found.num_tokens)
        if equal:
            return True
        at = next((i for i, (a, b) in enumerate(zip(expected.text, found.text)) if a != b), None)
        at = min(len(expected.text), len(found.text)) if at is None else at
        self.differ(where, at, _around(expected, at), _around(found, at))
        return False

    def differ(self, where: str, at: int, expected: str, found: str) -> None:
        """Count a difference, and keep the first MOST_SHOWN in detail."""
        self.differing += 1
        if len(self.differences) < MOST_SHOWN:
            self.differences.append({"where": where, "at": at, "expected": expected, "found": found})

    def count(self, name: str, number: float = 1) -> None:
        """Add to a named count in `numbers`."""
        self.numbers[name] = self.numbers.get(name, 0) + number

    def settle(self, ended: str, died: bool) -> tuple[str, str]:
        """The verdict, and the reason if not shown. `ended`: why no more was sent, or ""; `died`: server is gone."""
        if self.differing:
            return BROKEN, ""
        if died and self.failed:
            return NOT_SHOWN, ended
        if self.missing:
            return NOT_SHOWN, self.missing
        if self.compared >= LEAST_TEXTS and self.tokens >= LEAST_TOKENS:
            if self.failed:
                self.notes.append(f"{self.failed} requests had no answer" + (f": {ended}" if ended else ""))
            return HOLDS, ""
        few = f"{self.compared} texts of {self.tokens} tokens were compared"
        least = f"at least {LEAST_TEXTS} of {LEAST_TOKENS} are needed"
        failed = f"; {self.failed} requests failed" if self.failed and not ended else ""
        remedy = ended or "give more --requests, --prompts or --max-tokens"
        return NOT_SHOWN, f"{few}, {least}{failed}; {remedy}"


def _around(answer: ServedText, at: int) -> str:
    text = answer.text[max(0, at - AROUND) : at + AROUND]
    return text if at < len(answer.text) else f"{text} [ends: {answer.finish_reason}]"


@dataclass
class Inquiry:
    """Shared by all promises. `alone`: greedy answers, one at a time; `scored`: with log-probabilities."""

    asker: Asker
    args: VerifyServerArgs
    max_model_len: int | None = None
    earlier: Mapping[str, Any] | None = None
    prompts: Seq[Prompt] = ()
    alone: list[ServedText] = field(default_factory=list)
    scored: list[ServedText] = field(default_factory=list)

    @property
    def chat(self) -> bool:
        return self.asker.chat

    def fields(self, index: int) -> dict[str, Any]:
        """A prompt as fields of a request's body."""
        prompt = self.prompts[index]
        if self.chat and prompt.messages:
            return {"messages": list(prompt.messages)}
        return prompts.as_prompt(prompt.said, self.chat)

    def question(self, index: int, **more: Any) -> ServerQuestion:
        """The greedy question for a prompt; `more`: fields of ServerQuestion."""
        return ServerQuestion(self.fields(index), self.args.max_tokens, **more)

    def compare(self, evidence: Evidence, way: str, index: int, found: ServedText) -> bool:
        """Compare a greedy answer with the answer to the prompt alone; True if they are equal."""
        return evidence.compare(f"{self.prompts[index].id}, {way}", self.alone[index], found)


Test = Callable[[Inquiry, Evidence], Awaitable[None]]  # of one promise; its docstring states the promise in reports
