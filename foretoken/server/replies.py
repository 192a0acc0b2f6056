"""What clients get: the body of an answer, or the events of its stream, for each of the three ways to ask."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foretoken.server.errors import ApiError
from foretoken.server.stream import Piece
from foretoken.server.text import Text
from foretoken.server.tools import Call, More, Parser
from foretoken.server.usage import speculation_metrics

DONE = b"data: [DONE]\n\n"
_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}  # where clients that split text like Python end a line


def _encode(value: Any) -> str:
    """JSON in one line, whoever splits lines."""
    text = _written(value)
    return text if text.isascii() else text.translate(_ENDS)


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\ndata: " if name else "data: "
    return f"{head}{_encode(data)}\n\n".encode()


@dataclass
class Choice:
    """One sequence as far as it is known."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    levels: list[str | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    completion: dict[str, Any] | None = None
    num_sent: int = 0  # tokens whose log-probabilities a stream has sent
    offset: int = 0  # characters that those tokens spell
    content: list[str] = field(default_factory=list)  # text that is no tool call, where there may be such
    calls: list[Call] = field(default_factory=list)
    dropping: bool = False  # what comes belongs to a call that is not wanted
    fresh: list[str] = field(default_factory=list)  # text of the last piece that is no call
    fresh_calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # and what it adds to calls, by number
    echoed: bool = False  # were log-probabilities of an echoed prompt sent?


class Reply:
    """Base: collects pieces, counts usage. One object an answer, streaming or not."""

    kind, chunk_kind = "", ""

    def __init__(
        self, id: str, model: str, text: Text, num_choices: int, *, num_spec_tokens: int = 0, tokens: bool = False
    ) -> None:
        """`num_spec_tokens`: the longest draft that the engine may make; `tokens`: show token ids too."""
        self.id, self.model, self.text, self.show_tokens = id, model, text, tokens
        self.created = int(time.time())
        self.choices = [Choice() for _ in range(num_choices)]
        self.num_prompts, self.num_prompt_tokens = 1, 0
        self.num_spec_tokens = num_spec_tokens

    def take(self, piece: Piece) -> Choice:
        """Add a piece to its choice."""
        choice = self.choices[piece.index]
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
    def num_scored(self) -> int:
        """Tokens with log-probabilities so far, those of prompts included."""
        return sum(len(c.logprobs) + len(c.prompt_logprobs) for c in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that were found in the prefix cache; of n choices the first one's count."""
        firsts = self.choices[:: len(self.choices) // self.num_prompts]
        return sum(c.completion["metrics"].get("num_cached_tokens", 0) for c in firsts if c.completion is not None)

    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's words."""
        prompt, output = self.num_prompt_tokens, self.num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def metrics(self) -> dict[str, Any]:
        """What speculation did, as vLLM says it, and what else we know."""
        return speculation_metrics(
            [c.completion for c in self.choices if c.completion is not None], self.num_spec_tokens
        )

    def envelope(self, kind: str) -> dict[str, Any]:
        """The fields that bodies and chunks have in common."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @cached_property
    def _head(self) -> str:
        """The beginning of every chunk, which is written once and not for every token."""
        return f'data: {_encode(self.envelope(self.chunk_kind))[:-1]},"choices":['

    def chunk(self, entry: dict[str, Any]) -> bytes:
        """The event of one entry of "choices"."""
        return f"{self._head}{_encode(entry)}]}}\n\n".encode()

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self.whole_choice(i, c) for i, c in enumerate(self.choices)]
        return {**self.envelope(self.kind), "choices": choices, "usage": self.usage(), "metrics": self.metrics()}

    def whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """One entry of "choices" in a body."""
        raise NotImplementedError

    def begin(self) -> Iterator[bytes]:
        """Events before the first token."""
        return iter(())

    def events(self, piece: Piece) -> Iterator[bytes]:
        """Events of a piece, which `take` has added."""
        raise NotImplementedError

    def end(self, include_usage: bool) -> Iterator[bytes]:
        """Events after the last token."""
        if include_usage:
            last = {**self.envelope(self.chunk_kind), "choices": [], "usage": self.usage(), "metrics": self.metrics()}
            yield event(last)
        yield DONE

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Events that end a stream that cannot go on."""
        yield event(error.body())
        yield DONE


class CompletionReply(Reply):
    """/v1/completions. `echoes`: texts and tokens of the prompts, if repeated; `hidden`: no token was asked for."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, *args: Any, logprobs: bool, echoes: Seq[tuple[str, list[int]]], hidden: bool, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.with_logprobs, self.echoes, self.hidden = logprobs, echoes, hidden

    def _echo(self, index: int) -> tuple[str, list[int]]:
        return self.echoes[index * len(self.echoes) // len(self.choices)] if self.echoes else ("", [])

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.hidden else super().num_output_tokens

    def whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = self._echo(index)[0] + ("" if self.hidden else "".join(choice.text))
        made: dict[str, Any] = {"index": index, "text": text, "finish_reason": choice.finish_reason}
        made["logprobs"] = self._logprobs(index, choice) if self.with_logprobs else None
        return made | (_tokens(choice) if self.show_tokens else {})

    def events(self, piece: Piece) -> Iterator[bytes]:
        choice = self.choices[piece.index]
        first = len(choice.text) == 1
        text = (self._echo(piece.index)[0] if first else "") + ("" if self.hidden else piece.text)
        if not text and piece.completion is None and not self.with_logprobs and not self.show_tokens:
            return
        entry: dict[str, Any] = {"index": piece.index, "text": text, "logprobs": None}
        if self.with_logprobs:
            entry["logprobs"] = self._logprobs(piece.index, choice)
        entry["finish_reason"] = choice.finish_reason if piece.completion is not None else None
        entry |= _tokens(piece) if self.show_tokens else {}
        yield self.chunk(entry)

    def _logprobs(self, index: int, choice: Choice) -> dict[str, Any]:
        """Log-probabilities of tokens not sent before, those of an echoed prompt first."""
        made: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        entries = [] if self.hidden else choice.logprobs[choice.num_sent :]
        echo = self._echo(index)[1]
        if echo and not choice.echoed:
            entries = [[echo[0], None, []], *choice.prompt_logprobs, *entries]
        choice.num_sent, choice.echoed = len(choice.logprobs), True
        for token, logprob, top in entries:
            name = self.text.pieces.text(token)
            made["tokens"].append(name)
            made["token_logprobs"].append(logprob)
            made["text_offset"].append(choice.offset)
            choice.offset += len(name)
            if logprob is None:
                made["top_logprobs"].append(None)
                continue
            alternatives: dict[str, float] = {name: logprob}
            for other, value in top:
                alternatives.setdefault(self.text.pieces.text(other), value)
            made["top_logprobs"].append(alternatives)
        return made


class ChatReply(Reply):
    """/v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        *args: Any,
        logprobs: bool,
        parser: Callable[[], Parser] | None = None,
        one_call: bool = False,
        named: bool = False,
        **more: Any,
    ) -> None:
        """`parser` makes what finds tool calls, one a choice; `one_call`: no more than one is wanted.

        `named`: the request says which tool is called, so that to have called is no reason to end.
        """
        super().__init__(*args, **more)
        self.with_logprobs = logprobs
        self._parsers = None if parser is None else [parser() for _ in self.choices]
        self._one_call, self._named = one_call, named

    def take(self, piece: Piece) -> Choice:
        choice = super().take(piece)
        choice.fresh, choice.fresh_calls = [piece.text] if piece.text else [], {}
        if self._parsers is not None:
            parser = self._parsers[piece.index]
            found = parser.feed(piece.text) + (parser.end() if piece.completion is not None else [])
            choice.fresh = [item for item in found if isinstance(item, str)]
            choice.content += choice.fresh
            for item in found:
                if not isinstance(item, str):
                    self._add(piece.index, choice, item)
            if choice.calls and choice.finish_reason == "stop" and not self._named:
                choice.finish_reason = "tool_calls"
        return choice

    def _add(self, index: int, choice: Choice, item: Call | More) -> None:
        """A call, or more of the last one."""
        if isinstance(item, Call):
            choice.dropping = self._one_call and bool(choice.calls)
            if not choice.dropping:
                choice.fresh_calls[len(choice.calls)] = self._call(index, len(choice.calls), item)
                choice.calls.append(item)
        elif not choice.dropping:
            number, last = len(choice.calls) - 1, choice.calls[-1]
            choice.calls[-1] = Call(last.name, last.arguments + item.arguments)
            fresh = choice.fresh_calls.setdefault(number, {"function": {"arguments": ""}})
            fresh["function"]["arguments"] += item.arguments

    def _call(self, index: int, number: int, call: Call) -> dict[str, Any]:
        """A tool call as OpenAI writes it; its id is made of the answer's."""
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self.id[-24:]}_{index}_{number}", "type": "function", "function": function}

    def whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text if self._parsers is None else choice.content)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = (text.strip() and text) or None
            message["tool_calls"] = [self._call(index, i, c) for i, c in enumerate(choice.calls)]
        made: dict[str, Any] = {"index": index, "message": message, "finish_reason": choice.finish_reason}
        made["logprobs"] = self._logprobs(choice.logprobs) if self.with_logprobs else None
        return made | (_tokens(choice) if self.show_tokens else {})

    def begin(self) -> Iterator[bytes]:
        for index in range(len(self.choices)):
            yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def events(self, piece: Piece) -> Iterator[bytes]:
        choice, ended = self.choices[piece.index], piece.completion is not None
        silent = not choice.fresh and not choice.fresh_calls
        if silent and not ended and not self.with_logprobs and not self.show_tokens:
            return
        delta: dict[str, Any] = {} if ended or choice.fresh_calls else {"content": ""}
        if choice.fresh:
            delta["content"] = "".join(choice.fresh)
        if choice.fresh_calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in choice.fresh_calls.items()]
        reason = choice.finish_reason if ended else None
        entry: dict[str, Any] = {"index": piece.index, "delta": delta, "finish_reason": reason}
        if self.with_logprobs:
            entry["logprobs"] = self._logprobs(piece.logprobs)
        yield self._chunk(entry | (_tokens(piece) if self.show_tokens else {}))

    def _chunk(self, entry: dict[str, Any]) -> bytes:
        return self.chunk({"logprobs": None, **entry})

    def _logprobs(self, entries: Seq[Any]) -> dict[str, Any]:
        return {
            "content": [
                {**self._token(token, logprob), "top_logprobs": [self._token(t, value) for t, value in top]}
                for token, logprob, top in entries
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text.pieces.raw(token).decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(self.text.pieces.raw(token)),
        }


def _tokens(part: Choice | Piece) -> dict[str, Any]:
    """Tokens, where in the text each begins, and which of them were guessed and by whom."""
    accepted = [int(level is not None) for level in part.levels]
    return {
        "token_ids": part.token_ids,
        "accepted": accepted,
        "levels": part.levels,
        "text_offset": part.text_offset,
    }
