"""Answers of /v1/chat/completions and /v1/responses: messages, tool calls, and the named events of the latter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from sameseed.models.harmony import Harmony
from sameseed.server.conversation import NamedTool
from sameseed.server.errors import ApiError
from sameseed.server.frames import Piece
from sameseed.server.reasoning import Thoughts
from sameseed.server.replies import Reply, ReplyChoice, event
from sameseed.server.tools import Call, Found, More, Parser


@dataclass
class ChatChoice(ReplyChoice):
    """A choice as a message: its text without the reasoning, and its tool calls."""

    parser: Parser | None = None  # finds tool calls, if any are possible
    call_prefix: str = ""  # prefix of the ids of calls
    one_call: bool = False  # keep only the first call
    has_stops: bool = False  # may a text of the request's end it within a call?
    named: bool = False  # was this function to be called? Then finish_reason is never "tool_calls"
    content: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)  # text of the last piece, without calls
    fresh_calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # what the last piece adds, by call number
    dropping: bool = False  # is the current call one to drop?

    def take(self, piece: Piece) -> None:
        super().take(piece)
        found: list[Found] = [piece.text] if piece.text else []
        if self.parser is not None:
            found = self.parser.feed(piece.text)
            if self.finish_reason:
                found += self.parser.end(cut=self.has_stops or self.finish_reason == "length")
        self.fresh, self.fresh_calls = [item for item in found if isinstance(item, str)], {}
        self.content += self.fresh
        for item in found:
            if isinstance(item, Call):
                self.dropping = self.one_call and bool(self.calls)
                if not self.dropping:
                    self.fresh_calls[len(self.calls)] = self.call(len(self.calls), item)
                    self.calls.append(item)
            elif isinstance(item, More) and not self.dropping:
                number, last = len(self.calls) - 1, self.calls[-1]
                self.calls[-1] = Call(last.name, last.arguments + item.arguments)
                fresh = self.fresh_calls.setdefault(number, {"function": {"arguments": ""}})
                fresh["function"]["arguments"] += item.arguments
        if self.calls and self.finish_reason == "stop" and not self.named:
            self.finish_reason = "tool_calls"

    def call(self, number: int, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"{self.call_prefix}_{number}", "type": "function", "function": function}

    def message(self) -> dict[str, Any]:
        text = "".join(self.content)
        made: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.calls:
            made["content"] = (text.strip() and text) or None
            made["tool_calls"] = [self.call(number, call) for number, call in enumerate(self.calls)]
        return made


class ChatReply(Reply):
    """An answer of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    choices: list[ChatChoice]  # type: ignore[assignment]

    def choice(self, index: int, thoughts: Thoughts | Harmony | None) -> ChatChoice:
        named = isinstance(self.fields.tool_choice, NamedTool)
        one_call = named or self.fields.parallel_tool_calls is False
        parser, prefix = self.parser and self.parser(), f"call_{self.id[-24:]}_{index}"
        stops = bool(self.add.params.stop)
        return ChatChoice(thoughts, parser=parser, call_prefix=prefix, one_call=one_call, has_stops=stops, named=named)

    def whole_choice(self, index: int, choice: ChatChoice) -> dict[str, Any]:
        message = choice.message() | self._thoughts(choice.reasoning)
        return self.entry(index, {"message": message}, self._logprobs(choice, choice), choice.finish_reason, choice)

    def body(self) -> dict[str, Any]:
        return super().body() | ({"prompt_token_ids": self.prompts[0]} if self.show_tokens else {})

    def begin(self) -> Iterator[bytes]:
        for index in range(len(self.choices)):
            delta = {"role": "assistant", "content": ""}
            entry = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
            ids = {"prompt_token_ids": self.prompts[0]} if self.show_tokens and not index else {}
            yield event({**self.envelope(self.chunk_kind), "choices": [entry], **ids})

    def events(self, piece: Piece) -> Iterator[bytes]:
        choice, ended = self.choices[piece.index], piece.completion is not None
        delta = self._thoughts([piece.reasoning]) if piece.reasoning else {}
        if choice.fresh:
            delta["content"] = "".join(choice.fresh)
        if choice.fresh_calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in choice.fresh_calls.items()]
        if delta or ended or self.with_logprobs or self.show_tokens:
            delta = delta if delta or ended else {"content": ""}
            reason = choice.finish_reason if ended else None
            yield self.chunk(self.entry(piece.index, {"delta": delta}, self._logprobs(choice, piece), reason, piece))

    def _thoughts(self, parts: Seq[str]) -> dict[str, Any]:
        """The reasoning under two names: vLLM's `reasoning`, and DeepSeek's `reasoning_content`."""
        if self.thoughts is None or self.fields.include_reasoning is False:
            return {}
        text = "".join(parts) or None
        return {"reasoning": text, "reasoning_content": text}

    def _logprobs(self, choice: ReplyChoice, part: ReplyChoice | Piece) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        made = []
        for token, logprob, top in part.logprobs:
            begins = self.begins(choice, token, self.prompts[0])
            alternatives = [self._token(t, value, begins) for t, value in top]
            made.append({**self._token(token, logprob, begins), "top_logprobs": alternatives})
        return {"content": made, "refusal": None}

    def _token(self, token: int, logprob: float, begins: bool) -> dict[str, Any]:
        raw = self.text.tokenizer.piece(token, begins)
        return {"token": self.name(token, raw.decode("utf-8", "replace")), "logprob": logprob, "bytes": list(raw)}


class ResponseReply(Reply):
    """One response with one message."""

    prefix, kind = "resp_", "response"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number = 0  # of the stream's next event
        self._thinks = self._written = False  # has the stream begun the reasoning, the message?

    @property
    def _said(self) -> str:
        return "".join(self.choices[0].text)

    def body(self) -> dict[str, Any]:
        return self._response("completed" if self.choices[0].finish_reason == "stop" else "incomplete", self._said)

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress", None))
        yield self._event("response.in_progress", response=self._response("in_progress", None))

    def events(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            if not self._thinks:
                self._thinks = True
                yield self._event("response.output_item.added", output_index=0, item=self._reasoning("in_progress"))
            yield self._in_part("response.reasoning_text.delta", thinks=True, delta=piece.reasoning)
        if piece.text:
            yield from self._opened()
            yield self._in_part("response.output_text.delta", delta=piece.text, logprobs=[])

    def _opened(self) -> Iterator[bytes]:
        """Events that end the reasoning and begin the message; none after the first call."""
        if self._written:
            return
        self._written = True
        if self._thinks:
            item = self._reasoning("completed")
            yield self._in_part("response.reasoning_text.done", thinks=True, text=item["content"][0]["text"])
            yield self._event("response.output_item.done", output_index=0, item=item)
        item = self._message("in_progress", None)
        yield self._event("response.output_item.added", output_index=int(self._thinks), item=item)
        yield self._in_part("response.content_part.added", part=_part(""))

    def end(self) -> Iterator[bytes]:
        yield from self._opened()
        whole, text = self.body(), self._said
        yield self._in_part("response.output_text.done", text=text, logprobs=[])
        yield self._in_part("response.content_part.done", part=_part(text))
        item = self._message(whole["status"], text)
        yield self._event("response.output_item.done", output_index=int(self._thinks), item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError, request_id: str) -> Iterator[bytes]:
        failed = self._response("failed", self._said)
        failed["error"] = {"code": error.code or "server_error", "message": error.message}
        yield self._event("response.failed", response=failed, request_id=request_id)

    def _event(self, name: str, **fields: Any) -> bytes:
        made = event({"type": name, "sequence_number": self._number, **fields}, name)
        self._number += 1
        return made

    def _in_part(self, name: str, thinks: bool = False, **fields: Any) -> bytes:
        item, at = ("rs_", 0) if thinks else ("msg_", int(self._thinks))
        return self._event(name, item_id=item + self.add.id, output_index=at, content_index=0, **fields)

    def _reasoning(self, status: str) -> dict[str, Any]:
        text = "".join(self.choices[0].reasoning)
        content = [{"type": "reasoning_text", "text": text}] if status == "completed" else []
        return {"id": f"rs_{self.add.id}", "type": "reasoning", "status": status, "summary": [], "content": content}

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        made = {"id": f"msg_{self.add.id}", "type": "message", "role": "assistant", "status": status}
        return {**made, "content": content}

    def _response(self, status: str, text: str | None) -> dict[str, Any]:
        asked, done = self.fields, status in ("completed", "incomplete")
        thoughts = [self._reasoning("completed")] if any(self.choices[0].reasoning) else []
        usage = {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": self.reasoning_details(),
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": [] if text is None else [*thoughts, self._message(status, text)],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": "none",
            "tools": [],
            "usage": usage if done else None,
            "metrics": self.metrics() if done else None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
