"""Conversations in request bodies: text messages, tool calls and their results, and offered tools."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from sameseed.server import limits


class Fields(BaseModel):
    """Base of request models. Strict: a quoted number is not a number. Unknown fields are kept, for the debug log."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class TextPart(Fields):
    """A part of a message. Text only: images, audio and files are refused."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class NamedFunction(Fields):
    """The name of a function."""

    name: Annotated[str, Field(max_length=64)]


class Function(NamedFunction):
    """A function that was called: `arguments` is JSON text."""

    arguments: str


class ToolCall(Fields):
    """A tool call in an earlier answer."""

    id: Annotated[str, Field(max_length=128)]
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The call in OpenAI's format; `limits.opened` converts it to the form that a chat template takes."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


Content = str | list[TextPart]


class Turn(Fields):
    """Fields of every message: the reasoning of an earlier answer, under either name."""

    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def thoughts(self) -> dict[str, str]:
        """The reasoning in the form that a chat template takes."""
        found = self.reasoning_content or self.reasoning
        return {"reasoning_content": found} if found else {}


class Message(Turn):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=128)] | None = None

    def plain(self) -> dict[str, Any]:
        """The message in the form that a chat template takes; "developer" is OpenAI's newer name for "system"."""
        made = {"role": "system" if self.role == "developer" else self.role, "content": _plain(self.content)}
        made |= {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return made | self.thoughts


class CallMessage(Turn):
    """An earlier answer that called tools."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=limits.MAX_TOOLS)]

    def plain(self) -> dict[str, Any]:
        """The message in the form that a chat template takes, except for its calls: see `ToolCall.plain`."""
        calls = [c.plain() for c in self.tool_calls]
        return {"role": self.role, "content": _plain(self.content or ""), "tool_calls": calls} | self.thoughts


def plain(messages: Seq[CallMessage | Message]) -> list[dict[str, Any]]:
    """Messages as plain data in OpenAI's format; `limits.opened` converts them to the form that a chat template takes.

    Raises ApiError 400 if the arguments of calls hold too many values.
    """
    called = [c.function.arguments for m in messages if isinstance(m, CallMessage) for c in m.tool_calls]
    limits.check_values("".join(called).encode("utf-8", "replace"), "the arguments of tool calls hold")
    return [m.plain() for m in messages]


def _plain(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(p.text for p in content)


AnyMessage = Annotated[
    Annotated[CallMessage, Tag("call")] | Annotated[Message, Tag("message")],
    Discriminator(lambda value: "call" if isinstance(value, dict) and value.get("tool_calls") else "message"),
]
Messages = Annotated[list[AnyMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES)]


class OfferedFunction(Fields):
    """A function that may be called; `parameters` is a JSON schema, shown to the model unchanged."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments must match the schema even if calls are optional


class Tool(Fields):
    """A tool that is offered to the model."""

    type: Literal["function"]
    function: OfferedFunction


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction
