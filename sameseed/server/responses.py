"""Answers of /v1/responses, stateless: OpenAI's newer format of an answer, and the named events of its stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sameseed.server.errors import ApiError
from sameseed.server.frames import Piece
from sameseed.server.protocol import ResponseFields
from sameseed.server.replies import Reply, event


class ResponseReply(Reply):
    """One response with one message."""

    kind = "response"

    def __init__(self, *args: Any, asked: ResponseFields, **more: Any) -> None:
        super().__init__(*args, **more)
        self._asked = asked
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
        asked, done = self._asked, status in ("completed", "incomplete")
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
