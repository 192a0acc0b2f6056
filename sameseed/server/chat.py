"""Answers of /v1/chat/completions: a message and its tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from typing import Any

from sameseed.server.frames import Piece
from sameseed.server.replies import Reply, ReplyChoice, event, shown_tokens
from sameseed.server.tools import Call, Found, More, Parser


class Said:
    """One choice as a message: its text and its tool calls."""

    def __init__(self, parser: Parser | None, name: str, one_call: bool) -> None:
        """`parser` finds tool calls, if any are possible. `name`: prefix of call ids; `one_call`: keep only one."""
        self._parser, self._name, self._one_call = parser, name, one_call
        self.content: list[str] = []
        self.calls: list[Call] = []
        self.fresh: list[str] = []  # text of the last piece, without calls
        self.fresh_calls: dict[int, dict[str, Any]] = {}  # what the last piece adds to calls, by call number
        self._dropping = False  # is the current call one to drop?

    def feed(self, text: str, reason: str | None) -> None:
        """Add the text of a piece; `reason`: why the text ends with it, None if it goes on."""
        found: list[Found] = [text] if text else []
        if self._parser is not None:
            found = self._parser.feed(text) + (self._parser.end(cut=reason == "length") if reason else [])
        self.fresh, self.fresh_calls = [item for item in found if isinstance(item, str)], {}
        self.content += self.fresh
        for item in found:
            if isinstance(item, Call):
                self._dropping = self._one_call and bool(self.calls)
                if not self._dropping:
                    self.fresh_calls[len(self.calls)] = self.call(len(self.calls), item)
                    self.calls.append(item)
            elif isinstance(item, More) and not self._dropping:
                number, last = len(self.calls) - 1, self.calls[-1]
                self.calls[-1] = Call(last.name, last.arguments + item.arguments)
                fresh = self.fresh_calls.setdefault(number, {"function": {"arguments": ""}})
                fresh["function"]["arguments"] += item.arguments

    def call(self, number: int, call: Call) -> dict[str, Any]:
        """A tool call in OpenAI's format."""
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"{self._name}_{number}", "type": "function", "function": function}

    def message(self) -> dict[str, Any]:
        """The whole message in OpenAI's format."""
        text = "".join(self.content)
        made: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.calls:
            made["content"] = (text.strip() and text) or None
            made["tool_calls"] = [self.call(number, call) for number, call in enumerate(self.calls)]
        return made


class ChatReply(Reply):
    """An answer of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        *args: Any,
        logprobs: bool,
        parser: Callable[[], Parser] | None = None,
        one_call: bool = False,
        named: bool = False,
        shows_thoughts: bool = True,
        **more: Any,
    ) -> None:
        """`parser` makes a parser of tool calls for each choice; `one_call`: keep only the first call.

        `named`: the request names the tool to call, so finish_reason stays "stop" and does not become "tool_calls".
        """
        super().__init__(*args, **more)
        self.with_logprobs = logprobs
        self._named, self._shows_thoughts = named, shows_thoughts
        made = [None if parser is None else parser() for _ in self.choices]
        self._said = [Said(p, f"call_{self.id[-24:]}_{index}", one_call) for index, p in enumerate(made)]

    def take(self, piece: Piece) -> ReplyChoice:
        choice, said = super().take(piece), self._said[piece.index]
        said.feed(piece.text, choice.finish_reason)
        if said.calls and choice.finish_reason == "stop" and not self._named:
            choice.finish_reason = "tool_calls"
        return choice

    def whole_choice(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        message = self._said[index].message() | self._thoughts(choice.reasoning)
        made: dict[str, Any] = {"index": index, "message": message, "finish_reason": choice.finish_reason}
        made["logprobs"] = self._logprobs(choice, choice.logprobs) if self.with_logprobs else None
        return made | (shown_tokens(choice) if self.show_tokens else {})

    def body(self) -> dict[str, Any]:
        return super().body() | ({"prompt_token_ids": self.prompts[0]} if self.show_tokens else {})

    def begin(self) -> Iterator[bytes]:
        for index in range(len(self.choices)):
            delta = {"role": "assistant", "content": ""}
            entry = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
            if self.show_tokens and not index:
                ids = {"prompt_token_ids": self.prompts[0]}
                yield event({**self.envelope(self.chunk_kind), "choices": [entry], **ids})
            else:
                yield self.chunk(entry)

    def events(self, piece: Piece) -> Iterator[bytes]:
        choice, said, ended = self.choices[piece.index], self._said[piece.index], piece.completion is not None
        thought = piece.reasoning if self._shows_thoughts else ""
        silent = not said.fresh and not said.fresh_calls and not thought
        if silent and not ended and not self.with_logprobs and not self.show_tokens:
            return
        delta: dict[str, Any] = {} if ended or said.fresh_calls or thought else {"content": ""}
        delta |= self._thoughts([thought]) if thought else {}
        if said.fresh:
            delta["content"] = "".join(said.fresh)
        if said.fresh_calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in said.fresh_calls.items()]
        reason = choice.finish_reason if ended else None
        entry: dict[str, Any] = {"index": piece.index, "delta": delta, "finish_reason": reason}
        if self.with_logprobs:
            entry["logprobs"] = self._logprobs(choice, piece.logprobs)
        yield self.chunk({"logprobs": None, **entry} | (shown_tokens(piece) if self.show_tokens else {}))

    def _thoughts(self, parts: Seq[str]) -> dict[str, Any]:
        """The reasoning under two names: vLLM's `reasoning`, and DeepSeek's `reasoning_content`."""
        if self.thoughts is None or not self._shows_thoughts:
            return {}
        text = "".join(parts) or None
        return {"reasoning": text, "reasoning_content": text}

    def _logprobs(self, choice: ReplyChoice, entries: Seq[Any]) -> dict[str, Any]:
        made = []
        for token, logprob, top in entries:
            begins = self.begins(choice, token, self.prompts[0])
            alternatives = [self._token(t, value, begins) for t, value in top]
            made.append({**self._token(token, logprob, begins), "top_logprobs": alternatives})
        return {"content": made, "refusal": None}

    def _token(self, token: int, logprob: float, begins: bool) -> dict[str, Any]:
        name = self.name(token, begins, as_bytes=False)
        return {"token": name, "logprob": logprob, "bytes": list(self.text.tokenizer.piece(token, begins))}
