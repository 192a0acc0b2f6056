"""Answers of /v1/chat/completions and /v1/responses: messages, tool calls, and the named events of the latter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import Any

from sameseed.server.conversation import NamedTool
from sameseed.server.errors import ApiError
from sameseed.server.frames import Piece
from sameseed.server.replies import Job, Reply, ReplyChoice, event
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

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._named = isinstance(job.fields.tool_choice, NamedTool)  # then finish_reason is never "tool_calls"
        self._shows_thoughts = job.fields.include_reasoning is not False
        one_call = self._named or job.fields.parallel_tool_calls is False
        parsers = [None if job.parser is None else job.parser() for _ in self.choices]
        self._said = [Said(p, f"call_{self.id[-24:]}_{index}", one_call) for index, p in enumerate(parsers)]

    def take(self, piece: Piece) -> ReplyChoice:
        choice, said = super().take(piece), self._said[piece.index]
        said.feed(piece.text, choice.finish_reason)
        if said.calls and choice.finish_reason == "stop" and not self._named:
            choice.finish_reason = "tool_calls"
        return choice

    def whole_choice(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        message = self._said[index].message() | self._thoughts(choice.reasoning)
        logprobs = self._logprobs(choice, choice.logprobs) if self.with_logprobs else None
        return self.entry(index, {"message": message}, logprobs, choice.finish_reason, choice)

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
        logprobs = self._logprobs(choice, piece.logprobs) if self.with_logprobs else None
        reason = choice.finish_reason if ended else None
        yield self.chunk(self.entry(piece.index, {"delta": delta}, logprobs, reason, piece))

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


class ResponseReply(Reply):
    """One response with one message."""

    prefix, kind = "resp_", "response"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._number = 0
        self._thinks = self._written = False  # has the stream begun the reasoning, the message?
        self._item = "msg_" + self.id.removeprefix("resp_")

    def body(self) -> dict[str, Any]:
        choice = self.choices[0]
        return self._response("completed" if choice.finish_reason == "stop" else "incomplete", "".join(choice.text))

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress", None))
        yield self._event("response.in_progress", response=self._response("in_progress", None))

    def events(self, piece: Piece) -> Iterator[bytes]:
        if piece.reasoning:
            if not self._thinks:
                self._thinks = True
                yield self._event("response.output_item.added", output_index=0, item=self._thoughts("in_progress"))
            yield self._event("response.reasoning_text.delta", **self._thoughts_place(), delta=piece.reasoning)
        if piece.text:
            yield from self._opened()
            yield self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[])

    def _opened(self) -> Iterator[bytes]:
        """Events that end the reasoning and begin the message; none after the first call."""
        if self._written:
            return
        self._written = True
        if self._thinks:
            text = "".join(self.choices[0].reasoning)
            yield self._event("response.reasoning_text.done", **self._thoughts_place(), text=text)
            yield self._event("response.output_item.done", output_index=0, item=self._thoughts("completed"))
        item = self._message("in_progress", None)
        yield self._event("response.output_item.added", output_index=int(self._thinks), item=item)
        yield self._event("response.content_part.added", **self._place(), part=_part(""))

    def end(self, include_usage: bool) -> Iterator[bytes]:
        yield from self._opened()
        whole = self.body()
        text = "".join(self.choices[0].text)
        yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=_part(text))
        item = self._message(whole["status"], text)
        yield self._event("response.output_item.done", output_index=int(self._thinks), item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError, request_id: str) -> Iterator[bytes]:
        failed = self._response("failed", "".join(self.choices[0].text))
        failed["error"] = {"code": error.code or "server_error", "message": error.message}
        yield self._event("response.failed", response=failed, request_id=request_id)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": int(self._thinks), "content_index": 0}

    def _thoughts_place(self) -> dict[str, Any]:
        return {"item_id": self._thoughts("completed")["id"], "output_index": 0, "content_index": 0}

    def _thoughts(self, status: str) -> dict[str, Any]:
        text = "".join(self.choices[0].reasoning)
        content = [{"type": "reasoning_text", "text": text}] if status == "completed" else []
        made = {"id": "rs_" + self.id.removeprefix("resp_"), "type": "reasoning", "status": status}
        return {**made, "summary": [], "content": content}

    def _event(self, name: str, **fields: Any) -> bytes:
        made = event({"type": name, "sequence_number": self._number, **fields}, name)
        self._number += 1
        return made

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, text: str | None) -> dict[str, Any]:
        asked, done = self.fields, status in ("completed", "incomplete")
        prompt, output = self.num_prompt_tokens, self.num_output_tokens
        thoughts = [self._thoughts("completed")] if any(self.choices[0].reasoning) else []
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "output_tokens": output,
            "output_tokens_details": self.reasoning_details(),
            "total_tokens": prompt + output,
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
            "model": self.job.model,
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
