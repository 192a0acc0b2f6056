"""Conversations as clients send them: messages of text, calls of tools and their answers, tools on offer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from sameseed.server import limits


class Fields(BaseModel):
    """Strict: a number in quotes is no number. Unknown fields stay visible, for the debug log."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class TextPart(Fields):
    """A part of a message. Text only: pictures, sounds and files are refused."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class NamedFunction(Fields):
    """The name of a function."""

    name: Annotated[str, Field(max_length=64)]


class Function(NamedFunction):
    """A function that was called: `arguments` is JSON text."""

    arguments: str


class ToolCall(Fields):
    """A call that an earlier answer held."""

    id: Annotated[str, Field(max_length=128)]
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """As OpenAI writes it; `limits.opened` makes of it what a chat template takes."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


Content = str | list[TextPart]


class Turn(Fields):
    """What every message may hold: of an earlier answer its thoughts, by either name."""

    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def thoughts(self) -> dict[str, str]:
        """As a chat template takes them."""
        found = self.reasoning_content or self.reasoning
        return {"reasoning_content": found} if found else {}


class Message(Turn):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=128)] | None = None

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it; "developer" is OpenAI's newer word for "system"."""
        made = {"role": "system" if self.role == "developer" else self.role, "content": _plain(self.content)}
        made |= {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return made | self.thoughts


class CallMessage(Turn):
    """An earlier answer that called tools."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=limits.MAX_TOOLS)]

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it."""
        calls = [c.plain() for c in self.tool_calls]
        return {"role": self.role, "content": _plain(self.content or ""), "tool_calls": calls} | self.thoughts


def plain(messages: Seq[CallMessage | Message]) -> list[dict[str, Any]]:
    """Messages as OpenAI writes them, but plain; `limits.opened` makes of them what a chat template takes.

    Raises ApiError 400 for arguments of calls that hold too much.
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
    """A function that may be called; `parameters` is a JSON schema, shown to the model as it is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments must match the schema even where a call is the model's own choice


class Tool(Fields):
    """A tool that is offered to the model."""

    type: Literal["function"]
    function: OfferedFunction


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction
