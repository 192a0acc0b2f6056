"""What a text has to look like, as requests say it: `response_format`, `structured_outputs`, `guided_*`."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from sameseed.server import limits, schemas
from sameseed.server.conversation import Fields
from sameseed.server.errors import bad_request

Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=limits.MAX_CHOICE_LENGTH)]],
    Field(min_length=1, max_length=limits.MAX_CHOICES),
]
Schema = dict[str, Any] | str
_NAMED = {"type": {"enum": ["object", "array", "string", "integer", "number", "boolean", "null"]}}
_PLAIN = {"type": "object", "properties": _NAMED, "required": ["type"], "additionalProperties": False}


# What the interface's document says of such languages: some of their texts, which are taken for sure.
SOME_SCHEMAS: dict[str, Any] = {"anyOf": [_PLAIN, {"type": "null"}]}
SOME_PATTERNS: dict[str, Any] = {"anyOf": [{"enum": ["[a-z]+", "(a|b)*", None]}]}
SOME_GRAMMARS: dict[str, Any] = {"anyOf": [{"enum": ['root ::= "a" | "b"', 'start: "a" | "b"', None]}]}


class GrammarSource(NamedTuple):
    """A grammar to be compiled: `kind` as `grammar.matching` has it, the text, and the field that it came in."""

    kind: str
    text: str
    field: str

    @property
    def key(self) -> str:
        """A name for its meaning."""
        return hashlib.sha256(f"{self.kind}\0{self.text}".encode("utf-8", "replace")).hexdigest()


class JsonSchema(Fields):
    """A schema by name. It is always enforced: `strict` changes nothing."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema", json_schema_extra=SOME_SCHEMAS)] = None
    strict: bool | None = None


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Fields):
    """A JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Fields):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class FlatSchemaFormat(JsonSchema):
    """JSON by a schema, as /v1/responses has it."""

    type: Literal["json_schema"]


AnyFormat = TextFormat | ObjectFormat | SchemaFormat | FlatSchemaFormat


class TextOptions(Fields):
    """`text` of /v1/responses."""

    format: Annotated[TextFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None


def _one_of_them(schema: dict[str, Any]) -> None:
    """Make of a schema with properties one that says: exactly one of these, and not null."""
    forms = []
    for name, form in schema.pop("properties").items():
        kinds = [{**f, "enum": [v for v in f["enum"] if v is not None]} if "enum" in f else f for f in form["anyOf"]]
        kinds = [{"const": True} if f.get("type") == "boolean" else f for f in kinds if f.get("type") != "null"]
        forms.append({"type": "object", "properties": {name: {"anyOf": kinds}}, "required": [name]})
    schema["anyOf"] = [{**form, "additionalProperties": False} for form in forms]
    schema.pop("additionalProperties", None)


class StructuredOutputs(Fields):
    """vLLM's form: exactly one of these."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_one_of_them)

    choice: Choices | None = None
    json_: Annotated[Schema | None, Field(alias="json", json_schema_extra=SOME_SCHEMAS)] = None
    regex: Annotated[str | None, Field(json_schema_extra=SOME_PATTERNS)] = None
    grammar: Annotated[str | None, Field(json_schema_extra=SOME_GRAMMARS)] = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> StructuredOutputs:
        if self.json_object or any(v is not None for v in (self.choice, self.json_, self.regex, self.grammar)):
            return self
        raise PydanticCustomError("empty", "give one of choice, json, regex, grammar, json_object")


def of_format(chosen: AnyFormat | None, name: str) -> GrammarSource | None:
    """What OpenAI's formats ask for. Raises ApiError 400."""
    if chosen is None or isinstance(chosen, TextFormat):
        return None
    if isinstance(chosen, ObjectFormat):
        return GrammarSource("object", "", name)
    schema = chosen.json_schema if isinstance(chosen, SchemaFormat) else chosen
    if schema.schema_ is None:
        return GrammarSource("object", "", name)
    return GrammarSource("json", schemas.check(schema.schema_, name), name)


def of_guides(
    name: str, json_schema: Schema | None, regex: str | None, grammar: str | None, json_object: bool | None
) -> list[GrammarSource]:
    """What vLLM's fields ask for. Raises ApiError 400; `name`: what their names begin with."""
    found: list[GrammarSource] = []
    if json_schema is not None:
        found.append(GrammarSource("json", schemas.check(json_schema, f"{name}json"), f"{name}json"))
    if regex is not None:
        found.append(GrammarSource("regex", schemas.check_regex(regex, f"{name}regex"), f"{name}regex"))
    if grammar is not None:
        found.append(GrammarSource("grammar", schemas.check_grammar(grammar, f"{name}grammar"), f"{name}grammar"))
    if json_object:
        found.append(GrammarSource("object", "", f"{name}json_object"))
    return found


def only(found: list[GrammarSource], choice: bool) -> GrammarSource | None:
    """The one thing that is asked for. Raises ApiError 400 where there are several."""
    if len(found) + choice > 1:
        names = ", ".join([*(s.field for s in found), *(["a choice"] if choice else [])])
        raise bad_request(f"{names} contradict each other; give one", found[0].field)
    return found[0] if found else None
