"""Constraints on a text in requests: bounded, free of contradictions, and none silently ignored."""

import json
import random
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, HttpUrl

from sameseed.server import limits, schemas
from sameseed.server.errors import ApiError
from sameseed.server.protocol import ChatFields, CompletionFields, ResponseFields, read
from sameseed.server.unions import ANNOTATIONS

NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def source(kind=CompletionFields, **fields):
    first = {ChatFields: {"messages": [{"role": "user", "content": "x"}]}, ResponseFields: {"input": "x"}}
    return read(kind, {**first.get(kind, {"prompt": "x"}), **fields}).source(None)


def test_one_meaning_however_it_is_said():
    by_name = {"type": "json_schema", "json_schema": {"name": "n", "schema": NAME, "strict": True}}
    flat = {"type": "json_schema", "name": "n", "schema": NAME}
    made = [
        source(response_format=by_name), source(ChatFields, response_format=by_name),
        source(ResponseFields, text={"format": flat}), source(structured_outputs={"json": NAME}),
        source(structured_outputs={"json": json.dumps(NAME)}),
        source(response_format={"type": "json_object", "schema": NAME}),
    ]  # fmt: skip
    assert {(s.kind, s.text) for s in made} == {("json", json.dumps(NAME))}
    assert len({s.key for s in made}) == 1
    anything = [source(response_format={"type": "json_object"}), source(structured_outputs={"json_object": True})]
    assert {s.kind for s in anything} == {"object"}
    assert source(structured_outputs={"regex": "a+"}).kind == "regex"
    assert source(structured_outputs={"grammar": 'root ::= "a"'}).field == "structured_outputs.grammar"
    assert source(response_format={"type": "text"}) is None is source(structured_outputs={"choice": ["a"]})
    assert source(ResponseFields, text={"format": {"type": "text"}}) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": NAME}}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"choice": ["a"], "regex": "a"}},
        {"structured_outputs": {"regex": "a", "grammar": 'root ::= "a"'}}, {"structured_outputs": {"xml": "a"}},
        {"structured_outputs": {}}, {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"json": "no json"}}, {"structured_outputs": {"json": 5}},
        {"structured_outputs": {"regex": "a" * (limits.MAX_REGEX + 1)}}, {"structured_outputs": {"regex": "(" * 65}},
        {"structured_outputs": {"grammar": "a" * (limits.MAX_GRAMMAR + 1)}},
        {"structured_outputs": {"grammar": "root ::= " + "(" * 30000}}, {"speculation": {"k": 3}},
        {"response_format": {"type": "json_object", "response_schema": NAME}},
    ],
)  # fmt: skip
def test_refused(fields):
    with pytest.raises(ApiError) as caught:
        source(**fields)
    assert caught.value.status == 400 and len(caught.value.message) < 600


def test_a_schema_that_is_no_json_is_named():
    for text in ("{bad", "[1]", '{"a":' * 70 + "1" + "}" * 70):
        with pytest.raises(ApiError) as caught:
            source(structured_outputs={"json": text})
        assert caught.value.param == "structured_outputs.json" and "body" not in caught.value.message
    with pytest.raises(ApiError, match="'shema' is unknown"):
        source(response_format={"type": "json_schema", "json_schema": {"name": "n", "shema": NAME}})


def nested(depth):
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


# What must be refused, and the word that names it. The grammar would ignore it, or take too long.
REFUSED = [
    ("not", {"type": "integer", "not": {"const": 3}}), ("if", {"if": {}, "then": {}}),
    ("contains", {"type": "array", "contains": {}}),
    ("patternProperties", {"type": "object", "patternProperties": {"^a": {}, "b$": {}}}),
    ("patternProperties", {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a": {}}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("$dynamicRef", {"$dynamicRef": "#a"}),
    ("contentEncoding", {"type": "string", "contentEncoding": "quoted-printable"}),
    ("minimun", {"type": "integer", "minimun": 3}),
    ("properties.a.not", {"type": "object", "properties": {"a": {"not": {}}}}),
    ("anyOf[1].not", {"anyOf": [{"type": "null"}, {"not": {"type": "string"}}]}),
    ("properties", {"anyOf": [{"type": "object"}, {"type": "array"}], "properties": {"a": {}}}),
    ("minimum", {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}),
    ("allOf", {"allOf": [{"type": "integer"}, {"type": "integer", "minimum": 3}]}),
    ("allOf", {"allOf": [NAME, {**NAME, "properties": {"name": {"type": "integer"}}}]}),
    ("properties", {"allOf": [{"type": "object", "additionalProperties": False}], "properties": {"a": {}}}),
    ("type", {"type": "string", "anyOf": [{"type": "integer"}]}),
    ("maxLength", {"type": "string", "enum": ["ab"], "maxLength": 1}),
    (
        "propertyNames",
        {"type": "object", "propertyNames": {"enum": ["ab"], "maxLength": 1}, "additionalProperties": {}},
    ),
    ("type", {"enum": ["a", 1], "type": "string"}), ("minLength", {"minLength": 3}), ("minimum", {"minimum": 3}),
    ("type", {"type": "strnig"}), ("type", {"type": []}),
    ("maxLength", {"type": "string", "pattern": "a", "maxLength": 3}),
    ("minLength", {"type": "string", "format": "date", "minLength": 3}),
    ("format", {"type": "string", "format": "regex"}), ("format", {"type": "string", "format": ["date"]}),
    ("type", {"type": [{}, "string"]}), ("type", {"enum": [1], "type": True}),
    ("prefixItems", {"type": "array", "prefixItems": 3}), ("pattern", {"type": "string", "pattern": 'a"'}),
    ("pattern", {"type": "string", "pattern": r"a\n"}), ("pattern", {"type": "string", "pattern": r"\x22"}),
    ("lookahead", {"type": "string", "pattern": "(?=a)b"}), ("lookbehind", {"type": "string", "pattern": "(?<!a)b"}),
    *(("reference to a group", {"type": "string", "pattern": pattern}) for pattern in (r"\ba", r"(a)\1", "a[")),
    ("ends of its alternatives", {"type": "string", "pattern": "a(^b|c)"}),
    ("64 bits", {"type": "integer", "maximum": 1e22}), ("64 bits", {"enum": [{"a": [2**70]}]}),
    ("required", {"type": "object", "properties": {"a": {}}, "required": ["b"]}),
    ("required", {"type": "object", "required": "a"}),
    ("propertyNames", {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "b"}}),
    ("pattern", {"type": "object", "propertyNames": {"pattern": '"'}}), ("$ref", {"$ref": "http://example.org/schema"}),
    ("$ref", {"$ref": "#/$defs/none"}), ("properties", {"type": "object", "properties": {"a": False}}),
    ("x-place.not", {"$ref": "#/x-place", "x-place": {"not": {}}}), ("too large", nested(limits.MAX_SCHEMA_DEPTH + 1)),
    ("enum", {"enum": list(range(limits.MAX_ENUM + 1))}),
    ("too large", {"type": "object", "properties": {f"p{i}": {} for i in range(limits.MAX_SCHEMA_NODES + 1)}}),
    ("pattern", {"anyOf": [{"type": "string", "pattern": "a"}] * (limits.MAX_PATTERNS + 1)}),
    ("characters", {"type": "string", "description": "x" * limits.MAX_GRAMMAR}),
    ("repeated", {"properties": {"a": {"const": "x" * 9000}}, "anyOf": [{"required": ["a"]}] * 100}),
    ("repeated", {"type": "object", "required": [*map(str, range(99))], "additionalProperties": {"const": "x" * 9000}}),
]  # fmt: skip


@pytest.mark.parametrize(("word", "schema"), REFUSED)
def test_schemas_that_cannot_be_enforced(word, schema):
    with pytest.raises(ApiError) as caught:
        schemas.check(schema, "response_format")
    assert caught.value.status == 400 and word in caught.value.message, caught.value.message
    assert caught.value.param == "response_format"


class Square(BaseModel):
    kind: Literal["square"] = "square"
    side: int


class Other(BaseModel):
    kind: Literal["circle", "point"]


class Everything(BaseModel):
    """Fields for which pydantic writes unusual schemas."""

    kinds: set[str]
    page: HttpUrl
    raw: bytes
    where: Path | None
    share: Annotated[int | float, Field(ge=1)]
    shape: Annotated[Square | Other, Field(discriminator="kind")]


def test_schemas_of_pydantic():
    whole = json.loads(schemas.check(Everything.model_json_schema(), "x"))
    made = whole["properties"]
    assert made["page"]["format"] == "uri" and "maxLength" not in made["page"]
    assert made["raw"] == {"type": "string"}
    assert [form["minimum"] for form in made["share"]["anyOf"]] == [1, 1] and "ge" not in made["share"]
    assert "oneOf" not in made["shape"] and len(made["shape"]["anyOf"]) == 2
    assert whole["$defs"]["Square"]["required"] == ["side", "kind"], "it says which of the two it is"


@pytest.mark.parametrize("told", [None, "kind", {}, {"propertyName": 3}, {"propertyName": "side"}])
def test_one_of_what_nothing_tells_apart_stays(told):
    """It stays, so that the grammar refuses it: a value could match both."""
    schema = {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}],
        "discriminator": told,
        "$defs": {"a": {"type": "object", "properties": {"kind": {"const": "a"}, "side": {"type": "integer"}}}},
    }
    assert json.loads(schemas.check(schema, "x")) == {k: v for k, v in schema.items() if k != "discriminator"}
    assert json.loads(schemas.check({**schema, "discriminator": {"propertyName": "kind"}}, "x"))["oneOf"]


def test_whatever_a_schema_holds_it_is_taken_or_refused():
    """Random values under every keyword must not cause an internal error."""
    rng = random.Random(1)
    plain = [None, True, False, 0, 1.5, "", "string", "#", "#/$defs/a", "date", "["]
    plain += [[], {}, ["string"], [[]], [{}], [1]]

    def value(depth):
        if depth == 0 or rng.random() < 0.4:
            return rng.choice(plain)
        if rng.random() < 0.4:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        return {rng.choice(keywords): value(depth - 1) for _ in range(rng.randrange(4))}

    keywords, taken = [*sorted(schemas.KNOWN | ANNOTATIONS), "a"], 0
    for _ in range(4_000):
        schema = {rng.choice(keywords): value(2) for _ in range(rng.randrange(1, 4))}
        schema |= {"type": rng.choice(["object", "array", "string"])} if rng.random() < 0.5 else {}
        try:
            schemas.check(schema, "response_format")
            taken += 1
        except ApiError as error:
            assert error.status == 400
    assert 200 < taken < 3_800


def test_a_long_chain_of_references_is_followed():
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1500)}
    schema = {"oneOf": [{"$ref": "#/$defs/a0"}, {"type": "string"}], "$defs": {**chain, "a1500": {"type": "null"}}}
    assert "anyOf" in json.loads(schemas.check(schema, "x"))
    assert schemas.check(nested(limits.MAX_SCHEMA_DEPTH - 1), "x")


def test_lengths_are_patterns_in_gemmas_style_and_values_stay():
    value = {"minLength": 2}
    text = {"type": "string", "minLength": 2}
    parts = {"default": text, "name": text, "fixed": {"const": value}, "one": {"enum": [value]}}
    schema = {"type": "object", "properties": parts, "default": value, "examples": [value]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    made = json.loads(read(ChatFields, asked).source("gemma4").text)["format"]["tags"][0]["content"]["json_schema"]
    bound = {"type": "string", "pattern": "[^<]{2,}"}
    assert made == {"type": "object", "properties": {**parts, "default": bound, "name": bound}}


def test_a_long_text_is_no_schema_to_parse(monkeypatch):
    monkeypatch.setattr(limits, "parse_object", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(ApiError, match="characters"):
        schemas.check("{" + " " * limits.MAX_GRAMMAR + "}", "f")
