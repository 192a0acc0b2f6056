"""Checks JSON schemas from requests: limits their size, and refuses what the grammar compiler would silently ignore."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from sameseed.server import limits
from sameseed.server.errors import ApiError, bad_request

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
KINDS |= {list: "array", dict: "object"}
TYPES = set(KINDS.values())
ANNOTATIONS = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
ANNOTATIONS |= {"$comment", "$schema", "$id", "$defs", "definitions", "discriminator"}
# Keywords by the type that they apply to. Beside those of strings and numbers a schema must state its type, or the
# grammar compiler would ignore them.
_OF_STRINGS = {"minLength", "maxLength", "pattern", "format"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_ARRAYS = {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"}
_OF_OBJECTS = {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
_OF_OBJECTS |= {"unevaluatedProperties"}
_WHOLE = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}  # other keywords cannot be enforced beside one
# Keywords whose value is a schema, a list of schemas, or an object of schemas by name.
SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
LISTED, NAMED = ("anyOf", "oneOf", "allOf", "prefixItems"), ("properties", "$defs", "definitions")
KNOWN = {"type"} | ANNOTATIONS | _OF_STRINGS | _OF_NUMBERS | _OF_ARRAYS | _OF_OBJECTS | _WHOLE
FORMATS = {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference"}
# Non-standard keywords that pydantic writes beside anyOf, for the bounds of a union of numbers.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_ANY = {"binary", "password", "path", "file-path", "directory-path"}  # formats that every string has
_LONG = 1024  # characters: no text of a format is that long
FORMATS |= {"uri-template"}  # not those of JSON pointers: they would allow control characters
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_TOO_LARGE = "holds a whole number of more than 64 bits, which cannot be enforced"
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def target(root: Any, reference: str) -> Any:
    """The schema that a reference like "#/$defs/Place" leads to in its document; None if there is none."""
    for part in reference.split("/")[1:]:
        root = root.get(part) if isinstance(root, dict) else None
    return root if isinstance(root, dict) else None


def check(schema: Any, name: str) -> str:
    """Check a schema; returns it as text in the compiler's form. Raises ApiError 400 that names the keyword.

    `name`: the request field that holds the schema, which stays as it is.
    """
    too_long = bad_request(f"{name}: a schema may have {limits.MAX_GRAMMAR} characters, this has more", name)
    if isinstance(schema, str):
        if len(schema) > limits.MAX_GRAMMAR:
            raise too_long
        try:
            schema = limits.parse_object(schema.encode("utf-8", "replace"), name)
        except ApiError as error:  # name the field, not the body
            raise ApiError(error.status, error.message, param=name, code=error.code) from None
    if not isinstance(schema, dict):
        raise bad_request(f"{name}: a schema is a JSON object", name)
    text = _ENCODER.encode(schema)
    if len(text) > limits.MAX_GRAMMAR:
        raise too_long
    schema = json.loads(text)  # a copy
    walk = _SchemaWalk(schema, name)
    walk.schema(schema, "schema", 0)
    return _ENCODER.encode(schema) if walk.changed else text


class _SchemaWalk:
    def __init__(self, root: dict[str, Any], name: str) -> None:
        self._root, self._name = root, name
        self._num_nodes = self._num_values = self._num_patterns = 0
        self.changed = False  # was the schema rewritten?

    def schema(self, node: Any, place: str, depth: int) -> None:
        """Check a schema and the schemas within it. `place`: its path, for errors."""
        self._num_nodes += 1
        if self._num_nodes > limits.MAX_SCHEMA_NODES or depth > limits.MAX_SCHEMA_DEPTH:
            size = f"{limits.MAX_SCHEMA_NODES} schemas within each other, {limits.MAX_SCHEMA_DEPTH} levels deep"
            raise self._fault("schema", f"is too large: at most {size}")
        if node is True:
            return
        if not isinstance(node, dict):
            raise self._fault(place, "must be an object; nothing matches false")
        for key in _BOUNDS.keys() & node.keys() if isinstance(node.get("anyOf"), list) else ():
            self.changed, bound = True, node.pop(key)
            for form in node["anyOf"]:
                if isinstance(form, dict) and form.get("type") in ("integer", "number"):
                    form.setdefault(_BOUNDS[key], bound)
        for key in node:
            if key not in KNOWN and not key.startswith("x-"):
                raise self._fault(f"{place}.{key}", "is a keyword that cannot be enforced; leave it out")
        keys = node.keys() - ANNOTATIONS
        if whole := min(keys & _WHOLE, default=None):
            others = sorted(k for k in keys - {whole} if not k.startswith("x-"))
            if others and not (others == ["type"] and whole in ("enum", "const") and _typed(node, whole)):
                raise self._fault(f"{place}.{others[0]}", f"cannot be enforced beside {whole!r}; leave it out")
            self._whole(whole, node[whole], f"{place}.{whole}")
        else:
            self._plain(node, keys, place)
        for part, where in self._parts(node, place):
            self.schema(part, where, depth + 1)
        if "oneOf" in node:
            self._tell_apart(node)

    def _parts(self, node: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
        """The schemas within a schema, each with its path."""
        for key in filter(node.__contains__, LISTED):
            if not isinstance(node[key], list) or not (node[key] or key == "prefixItems"):
                raise self._fault(f"{place}.{key}", "must be a list of schemas")
            yield from ((part, f"{place}.{key}[{i}]") for i, part in enumerate(node[key]))
        for key in filter(node.__contains__, NAMED):
            if not isinstance(node[key], dict):
                raise self._fault(f"{place}.{key}", "must be an object of schemas")
            parts = list(node[key].items())  # a copy: a reference may lead here and change it
            yield from ((part, f"{place}.{key}.{name[:64]}") for name, part in parts)
        for key in filter(node.__contains__, SINGLE):
            if key == "propertyNames" or node[key] not in (None, False):
                yield node[key], f"{place}.{key}"

    def _whole(self, key: str, value: Any, place: str) -> None:
        if key == "$ref":
            # A reference must lead to a schema in the same document; nothing is fetched.
            if not re.fullmatch("#(/[^~%]*)?", str(value)) or target(self._root, value) is None:
                raise self._fault(place, "must begin with '#/', and lead to a schema in the same document")
        elif key == "enum":
            if not isinstance(value, list) or not value:
                raise self._fault(place, "must be a list of at least one value")
            self._num_values += len(value)
            if self._num_values > limits.MAX_ENUM:
                raise self._fault(place, f"has too many values: at most {limits.MAX_ENUM} in all")
        elif key == "allOf" and isinstance(value, list) and len(value) > 1:
            raise self._fault(place, "of several schemas cannot be enforced; write them as one")
        if key in ("enum", "const") and not _exact(value):
            raise self._fault(place, _TOO_LARGE)

    def _tell_apart(self, node: dict[str, Any]) -> None:
        """Turn oneOf into anyOf if types or a discriminator tell the forms apart.

        The library sees types of the plainest forms only, and does not look behind references. A discriminator's
        property becomes required: pydantic does not require it if it has a default, but refuses texts without it.
        """
        told = node.get("discriminator")
        name = told.get("propertyName") if isinstance(told, dict) else None
        forms = [target(self._root, f["$ref"]) if isinstance(f, dict) and "$ref" in f else f for f in node["oneOf"]]
        tags, kinds = [_texts(form, name) for form in forms], list(map(_kinds, forms))
        if all(kinds) and len(set().union(*kinds)) == sum(map(len, kinds)):
            node["anyOf"] = node.pop("oneOf")
            self.changed = True
        elif all(tags) and len(set().union(*tags)) == sum(map(len, tags)):
            for form in forms:
                required = form.setdefault("required", [])
                if isinstance(required, list) and name not in required:
                    required.append(name)
            node["anyOf"] = node.pop("oneOf")
            self.changed = True

    def _plain(self, node: dict[str, Any], keys: set[str], place: str) -> None:
        types = node.get("type", [])
        types = [types] if isinstance(types, str) else types
        if not _are_types(types) or ("type" in node and not types):
            raise self._fault(f"{place}.type", f"must be of {', '.join(sorted(TYPES))}")
        for group, needed in ((_OF_STRINGS, "string"), (_OF_NUMBERS, "number")):
            if keys & group and not types:
                raise self._fault(f"{place}.{min(keys & group)}", f"needs 'type': {needed!r} beside it")
        for key in keys & _COUNTS:  # JSON Schema takes 5.0 for 5, the compiler does not
            if isinstance(node[key], float) and node[key].is_integer():
                node[key], self.changed = int(node[key]), True
        for key in keys & _OF_NUMBERS if "integer" in types else ():
            if isinstance(node[key], int | float) and not -(2**63) <= node[key] < 2**63:
                raise self._fault(f"{place}.{key}", _TOO_LARGE)
        self._string(node, place)
        self._object(node, place)

    def _string(self, node: dict[str, Any], place: str) -> None:
        known = node["format"] if isinstance(node.get("format"), str) else ""
        idle = {"format"} if known in _ANY else set()
        if known in FORMATS and node.get("minLength", 1) == 1 and node.get("maxLength", _LONG) in range(_LONG, 2**31):
            idle = {"minLength", "maxLength"}  # pydantic writes these for URLs
        for key in idle & node.keys():
            del node[key]
            self.changed = True
        forms = [key for key in ("pattern", "format", "minLength", "maxLength") if key in node]
        if len(forms) > 1 and forms[0] in ("pattern", "format"):
            raise self._fault(f"{place}.{forms[1]}", f"cannot be enforced beside {forms[0]!r}; leave it out")
        if "format" in node and not (isinstance(node["format"], str) and node["format"] in FORMATS):
            raise self._fault(f"{place}.format", f"must be one of {', '.join(sorted(FORMATS))}")
        if "pattern" in node:
            self._num_patterns += 1
            if self._num_patterns > limits.MAX_PATTERNS:
                raise self._fault(f"{place}.pattern", f"is one too many: at most {limits.MAX_PATTERNS}")
            check_text(node["pattern"], self._name, "pattern", limits.MAX_REGEX)
            if any(_UNSAFE.search(part) for part in _PART.findall(node["pattern"]) if part[:2] != "[^"):
                raise self._fault(f"{place}.pattern", "may hold no quote, backslash or control character of its own")
            try:
                whole = whole_match(node["pattern"])
            except ValueError as error:
                raise self._fault(f"{place}.pattern", str(error)) from None
            node["pattern"], self.changed = whole, True

    def _object(self, node: dict[str, Any], place: str) -> None:
        properties, required = node.get("properties", {}), node.get("required", [])
        if not isinstance(required, list) or any(not isinstance(k, str) for k in required):
            raise self._fault(f"{place}.required", "must be a list of names")
        if isinstance(properties, dict) and any(name not in properties for name in required):
            raise self._fault(f"{place}.required", "names a property that 'properties' lacks")
        if "propertyNames" in node:
            if properties or isinstance(node.get("additionalProperties"), dict):
                raise self._fault(f"{place}.propertyNames", "cannot be enforced beside schemas of properties")
            if isinstance(node["propertyNames"], dict):
                node["propertyNames"].setdefault("type", "string")

    def _fault(self, place: str, message: str) -> ApiError:
        return bad_request(f"{self._name}: {place[:200]} {message}", self._name, "invalid_schema")


_PART = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\(\?(?:<?[=!]|:|P?<\w+>)?|.", re.DOTALL)
_AROUND = '[^"]*'  # any characters that need no escape in JSON
# What may match a character that a JSON string must escape, which the grammar would write unescaped.
_UNSAFE = re.compile(r'\\["\\nrtfv0xuc]|["\x00-\x1f]')


def whole_match(pattern: str) -> str:
    """A pattern that matches whole texts, from one of JSON Schema, which matches a part unless `^` and `$` anchor it.

    Raises ValueError for what no grammar can follow: assertions, and anchors within an alternative.
    """
    parts = [re.sub(r"^\(\?P<", "(?<", part) for part in _PART.findall(pattern)]  # Python's names of groups
    for at, part in enumerate(parts):
        if parts[at : at + 2] == [")", "?"]:  # as (...|): xgrammar's (...)? may also begin within the group
            parts[at : at + 2] = ["|", ")"]
        if part[:2] == "(?" and part[-1] in "=!":
            raise ValueError("may hold no lookahead or lookbehind")
        if part in ("\\b", "\\B", "[") or re.fullmatch(r"\\[1-9k]", part):
            raise ValueError("may hold no word boundary, no reference to a group, and no '[' that nothing closes")
    return _alternatives(parts, False, False)


def _alternatives(parts: list[str], begins: bool, ends: bool) -> str:
    """The alternatives of a pattern or a group, each made to match whole texts; are both sides anchored already?"""
    made: list[list[str]] = [[]]
    depth = 0
    for part in parts:
        depth += (part[0] == "(") - (part == ")")
        if part == "|" and not depth:
            made.append([])
        else:
            made[-1].append(part)
    return "|".join(_alternative(one, begins, ends) for one in made)


def _alternative(parts: list[str], begins: bool, ends: bool) -> str:
    while parts[:1] == ["^"]:
        parts, begins = parts[1:], True
    while parts[-1:] == ["$"]:
        parts, ends = parts[:-1], True
    depths = list(accumulate((part[0] == "(") - (part == ")") for part in parts))
    if len(parts) > 1 and parts[0] in ("(", "(?:") and parts[-1] == ")" and 0 not in depths[:-1]:  # one group
        return f"(?:{_alternatives(parts[1:-1], begins, ends)})"
    if "^" in parts or "$" in parts:
        raise ValueError("may have ^ and $ only at the ends of its alternatives")
    return ("" if begins else _AROUND) + "".join(parts) + ("" if ends else _AROUND)


def check_text(text: Any, name: str, what: str, most: int) -> str:
    """Check a regular expression or a grammar (`what`) of at most `most` characters. Raises ApiError 400."""
    if not isinstance(text, str) or len(text) > most:
        raise bad_request(f"{name}: a {what} is a text of at most {most} characters", name)
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}" and depth > 0)
        if depth > limits.MAX_NESTING:
            raise bad_request(f"{name}: at most {limits.MAX_NESTING} brackets within each other", name)
    return text


def _texts(form: Any, name: Any) -> set[str]:
    """The texts that property `name` may have in an object of this schema; empty if they are not listed."""
    properties = form.get("properties") if isinstance(form, dict) and form.get("type") == "object" else None
    part = properties.get(name) if isinstance(properties, dict) and isinstance(name, str) else None
    values = part.get("enum", [part.get("const")]) if isinstance(part, dict) else None
    return set(values) if isinstance(values, list) and all(isinstance(v, str) for v in values) else set()


def _kinds(form: Any) -> set[str]:
    """The types of a schema's values, without "integer", which is a number; empty if it does not say."""
    said = form.get("type", []) if isinstance(form, dict) else []
    return {"number" if kind == "integer" else kind for kind in ([said] if isinstance(said, str) else said)}


def _exact(value: Any) -> bool:
    """Whether the compiler keeps a value's whole numbers: beyond 64 bits it takes the nearest float."""
    if isinstance(value, dict | list):
        return all(map(_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _are_types(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(t, str) and t in TYPES for t in value)


def _typed(node: dict[str, Any], key: str) -> bool:
    """Whether the values of "enum" or "const" are of the schema's type."""
    values = node["enum"] if key == "enum" else [node["const"]]
    types = [node["type"]] if isinstance(node["type"], str) else node["type"]
    if not _are_types(types) or not isinstance(values, list):
        return False
    wanted = {*types, *(("integer",) if "number" in types else ())}
    return all(KINDS[type(v)] in wanted for v in values)
