"""Checks JSON schemas from requests: limits their size, and refuses what the grammar compiler would silently ignore."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import accumulate
from typing import Any

from sameseed.server import limits
from sameseed.server.errors import ApiError, bad_request
from sameseed.server.unions import TYPES, Unions, are_apart, are_texts, enumerated, listed_values, target, telling

# Keywords by the type that they apply to. Beside those of strings and numbers a schema must state its type, or the
# grammar compiler would ignore them.
_OF_STRINGS = {"minLength", "maxLength", "pattern", "format"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_ARRAYS = {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"}
_OF_OBJECTS = {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
_OF_OBJECTS |= {"unevaluatedProperties", "patternProperties"}
# Types that hold others: their keywords, the one that lists members, the one for their least number, and those for all
# others. If the schema says nothing of its members, the grammar compiler may take it to be empty.
_OTHERS = {"patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties"}
_HOLDERS = (
    ("object", _OF_OBJECTS, "properties", "minProperties", _OTHERS),
    ("array", _OF_ARRAYS, "prefixItems", "minItems", {"items", "unevaluatedItems"}),
)
_WHOLE = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}  # other keywords cannot be enforced beside one
# May stand beside listed values, if all of these keep them.
_FULFILLED = {"type", "minLength", "maxLength", "minimum", "maximum"}
# Keywords whose value is a schema, a list of schemas, or an object of schemas by name.
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("$defs", "properties", "patternProperties")
KNOWN = {"type"} | _OF_STRINGS | _OF_NUMBERS | _OF_ARRAYS | _OF_OBJECTS | _WHOLE
# Non-standard keywords that pydantic writes beside anyOf, for the bounds of a union of numbers.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_ANY = {"binary", "password", "path", "file-path", "directory-path"}  # formats that every string has
_LONG = 1024  # characters: no text of a format is that long
_NO_LIMIT = range(_LONG, 2**31)
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_TOO_LARGE = "holds a whole number of more than 64 bits, which cannot be enforced"
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def check(schema: Any, name: str, character: str = "") -> str:
    """Check a schema; returns it as text in the compiler's form. Raises ApiError 400 that names the keyword.

    `name`: the request field that holds the schema, which stays as it is. `character`: a pattern of one character of a
    string, for styles of JSON in which the compiler knows no lengths: they are written as patterns.
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
    return _ENCODER.encode(_SchemaWriter(json.loads(text), name, character).whole())


def matches(value: Any, schema: Any) -> bool:
    """Whether a value matches a schema (`jsonschema`). One with patterns is never matched: they could take forever."""
    from jsonschema import Draft202012Validator, exceptions  # late: many servers never need it
    from referencing import Registry

    with suppress(exceptions.UnknownType, TypeError):  # the schema is none
        checker = Draft202012Validator(schema, registry=Registry())  # one that fetches nothing
        return '"pattern' not in _ENCODER.encode(schema) and bool(checker.is_valid(value))
    return False


class _SchemaWriter:
    """Writes a schema anew, without annotations. What its references lead to comes into `$defs` of the new one."""

    def __init__(self, root: dict[str, Any], name: str, character: str) -> None:
        self._root, self._name, self._character, self._unions = root, name, character, Unions(root)
        self._num_nodes = self._num_values = self._num_patterns = self._num_characters = 0
        self._places: dict[int, str] = {id(root): "#"}  # where references lead in the new schema, by id of their target
        self._open = set[int]()  # ids of the schemas that are being written
        self._defs: dict[str, Any] = {}
        self._waiting = list[tuple[str, Any, str]]()  # name in `$defs`, schema and place of what is still to write
        self._one_of = list[tuple[dict[str, Any], Any]]()  # unions, each with its discriminator
        # Schemas without a type, which the compiler takes as of one. It is written at the end: until then, what other
        # schemas are told apart from is all that they match.
        self._untyped = list[tuple[dict[str, Any], str]]()

    def whole(self) -> dict[str, Any]:
        made: dict[str, Any] = self._schema(self._root, "schema", 0)
        while self._waiting:
            name, node, place = self._waiting.pop(0)
            self._defs[name] = self._schema(node, place, 0)
        made |= {"$defs": self._defs} if self._defs else {}
        unions = Unions(made)
        for node, discriminator in self._one_of:
            _tell_apart(unions, node, discriminator)
        for node, kind in self._untyped:
            node["type"] = kind
        return made

    def _schema(self, node: Any, place: str, depth: int) -> Any:
        """Write a schema and the schemas within it. `place`: its path, for errors."""
        self._num_nodes += 1
        if self._num_nodes > limits.MAX_SCHEMA_NODES or depth > limits.MAX_SCHEMA_DEPTH:
            size = f"{limits.MAX_SCHEMA_NODES} schemas within each other, {limits.MAX_SCHEMA_DEPTH} levels deep"
            raise self._fault("schema", f"is too large: at most {size}")
        if node is True:
            return True
        if not isinstance(node, dict):
            raise self._fault(place, "must be an object; nothing matches false")
        if id(node) in self._open:  # merged schemas may hold themselves
            return {"$ref": self._place(node, place)}
        self._open.add(id(node))
        made = telling(node)
        _modernize(made)
        for key in ("anyOf", "oneOf", "allOf"):
            if "type" in made and isinstance(made.get(key), list):
                self._unions.spread_type(made, key)
        self._unions.merge(made)
        _settle(made)
        # What stands beside a union is written with each of its schemas: count it as often.
        own = [
            [*v] if k in _NAMED and isinstance(v, dict) else v for k, v in made.items() if k not in (*_LISTED, *_SINGLE)
        ]
        self._num_characters += len(_ENCODER.encode(own))
        if self._num_characters > 4 * limits.MAX_GRAMMAR:
            raise self._fault(place, "makes the schema too large: it is repeated too often; make it simpler")
        if unknown := [key for key in made if key not in KNOWN]:
            raise self._fault(f"{place}.{unknown[0]}", "is a keyword that cannot be enforced; leave it out")
        if whole := min(made.keys() & _WHOLE, default=None):
            if others := sorted(made.keys() - {whole}):
                raise self._fault(f"{place}.{others[0]}", f"cannot be enforced beside {whole!r}; leave it out")
            self._whole(whole, made, f"{place}.{whole}")
        else:
            self._plain(made, place)
        self._parts(made, place, depth + 1)
        if "oneOf" in made:
            self._one_of.append((made, node.get("discriminator")))
        self._open.remove(id(node))
        return made

    def _parts(self, node: dict[str, Any], place: str, depth: int) -> None:
        for key in filter(node.__contains__, _LISTED):
            if not isinstance(node[key], list) or not (node[key] or key == "prefixItems"):
                raise self._fault(f"{place}.{key}", "must be a list of schemas")
            node[key] = [self._schema(part, f"{place}.{key}[{i}]", depth) for i, part in enumerate(node[key])]
        for key in filter(node.__contains__, _NAMED):
            if not isinstance(node[key], dict):
                raise self._fault(f"{place}.{key}", "must be an object of schemas")
            parts = node[key].items()
            node[key] = {name: self._schema(part, f"{place}.{key}.{name[:64]}", depth) for name, part in parts}
        for key in filter(node.__contains__, _SINGLE):
            if key == "propertyNames" or node[key] not in (None, False):
                node[key] = self._schema(node[key], f"{place}.{key}", depth)

    def _reference(self, reference: Any, place: str) -> str:
        """A reference to the same schema in the new one. It must lead to the same document; nothing is fetched."""
        found = target(self._root, reference)
        if found is None:
            raise self._fault(place, "must begin with '#/', and lead to a schema in the same document")
        return self._place(found, reference)

    def _place(self, node: dict[str, Any], place: str) -> str:
        """Where a schema stands in the new one; it is still to be written there."""
        if id(node) not in self._places:
            name = re.sub(r"\W", "_", place.rpartition("/")[2])
            while name in self._defs:
                name += "_"
            self._defs[name] = None
            self._places[id(node)] = f"#/$defs/{name}"
            self._waiting.append((name, node, place))
        return self._places[id(node)]

    def _whole(self, key: str, node: dict[str, Any], place: str) -> None:
        value = node[key]
        if key == "$ref":
            node[key] = self._reference(value, place)
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

    def _plain(self, node: dict[str, Any], place: str) -> None:
        keys, types = {*node}, node.get("type", [])
        types = [types] if isinstance(types, str) else types
        if not (are_texts(types) and {*types} <= TYPES) or ("type" in node and not types):
            raise self._fault(f"{place}.type", f"must be of {', '.join(sorted(TYPES))}")
        for group, needed in ((_OF_STRINGS, "string"), (_OF_NUMBERS, "number")):
            if keys & group and not types:
                raise self._fault(f"{place}.{min(keys & group)}", f"needs 'type': {needed!r} beside it")
        for key in keys & _COUNTS:  # JSON Schema takes 5.0 for 5, the compiler does not
            if isinstance(node[key], float) and node[key].is_integer():
                node[key] = int(node[key])
        if "number" in types and isinstance(node.get("multipleOf"), int):  # then all its values are whole
            types = [kind for kind in types if kind != "number"] + ["integer"] * ("integer" not in types)
            node["type"] = types
        for key in keys & _OF_NUMBERS if "integer" in types else ():
            if isinstance(node[key], int | float) and not -(2**63) <= node[key] < 2**63:
                raise self._fault(f"{place}.{key}", _TOO_LARGE)
        self._string(node, types, place)
        self._object(node, place)
        if not types and (kinds := [kind for kind, keywords, *_ in _HOLDERS if node.keys() & keywords]):
            types = kinds[:1]
            self._untyped.append((node, types[0]))
        _fill(node, types)

    def _string(self, node: dict[str, Any], types: list[str], place: str) -> None:
        known = node["format"] if isinstance(node.get("format"), str) else ""
        idle = set[str]()
        if "string" not in types:
            idle = _OF_STRINGS
        elif "pattern" in node or known in _ANY:  # the pattern says more: by itself a format is a comment
            idle = {"format"}
        elif known in FORMATS and node.get("minLength", 1) == 1 and node.get("maxLength", _LONG) in _NO_LIMIT:
            idle = {"minLength", "maxLength"}  # pydantic writes these for URLs
        for key in idle & node.keys():
            del node[key]
        if "pattern" in node and node.keys() & {"minLength", "maxLength"}:
            _fold_lengths(node)
        forms = [key for key in ("pattern", "format", "minLength", "maxLength") if key in node]
        if len(forms) > 1 and forms[0] in ("pattern", "format"):
            raise self._fault(f"{place}.{forms[1]}", f"cannot be enforced beside {forms[0]!r}; leave it out")
        if "format" in node and known not in FORMATS:
            raise self._fault(f"{place}.format", f"must be one of {', '.join(sorted(FORMATS))}")
        if "pattern" in node:
            node["pattern"] = self._pattern(node["pattern"], f"{place}.pattern")
        elif "format" in node and known in _AS_PATTERNS:
            node["pattern"] = _AS_PATTERNS[known]
            del node["format"]
        elif self._character and any(type(node.get(key)) is int for key in ("minLength", "maxLength")):
            node["pattern"] = self._character + _take_lengths(node)

    def _pattern(self, pattern: Any, place: str) -> str:
        self._num_patterns += 1
        if self._num_patterns > limits.MAX_PATTERNS:
            raise self._fault(place, f"is one too many: at most {limits.MAX_PATTERNS}")
        check_text(pattern, self._name, "pattern", limits.MAX_REGEX)
        pattern = _CODE.sub(lambda c: re.escape(chr(int(c[1] or c[2], 16))) if c[1] or c[2] else c[0], pattern)
        if any(_UNSAFE.search(part) for part in _PART.findall(pattern) if part[:2] != "[^"):
            raise self._fault(place, "may hold no quote, backslash or control character of its own")
        try:
            return whole_match(pattern)
        except ValueError as error:
            raise self._fault(place, str(error)) from None

    def _object(self, node: dict[str, Any], place: str) -> None:
        if "patternProperties" in node:
            self._named_by_pattern(node, f"{place}.patternProperties")
        elif "propertyNames" in node:
            self._names(node, f"{place}.propertyNames")
        properties, required = node.get("properties", {}), node.get("required", [])
        if not are_texts(required):
            raise self._fault(f"{place}.required", "must be a list of names")
        missing = [name for name in required if name not in properties] if isinstance(properties, dict) else []
        if missing and not isinstance(others := node.get("additionalProperties"), dict):
            raise self._fault(f"{place}.required", "names a property that 'properties' lacks")
        if missing:
            node["properties"] = properties | dict.fromkeys(missing, others)

    def _names(self, node: dict[str, Any], place: str) -> None:
        """Write rules for names as properties or patterns, which may have schemas of their values beside them."""
        names, values = node["propertyNames"], node.get("additionalProperties", True)
        names = {} if names is True else names
        said = telling(names) if isinstance(names, dict) else {}
        if not isinstance(names, dict) or said.pop("type", "string") != "string":
            raise self._fault(place, "must be an object of type 'string'")
        _settle(said)
        listed = sorted(name for kind, name in listed_values(self._unions.plain(names)) if kind == "string")
        if not said or (values is False and not node.get("properties")):
            del node["propertyNames"]
        elif node.get("properties"):
            raise self._fault(place, "cannot be enforced beside schemas of properties")
        elif listed and said.keys() in ({"enum"}, {"const"}, {"$ref"}):
            del node["propertyNames"]
            node |= {"properties": dict.fromkeys(listed, values), "additionalProperties": False}
        elif isinstance(values, dict):
            self._string(said, ["string"], place)
            if said.keys() <= {"minLength", "maxLength"}:
                said = {"pattern": "." + _take_lengths(said)}
            if said.keys() != {"pattern"}:
                raise self._fault(place, "cannot be enforced beside schemas of properties")
            del node["propertyNames"]
            node |= {"patternProperties": {said["pattern"]: values}, "additionalProperties": False}
        else:
            node["propertyNames"] = {**names, "type": "string"}

    def _named_by_pattern(self, node: dict[str, Any], place: str) -> None:
        patterns = node["patternProperties"]
        others = _OTHERS - {"patternProperties"} | {"properties"}
        if any(node.get(key) for key in others):
            raise self._fault(place, "cannot be enforced beside other properties; leave them out")
        if not isinstance(patterns, dict) or len(patterns) != 1:
            raise self._fault(place, "must have one pattern: a name could match two")
        node["patternProperties"] = {self._pattern(key, place): value for key, value in patterns.items()}
        node["additionalProperties"] = False

    def _fault(self, place: str, message: str) -> ApiError:
        return bad_request(f"{self._name}: {place[:200]} {message}", self._name, "invalid_schema")


def _tell_apart(unions: Unions, node: dict[str, Any], discriminator: Any) -> None:
    """Turn oneOf into anyOf if nothing can match two of its schemas; the library sees that of few.

    A discriminator's property becomes required: pydantic does not require it if it has a default, but refuses texts
    without it.
    """
    name = str(discriminator.get("propertyName", "")) if isinstance(discriminator, dict) else ""
    branches = [unions.plain(form) for form in node["oneOf"]]
    if name and are_apart([unions.values(forms, name) for forms in branches]):
        for form in (form for forms in branches for form in forms):
            form["required"] = [*dict.fromkeys([*form.get("required", []), name])]
    elif not unions.exclude_each_other(node["oneOf"]):
        return
    node["anyOf"] = node.pop("oneOf")


def _modernize(node: dict[str, Any]) -> None:
    """Rewrite what older drafts of JSON Schema and OpenAPI 3.0 say in other words, and leave out what says nothing."""
    if isinstance(node.get("anyOf"), list):
        bounds = {_BOUNDS[key]: node.pop(key) for key in _BOUNDS if key in node}
        numbers = [isinstance(form, dict) and form.get("type") in ("integer", "number") for form in node["anyOf"]]
        node["anyOf"] = [bounds | form if number else form for form, number in zip(node["anyOf"], numbers, strict=True)]
    for bound in ("minimum", "maximum"):
        key = f"exclusive{bound.capitalize()}"
        if isinstance(node.get(key), bool) and node.pop(key) and bound in node:
            node[key] = node.pop(bound)
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        node |= {"items": node["additionalItems"]} if "additionalItems" in node else {}
    node.pop("additionalItems", None)  # beside a single schema of all items it says nothing
    if isinstance(node.get("nullable"), bool) and ("type" in node or not node["nullable"]):
        types = node.get("type")
        types = types if isinstance(types, list) else [types]
        if node.pop("nullable") and "null" not in types:
            node["type"] = [*types, "null"]
    values = node["enum"] if "const" in node and isinstance(node.get("enum"), list) else []
    if values and json.dumps(node["const"]) in map(json.dumps, values):
        del node["enum"]  # earlier versions of pydantic write both
    if node.get("contentEncoding") == "base64" and node.get("type") == "string" and "contentMediaType" not in node:
        node.setdefault("pattern", f"^{_BASE64}$")
    if "pattern" in node or node.get("contentEncoding") == "binary":
        for key in ("contentEncoding", "contentMediaType"):
            node.pop(key, None)
    for key in node.keys() & {"items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"}:
        node[key] = node[key] if not _is_never(node[key]) else False
    for key in node.keys() & {"anyOf", "oneOf"}:
        if isinstance(node[key], list):
            node[key] = [part for part in node[key] if not _is_never(part)] or node[key]
    if isinstance(node.get("prefixItems"), list):  # the library takes no true there
        node["prefixItems"] = [{} if part is True else part for part in node["prefixItems"]]


def _settle(node: dict[str, Any]) -> None:
    """Leave out what all listed values fulfil."""
    if (values := enumerated(node)) is None:
        return
    node.pop("format", None)  # beside values it is a comment
    for key in node.keys() & _FULFILLED:
        if matches(values, {"items": {key: node[key]}}):
            del node[key]


def _is_never(part: Any) -> bool:
    """Whether nothing matches a schema: false, in the words of zod and Go too."""
    return part is False or (isinstance(part, dict) and part.keys() == {"not"} and part["not"] in ({}, True))


def _fill(node: dict[str, Any], types: list[str]) -> None:
    """Say that arrays and objects may hold anything, where the schema says nothing of it."""
    for kind, _, listed, least, others in _HOLDERS:
        part, number = node.get(listed), node.get(least)
        is_short = isinstance(part, dict | list) and isinstance(number, int) and len(part) < number
        if kind in types and not node.keys() & others and (part is None or is_short):
            node["additionalProperties" if kind == "object" else "items"] = True


_PART = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\(\?(?:<?[=!]|:|P?<\w+>)?|.", re.DOTALL)
_AROUND = '[^"]*'  # any characters that need no escape in JSON
# What may match a character that a JSON string must escape, which the grammar would write unescaped.
_UNSAFE = re.compile(r'\\["\\nrtfv0xuc]|["\x00-\x1f]')
_CODE = re.compile(r"\\(?:u(?![dD][89a-fA-F])([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[^ux])")  # of a character, or no code


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


_ONE = r"\[\^?(?:\\.|[^\]\\])+\]|\\[dDwWsS]|[^\\()\[\]{}^$*+?|]"  # a part of a pattern that matches one character
_REPEATED = re.compile(rf"\^({_ONE})([*+])\$")
_NOT_EMPTY = re.compile(rf"\^?(?:{_ONE}|\\.)(?![*?]|\{{[0,])")


def _fold_lengths(node: dict[str, Any]) -> None:
    """Write lengths into the pattern beside them, if it repeats one set of characters; leave out what it implies."""
    pattern, least = str(node["pattern"]), node.get("minLength", 0)
    if repeated := _REPEATED.fullmatch(pattern):
        if repeated[2] == "+" and least == 0:
            node["minLength"] = 1
        node["pattern"] = f"^{repeated[1]}{_take_lengths(node)}$"
    elif least == 1 and _NOT_EMPTY.match(pattern) and "|" not in pattern:
        del node["minLength"]


def _take_lengths(node: dict[str, Any]) -> str:
    """The lengths of a schema, which loses them, as how often a pattern repeats a character."""
    return f"{{{node.pop('minLength', 0)},{node.pop('maxLength', '')}}}"


_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
_DAY = r"\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_DATE = f"({_DAY}|{_LEAP})"
_HOUR = r"([01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_HOUR}:[0-5]\d(\.\d+|)(Z|[+-]{_HOUR})"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]\d|\d)"
_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-%s{_HEX}{{3}}-%s{_HEX}{{3}}-{_HEX}{{12}}"
_BASE64 = "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=|)"
# Formats as patterns of whole texts: the library's own allow days that no month has, and zeros before numbers.
_AS_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}"}
_AS_PATTERNS |= {"byte": _BASE64, "base64": _BASE64, "base64url": _BASE64.replace("+/", "_-")}
_AS_PATTERNS |= {"uuid": _UUID % (_HEX, _HEX)}
_AS_PATTERNS |= {f"uuid{version}": _UUID % (version, "[89abAB]") for version in range(1, 9)}
# Not those of JSON pointers: they would allow control characters.
FORMATS = {"duration", "email", "hostname", "ipv6", "uri", "uri-reference", "uri-template", *_AS_PATTERNS}


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


def _exact(value: Any) -> bool:
    """Whether the compiler keeps a value's whole numbers: beyond 64 bits it takes the nearest float."""
    if isinstance(value, dict | list):
        return all(map(_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63
