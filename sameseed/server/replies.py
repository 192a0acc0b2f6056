"""Answers to clients, a body or the events of a stream: their base class, and those of /v1/completions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from sameseed.models.harmony import Harmony
from sameseed.request import SpecMetrics, TimeSplit
from sameseed.server.errors import ApiError
from sameseed.server.frames import Add, Ended, Piece
from sameseed.server.reasoning import Thoughts
from sameseed.server.text import TextCodec
from sameseed.server.tools import Parser
from sameseed.tokenizer import BROKEN, LONGEST_RUN, shared

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


@dataclass
class ReplyChoice:
    """What is known so far of one output sequence."""

    thoughts: Thoughts | Harmony | None = None  # splits the reasoning off the text
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    levels: list[str | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    completion: Ended | None = None
    num_sent: int = 0  # tokens whose log-probabilities a stream has sent
    echoed: bool = False  # were log-probabilities of an echoed prompt sent?
    prefix: str | None = None  # the echoed text before the output, once it is decided
    begun: bool | None = None  # does text stand before the next token whose name is asked for?

    def take(self, piece: Piece) -> None:
        """Add a piece, after splitting the reasoning off its text."""
        if self.thoughts is not None:
            piece.reasoning, piece.text = self.thoughts.feed(piece.text, piece.completion is not None)
            self.reasoning.append(piece.reasoning)
        self.text.append(piece.text)
        for name in ("token_ids", "levels", "text_offset", "logprobs", "prompt_logprobs"):
            getattr(self, name).extend(getattr(piece, name))
        if piece.completion is not None:
            self.completion = piece.completion
            self.finish_reason = "stop" if piece.completion.finish_reason == "stop" else "length"

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning, marks included."""
        end = 0 if self.thoughts is None else self.thoughts.end
        return sum(end is None or at < end for at in self.text_offset)


@dataclass(eq=False)
class Reply:
    """Base: collects pieces, counts usage and renders the answer. One object per request, streamed or not."""

    prefix, kind, chunk_kind = "", "", ""

    add: Add  # the request as the engine gets it
    fields: Any  # the request's body, as the route's fields
    text: TextCodec
    model: str = ""
    fingerprint: str = ""
    num_spec_tokens: int = 0  # of the longest draft that the engine may make
    echoes: Seq[str] = ()  # texts of the prompts, if they are repeated
    thoughts: Callable[[], Thoughts | Harmony] | None = None  # makes a splitter of reasoning for each choice
    parser: Callable[[], Parser] | None = None  # makes a parser of tool calls for each choice

    def __post_init__(self) -> None:
        self.id, self.created = self.prefix + self.add.id, int(time.time())
        self.prompts = self.add.prompts
        self.with_logprobs, self.show_tokens = self.fields.top is not None, bool(self.fields.return_token_ids)
        self.choices = [self.choice(i, self.thoughts and self.thoughts()) for i in range(self.fields.num_seqs)]

    def choice(self, index: int, thoughts: Thoughts | Harmony | None) -> ReplyChoice:
        return ReplyChoice(thoughts)

    def take(self, piece: Piece) -> ReplyChoice:
        choice = self.choices[piece.index]
        choice.take(piece)
        return choice

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that were found in the prefix cache; for each prompt, as its first choice counted."""
        firsts = self.choices[:: len(self.choices) // len(self.prompts)]
        return sum(c.completion.metrics.num_cached_tokens for c in firsts if c.completion is not None)

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts[index * len(self.prompts) // len(self.choices)]

    def name(self, token: int, spelled: str) -> str:
        """What log-probabilities call a token: the text that it adds, as the route spells it, or its id."""
        return f"token_id:{token}" if self.fields.return_tokens_as_token_ids else spelled

    def begins(self, choice: ReplyChoice, token: int, prompt: Seq[int]) -> bool:
        """Does the text begin with this token, the next one of the choice? `prompt`: the tokens that it continues."""
        has_text, skip = self.text.tokenizer.has_text, self.add.params.skip_special_tokens
        before = has_text(prompt, skip) if choice.begun is None else choice.begun
        choice.begun = before or has_text((token,), skip)
        return not before

    def usage(self) -> dict[str, Any]:
        prompt, output = self.num_prompt_tokens, self.num_output_tokens
        cached = {"cached_tokens": self.num_cached_tokens}
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        made = {**counts, "prompt_tokens_details": cached}
        return made | ({} if self.thoughts is None else {"completion_tokens_details": self.reasoning_details()})

    def reasoning_details(self) -> dict[str, int]:
        return {"reasoning_tokens": sum(c.num_reasoning_tokens for c in self.choices)}

    def metrics(self) -> dict[str, Any]:
        return speculation_metrics([c.completion for c in self.choices if c.completion], self.num_spec_tokens)

    def envelope(self, kind: str) -> dict[str, Any]:
        """The fields that bodies and chunks have in common."""
        made = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return made | {"system_fingerprint": self.fingerprint}

    @cached_property
    def _head(self) -> str:  # the head of every chunk, encoded only once
        return f'data: {_encode(self.envelope(self.chunk_kind))[:-1]},"choices":['

    def chunk(self, entry: dict[str, Any]) -> bytes:
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
        choices = [self.whole_choice(i, c) for i, c in enumerate(self.choices)]
        return {**self.envelope(self.kind), "choices": choices, "usage": self.usage(), "metrics": self.metrics()}

    def whole_choice(self, index: int, choice: Any) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self) -> Iterator[bytes]:
        """Events before the first token."""
        return iter(())

    def events(self, piece: Piece) -> Iterator[bytes]:
        """Events of a piece that `take` has already added."""
        raise NotImplementedError

    def end(self) -> Iterator[bytes]:
        """Events after the last token, with token counts if they are asked for."""
        options = self.fields.stream_options
        if options is not None and options.include_usage:
            last = {**self.envelope(self.chunk_kind), "choices": [], "usage": self.usage(), "metrics": self.metrics()}
            yield event(last)
        yield DONE

    def fail(self, error: ApiError, request_id: str) -> Iterator[bytes]:
        """Events that end a stream with an error."""
        yield event(error.body(request_id))
        yield DONE


def speculation_metrics(ended: Seq[Ended], num_spec_tokens: int) -> dict[str, Any]:
    """`speculative_decoding` in vLLM's format (null without drafts); `sameseed`: why drafts were missing, and times.

    Counts are sums over sequences. Rounds are listed for a single sequence whose rounds are recorded. Times are in
    seconds: `time_split_s` sums the sequences' shares of the engine's time; the others are wall-clock times from
    arrival, to the first token of any sequence and to the end of all.
    """
    spec, times = SpecMetrics(), TimeSplit()
    for one in ended:
        spec.add(one.metrics.spec)
        times.add(one.metrics.time_split)
    own = {
        "num_rounds": spec.num_rounds,
        "undrafted": spec.undrafted,
        "time_split_s": asdict(times),
        "time_to_first_token_s": min((one.metrics.time_to_first_token for one in ended), default=0.0),
        "total_time_s": max((one.metrics.total_time for one in ended), default=0.0),
        "num_preemptions": sum(one.metrics.num_preemptions for one in ended),
        "seeds": [one.seed for one in ended],
    }
    if not spec.num_drafts:
        return {"speculative_decoding": None, "sameseed": own}
    per_pos = spec.num_accepted_tokens_per_pos
    reached = [spec.num_drafts, *per_pos, *[0] * max(1, num_spec_tokens + 1 - len(per_pos))]
    made: dict[str, Any] = {
        "mean_acceptance_length": spec.mean_acceptance_length,
        "draft_acceptance_rate": spec.acceptance_rate or 0.0,
        "acceptance_histogram": [before - after for before, after in pairwise(reached)],
        "num_spec_steps": spec.num_drafts,
        "num_accepted_draft_tokens": spec.num_accepted_tokens,
        "num_draft_tokens": spec.num_draft_tokens,
        "num_spec_tokens": num_spec_tokens,
    }
    if len(ended) == 1 and (rounds := ended[0].metrics.spec.rounds) is not None:  # vLLM's level "detailed"
        made["per_step_accepted"] = [accepted for _, accepted in rounds]
        made["per_step_drafted"] = [drafted for drafted, _ in rounds]
    return {"speculative_decoding": made, "sameseed": own}


class CompletionReply(Reply):
    """An answer of /v1/completions."""

    prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    @property
    def hidden(self) -> bool:
        """Is only the prompt wanted? The engine generates one token all the same."""
        return bool(self.fields.limit == 0)

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.hidden else super().num_output_tokens

    def _decode(self, ids: list[int]) -> str:
        return self.text.tokenizer.decode(ids, self.add.params.skip_special_tokens)

    def _echo(self, index: int) -> tuple[str, list[int]]:
        """Text and tokens of the prompt that is repeated, if it is."""
        echoes = self.echoes
        return (echoes[index * len(echoes) // len(self.choices)], self.prompt_of(index)) if echoes else ("", [])

    def _prefix(self, index: int, choice: ReplyChoice) -> str:
        """The echoed text, without a last character that the output completes. Later tokens do not change it."""
        if choice.prefix is None:
            choice.prefix, ids = self._echo(index)
            if not self.hidden and self._is_open(index):
                ids = ids[-LONGEST_RUN:]
                known = self._decode(ids)
                choice.prefix = choice.prefix.removesuffix(known[shared(known, self._decode(ids + choice.token_ids)) :])
        return choice.prefix

    def _is_open(self, index: int) -> bool:
        """May the output still change the end of the echoed text?"""
        text, ids = self._echo(index)
        return bool(ids) and (text.endswith(BROKEN) or ids[-1] in self.text.tokenizer.byte_tokens)

    def whole_choice(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        text = self._prefix(index, choice) + ("" if self.hidden else "".join(choice.text))
        made = self.entry(index, {"text": text}, self._logprobs(index, choice), choice.finish_reason, choice)
        return made | ({"prompt_token_ids": self.prompt_of(index)} if self.show_tokens else {})

    def events(self, piece: Piece) -> Iterator[bytes]:
        index, choice = piece.index, self.choices[piece.index]
        first, ended = len(piece.token_ids) == len(choice.token_ids), piece.completion is not None
        text = "" if self.hidden else piece.text
        if choice.prefix is None and (text or ended or not self._is_open(index)):
            text = self._prefix(index, choice) + text
        logprobs = None if choice.prefix is None else self._logprobs(index, choice)  # places follow from the prefix
        if not text and not ended and logprobs is None and not self.show_tokens:
            return
        reason = choice.finish_reason if ended else None
        entry = self.entry(index, {"text": text}, logprobs, reason, piece)
        entry |= {"prompt_token_ids": self.prompt_of(index)} if self.show_tokens and first else {}
        yield self.chunk(entry)

    def _logprobs(self, index: int, choice: ReplyChoice) -> dict[str, Any] | None:
        """Log-probabilities of the tokens that were not sent yet, those of an echoed prompt first; None if unwanted."""
        if not self.with_logprobs:
            return None
        made: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        new = slice(choice.num_sent, None if not self.hidden else choice.num_sent)
        entries, base = choice.logprobs[new], len(self._prefix(index, choice))
        offsets = [base + at for at in choice.text_offset[new]]
        repeated, echo = self._echo(index)
        if echo and not choice.echoed:
            entries = [[echo[0], None, []], *choice.prompt_logprobs, *entries]
            offsets = [min(at, base) for at in self._offsets(echo, repeated)] + offsets
        choice.num_sent, choice.echoed = len(choice.logprobs), True
        for (token, logprob, top), at in zip(entries, offsets, strict=True):
            begins = self.begins(choice, token, [] if echo else self.prompt_of(index))
            name, alternatives = self.name(token, self.text.name(token, begins)), None
            if logprob is not None:
                alternatives = {name: logprob}
                for other, value in top:
                    alternatives.setdefault(self.name(other, self.text.name(other, begins)), value)
            values = {"tokens": name, "token_logprobs": logprob, "text_offset": at, "top_logprobs": alternatives}
            for key, value in values.items():
                made[key].append(value)
        return made

    def _offsets(self, ids: Seq[int], text: str) -> list[int]:
        """Where the prompt's tokens begin in the text that is repeated, which spells special tokens as it was given."""
        tokenizer, is_given = self.text.tokenizer, text != self._decode(list(ids))
        decoder = tokenizer.stream(self.add.params.skip_special_tokens and not is_given)
        at, found = 0, list[int]()
        for token in ids:
            found.append(at + len(decoder.tail))
            piece = decoder.push(token)
            if len(found) == 1 and tokenizer.is_silent(token) and not text.startswith(piece):
                decoder, piece = tokenizer.stream(not is_given), ""  # the tokenizer put it before the text
            at += len(piece)
        return found
