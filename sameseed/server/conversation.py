"""Conversations in request bodies: text messages, tool calls and their results, and offered tools."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from sameseed.server import limits


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# A whole number may be written as 5.0: JSON does not tell it from 5. Behind its bounds, so that the schema has them.
WHOLE = BeforeValidator(_whole)


class Fields(BaseModel):
    """Base of request models. Strict: a quoted number is refused. Unknown fields are logged; formats forbid them."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class TextPart(Fields):
    """A part of a message. Text only: images, audio and files are refused."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Fields):
    """A part of an earlier answer that declined."""

    type: Literal["refusal"]
    refusal: str


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


Content = str | list[TextPart]


class Turn(Fields):
    """Fields of every message: the reasoning of an earlier answer, under either name."""

    reasoning_content: str | None = None
    reasoning: str | None = None

    def plain(self) -> dict[str, Any]:
        """The message with all that it came with, also fields that are unknown here: templates may read them."""
        made = self.model_dump(exclude_unset=True)
        if isinstance(parts := made.get("content"), list):
            made["content"] = [{"type": "text", "text": p["refusal"]} if p["type"] == "refusal" else p for p in parts]
        # An item of /v1/responses has these beside the message.
        dropped = ("type", "id", "status") if made.get("type") == "message" else ()
        return {name: value for name, value in made.items() if value is not None and name not in dropped}


class Message(Turn):
    """One turn of a conversation that the model did not write."""

    role: Literal["system", "developer", "user", "tool", "function"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=128)] | None = None


class AnswerMessage(Turn):
    """An earlier answer. Without content it called tools, or declined."""

    role: Literal["assistant"]
    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=limits.MAX_TOOLS)] | None = None
    function_call: Function | None = None
    refusal: str | None = None

    def plain(self) -> dict[str, Any]:
        """See `Turn.plain`; `function_call` is the older form of a single call."""
        made = super().plain()
        older = [{"id": "call_0", "type": "function", "function": made.get("function_call")}]
        calls = made.pop("tool_calls", None) or (older if self.function_call else [])
        return made | ({"tool_calls": calls} if calls else {})


class ReasoningItem(Fields):
    """The reasoning before an answer, as /v1/responses gives it."""

    type: Literal["reasoning"]
    content: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The reasoning; what is encrypted is left out."""
        return "".join(part["text"] for part in self.content or () if isinstance(part.get("text"), str))


def plain(items: Seq[Message | AnswerMessage | ReasoningItem]) -> list[dict[str, Any]]:
    """Items as messages in OpenAI's format. Reasoning becomes part of the answer after it.

    Raises ApiError 400 if the arguments of calls hold too many values.
    """
    made: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for item in items:
        if isinstance(item, ReasoningItem):
            thoughts.append(item.text)
            continue
        made.append(item.plain())
        if isinstance(item, AnswerMessage) and any(thoughts):
            made[-1].setdefault("reasoning_content", "\n".join(thoughts))
        thoughts = []
    called = [c["function"]["arguments"] for m in made for c in m.get("tool_calls", ())]
    limits.check_values("".join(called).encode("utf-8", "replace"), "the arguments of tool calls hold")
    return made


def _turn(value: Any) -> str:
    answers = isinstance(value, dict) and (value.get("role") == "assistant" or value.get("tool_calls"))
    return "answer" if answers else "message"


def _item(value: Any) -> str:
    return "reasoning" if isinstance(value, dict) and value.get("type") == "reasoning" else _turn(value)


_OfChat = Annotated[AnswerMessage, Tag("answer")] | Annotated[Message, Tag("message")]
_OfResponses = _OfChat | Annotated[ReasoningItem, Tag("reasoning")]
_MANY = Field(min_length=1, max_length=limits.MAX_MESSAGES)
Messages = Annotated[list[Annotated[_OfChat, Discriminator(_turn)]], _MANY]
Items = Annotated[list[Annotated[_OfResponses, Discriminator(_item)]], _MANY]


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
