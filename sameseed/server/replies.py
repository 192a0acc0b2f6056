"""Answers to clients, a body or the events of a stream: their base class, and those of /v1/completions."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from sameseed.models.harmony import Harmony
from sameseed.request import SamplingParams
from sameseed.server.errors import ApiError
from sameseed.server.frames import Piece
from sameseed.server.reasoning import Thoughts
from sameseed.server.text import TextCodec
from sameseed.server.tools import Parser
from sameseed.tokenizer import BROKEN, LONGEST_RUN, shared

STAGES = ("draft", "target", "verify", "schedule")
DONE = b"data: [DONE]\n\n"
_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # line ends to clients that split text as Python does


def _encode(value: Any) -> str:
    """JSON in one line, also for clients that split at Unicode's line separators."""
    text = _written(value)
    return text if text.isascii() else text.translate(_ENDS)


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\ndata: " if name else "data: "
    return f"{head}{_encode(data)}\n\n".encode()


@dataclass(frozen=True)
class Job:
    """A request as it was understood: what its reply is made from."""

    id: str
    fields: Any  # the request's body, as the route's fields
    text: TextCodec
    prompts: list[list[int]]
    params: SamplingParams
    model: str = ""
    fingerprint: str = ""
    num_spec_tokens: int = 0  # of the longest draft that the engine may make
    echoes: Seq[str] = ()  # texts of the prompts, where they are repeated
    thoughts: Callable[[], Thoughts | Harmony] | None = None  # makes a splitter of reasoning for each choice
    parser: Callable[[], Parser] | None = None  # makes a parser of tool calls for each choice


@dataclass
class ReplyChoice:
    """What is known so far of one output sequence."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    levels: list[str | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    completion: dict[str, Any] | None = None
    num_sent: int = 0  # tokens whose log-probabilities a stream has sent
    echoed: bool = False  # were log-probabilities of an echoed prompt sent?
    unsent: bool = True  # has a stream yet to send the echoed prompt?
    begun: bool | None = None  # does text stand before the next token whose name is asked for?


class Reply:
    """Base: collects pieces and counts usage. One object per answer, streamed or not."""

    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, job: Job) -> None:
        self.job, self.fields, self.text, self.prompts = job, job.fields, job.text, job.prompts
        self.id, self.created = self.prefix + job.id, int(time.time())
        self.choices = [ReplyChoice() for _ in range(job.fields.num_seqs)]
        self.thoughts = None if job.thoughts is None else [job.thoughts() for _ in self.choices]
        self.with_logprobs, self.show_tokens = job.fields.top is not None, bool(job.fields.return_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def name(self, token: int, begins: bool, as_bytes: bool = True) -> str:
        """The text that a token adds to the text before it, or to none (`begins`).

        If it is only part of a character: its bytes, or without `as_bytes` the replacement sign.
        """
        if self.fields.return_tokens_as_token_ids:
            return f"token_id:{token}"
        if as_bytes:
            return self.text.name(token, begins)
        return self.text.tokenizer.piece(token, begins).decode("utf-8", "replace")

    def begins(self, choice: ReplyChoice, token: int, prompt: Seq[int]) -> bool:
        """Does the text begin with this token, the next one of the choice? `prompt`: the tokens that it continues."""
        has_text, skip = self.text.tokenizer.has_text, self.job.params.skip_special_tokens
        before = has_text(prompt, skip) if choice.begun is None else choice.begun
        choice.begun = before or has_text((token,), skip)
        return not before

    def prompt_of(self, index: int) -> list[int]:
        """The prompt that a choice continues."""
        return self.prompts[index * len(self.prompts) // len(self.choices)]

    def take(self, piece: Piece) -> ReplyChoice:
        """Add a piece to its choice, and split the reasoning off its text."""
        choice = self.choices[piece.index]
        if self.thoughts is not None:
            thoughts = self.thoughts[piece.index]
            piece.reasoning, piece.text = thoughts.feed(piece.text, piece.completion is not None)
            choice.reasoning.append(piece.reasoning)
        choice.text.append(piece.text)
        choice.token_ids += piece.token_ids
        choice.levels += piece.levels
        choice.text_offset += piece.text_offset
        choice.logprobs += piece.logprobs
        choice.prompt_logprobs += piece.prompt_logprobs
        if piece.completion is not None:
            choice.completion = piece.completion
            choice.finish_reason = "stop" if piece.completion["finish_reason"] == "stop" else "length"
        return choice

    @property
    def num_output_tokens(self) -> int:
        """Tokens written so far."""
        return sum(len(c.token_ids) for c in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that were found in the prefix cache; for each prompt, as its first choice counted."""
        firsts = self.choices[:: len(self.choices) // len(self.prompts)]
        return sum(c.completion["metrics"].get("num_cached_tokens", 0) for c in firsts if c.completion is not None)

    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's format."""
        prompt, output = self.num_prompt_tokens, self.num_output_tokens
        cached = {"cached_tokens": self.num_cached_tokens}
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        made = {**counts, "prompt_tokens_details": cached}
        return made | ({} if self.thoughts is None else {"completion_tokens_details": self.reasoning_details()})

    def reasoning_details(self) -> dict[str, int]:
        """The number of reasoning tokens, marks included."""
        both = zip(self.choices, self.thoughts or (), strict=False)
        return {"reasoning_tokens": sum(t.end is None or at < t.end for c, t in both for at in c.text_offset)}

    def metrics(self) -> dict[str, Any]:
        """Speculation metrics in vLLM's format, and sameseed's own metrics."""
        completions = [c.completion for c in self.choices if c.completion is not None]
        return speculation_metrics(completions, self.job.num_spec_tokens)

    def envelope(self, kind: str) -> dict[str, Any]:
        """The fields that bodies and chunks have in common."""
        made = {"id": self.id, "object": kind, "created": self.created, "model": self.job.model}
        return made | {"system_fingerprint": self.job.fingerprint}

    @cached_property
    def _head(self) -> str:  # the head of every chunk, encoded only once
        return f'data: {_encode(self.envelope(self.chunk_kind))[:-1]},"choices":['

    def chunk(self, entry: dict[str, Any]) -> bytes:
        """The event of one entry of "choices"."""
        return f"{self._head}{_encode(entry)}]}}\n\n".encode()

    def entry(
        self, index: int, said: dict[str, Any], logprobs: Any, reason: str | None, part: ReplyChoice | Piece
    ) -> dict[str, Any]:
        """One entry of "choices", of a body or a chunk.

        If token ids are wanted: where in the text each begins, was it a draft token, and of which drafter level?
        """
        made = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        if self.show_tokens:
            accepted = [int(level is not None) for level in part.levels]
            made |= {"token_ids": part.token_ids, "accepted": accepted}
            made |= {"levels": part.levels, "text_offset": part.text_offset}
        return made

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self.whole_choice(i, c) for i, c in enumerate(self.choices)]
        return {**self.envelope(self.kind), "choices": choices, "usage": self.usage(), "metrics": self.metrics()}

    def whole_choice(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        """One entry of "choices" in a body."""
        raise NotImplementedError

    def begin(self) -> Iterator[bytes]:
        """Events before the first token."""
        return iter(())

    def events(self, piece: Piece) -> Iterator[bytes]:
        """Events of a piece that `take` has already added."""
        raise NotImplementedError

    def end(self, include_usage: bool) -> Iterator[bytes]:
        """Events after the last token."""
        if include_usage:
            last = {**self.envelope(self.chunk_kind), "choices": [], "usage": self.usage(), "metrics": self.metrics()}
            yield event(last)
        yield DONE

    def fail(self, error: ApiError, request_id: str) -> Iterator[bytes]:
        """Events that end a stream with an error."""
        yield event(error.body(request_id))
        yield DONE


def speculation_metrics(completions: Seq[dict[str, Any]], num_spec_tokens: int) -> dict[str, Any]:
    """`speculative_decoding` in vLLM's format (null without drafts); `sameseed`: why drafts were missing, and times.

    Counts are sums over completions. Rounds are listed if there is one completion, and its rounds are recorded. Times
    are in seconds: `time_split_s` sums the sequences' shares of the engine's time; the others are wall-clock times from
    arrival, to the first token of any sequence and to the end of all.
    """
    found = [c["metrics"] for c in completions]
    undrafted = sum((Counter(m["undrafted"]) for m in found), Counter[str]())
    own = {
        "num_rounds": sum(m["num_rounds"] for m in found),
        "undrafted": dict(undrafted),
        "time_split_s": {stage: sum((m["time_split_s"][stage] for m in found), 0.0) for stage in STAGES},
        "time_to_first_token_s": min((m["time_to_first_token_s"] for m in found), default=0.0),
        "total_time_s": max((m["total_time_s"] for m in found), default=0.0),
        "num_preemptions": sum(m["num_preemptions"] for m in found),
        "seeds": [c["seed"] for c in completions],
    }
    return {"speculative_decoding": _speculative(found, num_spec_tokens), "sameseed": own}


def _speculative(found: Seq[dict[str, Any]], num_spec_tokens: int) -> dict[str, Any] | None:
    drafts, drafted, accepted = (
        sum(m[k] for m in found) for k in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    if not drafts:
        return None
    depth = max(len(m["num_accepted_tokens_per_pos"]) for m in found)
    per_pos = [sum((m["num_accepted_tokens_per_pos"] + [0] * depth)[i] for m in found) for i in range(depth)]
    reached = [drafts, *per_pos, *[0] * max(1, num_spec_tokens + 1 - depth)]
    made: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / drafts,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [before - after for before, after in pairwise(reached)],
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": num_spec_tokens,
    }
    if len(found) == 1 and "rounds" in found[0]:  # vLLM's level "detailed"
        made["per_step_accepted"] = [accepted for _, accepted in found[0]["rounds"]]
        made["per_step_drafted"] = [drafted for drafted, _ in found[0]["rounds"]]
    return made


class CompletionReply(Reply):
    """An answer of /v1/completions."""

    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.hidden = job.fields.max_tokens == 0  # the engine writes one token all the same
        self._skip_special_tokens = job.params.skip_special_tokens

    def _echo(self, index: int) -> tuple[str, list[int]]:
        """Text and tokens of the prompt that is repeated, if it is."""
        echoes = self.job.echoes
        return (echoes[index * len(echoes) // len(self.choices)], self.prompt_of(index)) if echoes else ("", [])

    def _prefix(self, index: int, choice: ReplyChoice) -> str:
        """The echoed text, without a last character that the output completes."""
        text, ids = self._echo(index)
        if self.hidden or not self._is_open(index):
            return text
        decode, ids = self.text.tokenizer.decode, ids[-LONGEST_RUN:]
        known = decode(ids, self._skip_special_tokens)
        return text.removesuffix(known[shared(known, decode(ids + choice.token_ids, self._skip_special_tokens)) :])

    def _is_open(self, index: int) -> bool:
        """May the output still change the end of the echoed text?"""
        text, ids = self._echo(index)
        return bool(ids) and (text.endswith(BROKEN) or ids[-1] in self.text.tokenizer.byte_tokens)

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.hidden else super().num_output_tokens

    def whole_choice(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        text = self._prefix(index, choice) + ("" if self.hidden else "".join(choice.text))
        logprobs = self._logprobs(index, choice) if self.with_logprobs else None
        made = self.entry(index, {"text": text}, logprobs, choice.finish_reason, choice)
        return made | ({"prompt_token_ids": self.prompt_of(index)} if self.show_tokens else {})

    def events(self, piece: Piece) -> Iterator[bytes]:
        choice = self.choices[piece.index]
        first, ended = len(choice.text) == 1, piece.completion is not None
        text = "" if self.hidden else piece.text
        if choice.unsent and (text or ended or not self._is_open(piece.index)):
            text, choice.unsent = self._prefix(piece.index, choice) + text, False
        if not text and not ended and not self.with_logprobs and not self.show_tokens:
            return
        logprobs = self._logprobs(piece.index, choice) if self.with_logprobs else None
        entry = self.entry(piece.index, {"text": text}, logprobs, choice.finish_reason if ended else None, piece)
        entry |= {"prompt_token_ids": self.prompt_of(piece.index)} if self.show_tokens and first else {}
        yield self.chunk(entry)

    def _logprobs(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        """Log-probabilities of the tokens that were not sent yet, those of an echoed prompt first."""
        made: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        new = slice(choice.num_sent, None if not self.hidden else choice.num_sent)
        entries, base = choice.logprobs[new], len(self._prefix(index, choice))
        offsets = [base + at for at in choice.text_offset[new]]
        echo = self._echo(index)[1]
        if echo and not choice.echoed:
            entries = [[echo[0], None, []], *choice.prompt_logprobs, *entries]
            offsets = [min(at, base) for at in self._offsets(echo)] + offsets
        choice.num_sent, choice.echoed = len(choice.logprobs), True
        for (token, logprob, top), at in zip(entries, offsets, strict=True):
            begins = self.begins(choice, token, [] if echo else self.prompt_of(index))
            name = self.name(token, begins)
            made["tokens"].append(name)
            made["token_logprobs"].append(logprob)
            made["text_offset"].append(at)
            if logprob is None:
                made["top_logprobs"].append(None)
                continue
            alternatives: dict[str, float] = {name: logprob}
            for other, value in top:
                alternatives.setdefault(self.name(other, begins), value)
            made["top_logprobs"].append(alternatives)
        return made

    def _offsets(self, ids: Seq[int]) -> list[int]:
        """Where each token of an echoed prompt begins."""
        decoder = self.text.tokenizer.stream(self._skip_special_tokens)
        at, found = 0, []
        for token in ids:
            found.append(at + len(decoder.tail))
            at += len(decoder.push(token))
        return found
