"""Structured output: turns `response_format`, `structured_outputs` and `tools` into grammars to compile."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sameseed.server import limits, schemas
from sameseed.server.conversation import Fields, NamedTool, Tool
from sameseed.server.errors import bad_request
from sameseed.server.tools import FORMATS

Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=limits.MAX_CHOICE_LENGTH)]],
    Field(min_length=1, max_length=limits.MAX_CHOICES),
]
Schema = dict[str, Any] | str


class GrammarSource(NamedTuple):
    """A grammar to be compiled: its `kind` (see `grammar.matching`), its text, and the request field that holds it."""

    kind: str
    text: str
    field: str
    is_free: bool = False  # the text is free until a mark opens a call

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode("utf-8", "replace")).hexdigest()


class JsonSchema(Fields, extra="forbid"):
    """A named schema. It is always enforced: `strict` has no effect."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class PlainFormat(Fields, extra="forbid"):
    """Any text, or a JSON object; one that matches a schema, as llama.cpp has it."""

    type: Literal["text", "json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class SchemaFormat(Fields, extra="forbid"):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class FlatSchemaFormat(JsonSchema):
    """JSON that matches a schema, in the form of /v1/responses."""

    type: Literal["json_schema"]


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class TextOptions(Fields, extra="forbid"):
    """`text` of /v1/responses."""

    verbosity: Literal["medium"] | None = None
    format: Annotated[PlainFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None


class StructuredOutputs(Fields, extra="forbid"):
    """vLLM's field of this name: exactly one of these must be given."""

    choice: Choices | None = None
    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> StructuredOutputs:
        if self.json_object or any(v is not None for v in (self.choice, self.json_, self.regex, self.grammar)):
            return self
        raise PydanticCustomError("empty", "give one of choice, json, regex, grammar, json_object")


def of_format(chosen: PlainFormat | SchemaFormat | FlatSchemaFormat | None, name: str) -> list[GrammarSource]:
    """The grammars that OpenAI's format fields ask for. Raises ApiError 400."""
    given = chosen.json_schema if isinstance(chosen, SchemaFormat) else chosen
    if given is not None and given.schema_ is not None:
        return [GrammarSource("json", schemas.check(given.schema_, name), name)]
    return [] if chosen is None or chosen.type == "text" else [GrammarSource("object", "", name)]


def of_outputs(asked: StructuredOutputs | None) -> list[GrammarSource]:
    """The grammars that vLLM's field asks for, but for a choice. Raises ApiError 400."""
    name, found = "structured_outputs", list[GrammarSource]()
    if asked is None:
        return found
    if asked.json_ is not None:
        found.append(GrammarSource("json", schemas.check(asked.json_, f"{name}.json"), f"{name}.json"))
    for kind, text, what, most in (
        ("regex", asked.regex, "pattern", limits.MAX_REGEX),
        ("grammar", asked.grammar, "grammar", limits.MAX_GRAMMAR),
    ):
        if text is not None:
            field = f"{name}.{kind}"
            found.append(GrammarSource(kind, schemas.check_text(text, field, what, most), field))
    if asked.json_object:
        found.append(GrammarSource("object", "", f"{name}.json_object"))
    return found


def of_tools(
    tools: Seq[Tool],
    choice: str | NamedTool | None,
    several: bool,
    parser: str | None,
    beside: GrammarSource | None = None,
) -> GrammarSource | None:
    """The grammar of an answer that must call a tool, or whose calls must match their schemas; None if neither.

    `several`: more than one call is allowed; `parser`: the model's format of calls; `beside`: the format of an answer
    that calls no tool. Raises ApiError 400 for a tool that was not offered, if there is no tool to call, or for what
    cannot be enforced.
    """
    must = choice == "required" or isinstance(choice, NamedTool)
    if beside is not None and (must or (beside.kind not in ("json", "object") and tools and choice != "none")):
        why = "contradict each other: beside 'tools' an answer may have a JSON format, where no tool must be called"
        raise bad_request(f"{beside.field} and tools {why}", beside.field)
    if isinstance(choice, NamedTool):
        tools, several = [tool for tool in tools if tool.function.name == choice.function.name][:1], False
        if not tools:
            raise bad_request("tool_choice names a function that 'tools' lacks; offer it", "tool_choice")
    elif choice == "required" and not tools:
        raise bad_request("tool_choice is 'required' and there are no 'tools'", "tool_choice")
    elif choice == "none" or not tools:
        return None
    if must or beside is not None:  # calls; beside a format either that or calls
        return _calls({"stop_after_first": not several, "at_least_one": True}, tools, parser, beside)
    if not any(tool.function.strict for tool in tools):
        return None
    if parser is not None and FORMATS[parser].close:  # free text, until a call opens
        free = {"type": "triggered_tags", "triggers": [FORMATS[parser].marks[0]], "at_least_one": False}
        calls = _calls({**free, "stop_after_first": not several}, tools, parser)
        return calls and calls._replace(is_free=True)
    raise bad_request("this model's calls have no mark of their own: 'strict' needs tool_choice 'required'", "tools")


def _calls(
    how: dict[str, Any], tools: Seq[Tool], parser: str | None, beside: GrammarSource | None = None
) -> GrammarSource | None:
    if parser is None:
        return None
    form = FORMATS[parser]
    tags, size = [], 0
    for tool in tools:
        schema = tool.function.parameters
        schema = {"additionalProperties": False} if schema is None else schema  # it takes none
        if schema.get("type", "object") != "object":
            raise bad_request("tools: 'parameters' of a function must be a schema of type object", "tools")
        size += len(json.dumps(schema, ensure_ascii=False))
        if size > limits.MAX_TOOL_SCHEMAS:
            raise bad_request(f"tools: their schemas may have {limits.MAX_TOOL_SCHEMAS} characters in all", "tools")
        schema = json.loads(schemas.check(schema, "tools", form.character))
        if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
            schema = {"type": "object", **schema}
        content = _json_schema(schema) | {"style": form.style}
        opening = form.begin.replace("NAME", tool.function.name)
        tags.append({"type": "tag", "begin": opening, "content": content, "end": form.end})
    separated = {"type": "tags_with_separator", "separator": form.separator} if "type" not in how else {}
    calls = {**separated, **how, "tags": tags}
    if beside is not None:
        other = _json_schema(json.loads(beside.text) if beside.kind == "json" else {"type": "object"})
        calls = {"type": "or", "elements": [calls, other]}
    made = json.dumps({"type": "structural_tag", "format": calls}, ensure_ascii=False)
    return GrammarSource("tag", made, "tools" if beside is None else beside.field)


def _json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
