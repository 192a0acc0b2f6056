"""Sending questions to a server, one at a time or several at once, within a budget of requests and seconds."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import httpx

from sameseed_verify import wire
from sameseed_verify.reading import ServedText, read
from sameseed_verify.wire import Endpoint

MAX_RETRIES = 3  # if the server is busy
NOT_SENT = "not sent"


@dataclass
class RequestBudget:
    """Bounds on requests and seconds; retries count as requests.

    `ended`: why nothing more is sent, or "". `died`: the server is gone.
    """

    requests: int
    seconds: float
    spent: int = 0
    ended: str = ""
    died: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> float:
        """Seconds since the budget was created."""
        return time.monotonic() - self.began

    def take(self) -> bool:
        """Take one request from the budget; False if none may be sent."""
        if not self.ended and self.spent >= self.requests:
            self.ended = f"the {self.requests} requests of --requests were sent"
        self.spent += self.left()
        return not self.ended

    def left(self) -> bool:
        """Whether seconds are left and nothing has ended the inquiry."""
        if not self.ended and self.passed >= self.seconds:
            self.ended = f"the {self.seconds:g} seconds of --seconds were over"
        return not self.ended


@dataclass(frozen=True)
class ServerQuestion:
    """One request: the prompt as fields of a body, the most tokens to generate, and further `fields`.

    `salt` None: the request shares no prefix cache with others, if the server supports that. Otherwise requests with an
    equal salt share their prefix cache.
    """

    prompt: Mapping[str, Any]
    max_tokens: int
    stream: bool = True
    salt: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


class Asker:
    """Sends questions. `extras`: send fields beyond OpenAI's API. `failures`: failed requests by kind of error."""

    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, budget: RequestBudget, timeout: float) -> None:
        self.client, self.endpoint, self.budget, self.timeout = client, endpoint, budget, timeout
        self.extras = True
        self.failures: Counter[str] = Counter()
        self._number, self._run = itertools.count(), f"verify-server {time.time_ns()}"

    def salt(self) -> str:
        """A new salt, so that a request finds nothing of other requests in the prefix cache."""
        return f"{self._run} {next(self._number)}"

    def body(self, question: ServerQuestion) -> dict[str, Any]:
        """The request body of a question; greedy, unless its fields say otherwise."""
        made: dict[str, Any] = {"model": self.endpoint.model, **question.prompt, "max_tokens": question.max_tokens}
        made |= {"temperature": 0.0, "stream": question.stream}
        made |= {"stream_options": {"include_usage": True}} if question.stream else {}
        if self.extras:
            shared = question.salt is not None
            made |= {"return_token_ids": True, "cache_salt": question.salt or self.salt(), "cache_prompt": shared}
        return {**made, **question.fields}

    async def ask(self, question: ServerQuestion) -> ServedText:
        """Send one question and return the answer. Never raises: errors are in the answer's `error`."""
        if not self.budget.take():
            return ServedText(error=NOT_SENT, detail=self.budget.ended)
        budget, body = self.budget, self.body(question)
        timeout = min(self.timeout, max(budget.seconds - budget.passed, 0.0))
        retries = min(MAX_RETRIES, budget.requests - budget.spent)
        sent = await wire.exchange(self.client, self.endpoint, body, timeout, retries)
        budget.spent += sent.refusals
        if sent.error == "timeout" and not budget.left():
            return ServedText(error=NOT_SENT, detail=budget.ended)
        answer = read(sent, question.stream)
        if answer.error is not None:
            if answer.refused:
                return answer
            self.failures[answer.error] += 1
            if not self.budget.ended and not await self._alive():
                self.budget.ended, self.budget.died = f"the server is gone ({answer.error}: {answer.detail})", True
        return answer

    async def ask_together(self, questions: Seq[ServerQuestion], concurrency: int) -> list[ServedText]:
        """Answers in the order of the questions, with `concurrency` requests at once."""
        answers: dict[int, ServedText] = {}
        waiting = iter(enumerate(questions))

        async def client() -> None:
            for index, question in waiting:
                answers[index] = await self.ask(question)

        await asyncio.gather(*(client() for _ in range(min(concurrency, len(questions)))))
        return [answers[i] for i in range(len(questions))]

    async def _alive(self) -> bool:
        try:
            await self.client.get(f"{self.endpoint.routes}/models", timeout=10.0)
        except httpx.HTTPError:
            return False
        return True
