"""Stream: what a job's reader sees of it: pieces as they are decided, and an end in any case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sameseed.request import SamplingParams, Speculation
from sameseed.server import frames
from sameseed.server.errors import ApiError, bad_request, internal
from sameseed.server.grammars import Compiled

NO_TOKEN = (
    "no token was left to choose: the request's allowed or banned tokens, biases and grammar rule out all of them, "
    "or the grammar takes too long to follow"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A delta of one sequence, as `frames` writes it: log-probabilities are [token, logprob, [[token, logprob]]].

    `levels`: the name of the drafter's level that guessed each token, None for those that nobody did.
    """

    index: int
    text: str
    token_ids: list[int]
    levels: list[str | None]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    completion: dict[str, Any] | None
    text_offset: list[int] = field(default_factory=list)  # where in the text each token begins


class Job(NamedTuple):
    """What the engine is asked to write: each prompt n times."""

    id: str
    prompts: Seq[Seq[int]]
    params: SamplingParams
    tenant: str = ""
    speculation: Speculation | None = None
    score_prompt: bool = False
    choice: Seq[str] | None = None  # the text must be one of these
    priority: int = 0  # lower goes first
    grammar: Compiled | None = None  # the text must match this
    detailed: bool = False  # every draft in the metrics
    owner: str = ""  # whose turn it is

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def packed(self) -> bytes:
        """The frame that asks the engine for it. Long prompts take long: then it is a thread's work."""
        frame = {
            "type": "add",
            "id": self.id,
            "params": frames.params_to_data(self.params),
            "tenant": self.tenant,
            "owner": self.owner,
            "priority": self.priority,
            "detailed": self.detailed,
            "speculation": frames.wish_to_data(self.speculation),
            "score_prompt": self.score_prompt,
            "choice": None if self.choice is None else list(self.choice),
            "grammar": None if self.grammar is None else self.grammar.key,
        }
        return frames.pack_lists(frame, "prompts", self.prompts)


class Stream:
    """The pieces of one job, in the order in which they were decided."""

    def __init__(self, job: Job, forget: Callable[[str], None]) -> None:
        """`forget` lets the engine drop a job by its id."""
        self.id = job.id
        self._forget = forget
        self.num_open = len(job.prompts) * job.params.n  # sequences that the engine has not completed
        self._num_unread = self.num_open
        self._scores: dict[int, list[Any]] = {}
        self._queue: asyncio.Queue[Piece | ApiError | None] = asyncio.Queue()

    def hold(self, index: int, scores: list[Any]) -> None:
        """Log-probabilities of a prompt that belong to the sequence's next piece."""
        self._scores.setdefault(index, []).extend(scores)

    def push(self, item: Piece | ApiError | None) -> None:
        """A piece, or the error that ends the stream, or None: its reader has left."""
        if isinstance(item, Piece):
            item.prompt_logprobs[:0] = self._scores.pop(item.index, ())
            self.num_open -= item.completion is not None
        self._queue.put_nowait(item)

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces, to the last completion. Raises ApiError; ends early if `leave` is called meanwhile."""
        while self._num_unread:
            item = await self._queue.get()
            if item is None:
                return
            if isinstance(item, ApiError):
                raise item
            if item.completion is not None:
                self._num_unread -= 1
                if item.completion["finish_reason"] == "error":
                    raise bad_request(NO_TOKEN) if item.completion["ruled_out"] else internal()
            yield item

    def leave(self, error: ApiError | None = None) -> None:
        """Nobody reads any more (or: the reader is to get this error): the engine stops within a step."""
        self._forget(self.id)
        self.push(error)
