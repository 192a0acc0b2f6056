"""References, unions and intersections in JSON schemas, written so that the grammar compiler follows them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sameseed.server import limits

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
KINDS |= {list: "array", dict: "object"}
TYPES = {*KINDS.values()}
ANNOTATIONS = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
ANNOTATIONS |= {"$comment", "$schema", "$id", "$defs", "definitions", "discriminator", "externalDocs", "xml"}
_APART = TYPES - {"integer"}  # types that share no value
_MERGED = {"type", "properties", "required", "additionalProperties"}
_TYPED = {"type", "nullable", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}  # keywords that decide a value's type
_ESCAPED = re.compile("(?:%[0-9A-Fa-f]{2})+")
_REFERENCE = re.compile(r"#(/([^~%]|~[01]|%[0-9A-Fa-f]{2})*)?")
Value = tuple[str, Any]  # a value and its type: to Python, 1 equals true


def target(root: Any, reference: Any) -> Any:
    """The schema that a reference like "#/$defs/Place" leads to in its document; None if there is none."""
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
        return None
    for part in reference.split("/")[1:]:
        key = _ESCAPED.sub(lambda found: bytes.fromhex(found[0].replace("%", "")).decode("utf-8", "replace"), part)
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = root[int(key)] if re.fullmatch("[0-9]{1,4}", key) and int(key) < len(root) else None
        else:
            root = root.get(key) if isinstance(root, dict) else None
    return root if isinstance(root, dict) else None


class Unions:
    """The references and unions of one document.

    It looks at a limited number of schemas; then nothing is merged or told apart any more.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_left = 4 * limits.MAX_SCHEMA_NODES

    def merge(self, node: dict[str, Any]) -> None:
        """Write schemas of objects that must match together as one: those of `allOf`, behind `$ref`, beside a union.

        They stay as they are if they are of something else, or disagree about a property.
        """
        both = node.get("allOf")
        if isinstance(both, list):
            node["allOf"] = both = [form for form in both if not _says_nothing(form)] or both[:1]
        key = next((key for key in ("anyOf", "oneOf") if isinstance(node.get(key), list)), "")
        rest = {k: v for k, v in node.items() if k != key}
        is_alone = len(rest) + bool(key) < 2 and not (isinstance(both, list) and len(both) > 1)
        if is_alone or not (key or rest.keys() & {"$ref", "allOf"}):
            return
        is_closed = rest.pop("unevaluatedProperties", None) is False  # it sees the properties of all schemas
        made = [self._merged([rest, form], is_closed) for form in node.get(key, [{}])]
        if None not in made:
            for name in node.keys() & {*_MERGED, "unevaluatedProperties", "$ref", "allOf"}:
                del node[name]
            node |= {key: made} if key else made[0] or {}

    def _merged(self, forms: list[Any], is_closed: bool) -> dict[str, Any] | None:
        """One schema for objects that match all of these; None if there is none that is plain."""
        properties, required = dict[str, Any](), dict[str, None]()
        closed, seen, is_typed = list[set[str]](), set[int](), False
        for part in (part for form in forms for part in self._all_of(form, seen)):
            own, names = part.get("properties", {}), part.get("required", [])
            others = part.get("additionalProperties", True)
            if part.keys() - _MERGED or part.get("type", "object") != "object" or not isinstance(own, dict):
                return None
            if not are_texts(names) or not isinstance(others, bool):
                return None
            self._num_left -= len(own) + len(names) + 100 * len(own.keys() & properties.keys())  # these are compared
            if self._num_left < 0 or not all(_are_equal(properties.get(k, own[k]), own[k]) for k in own):
                return None
            properties |= own
            required |= dict.fromkeys(names)
            is_typed = is_typed or "type" in part
            closed += [set(own)] if others is False else []
        if any(properties.keys() - names for names in closed):
            return None
        made: dict[str, Any] = {"required": [*required], **({"type": "object"} if is_typed else {})}
        made |= {"properties": properties} if properties else {}
        return made | ({"additionalProperties": False} if is_closed or closed else {})

    def spread_type(self, node: dict[str, Any], key: str) -> None:
        """Write the type beside a union into its schemas, if it says the same there."""
        said, forms = node["type"], node[key]
        types = _allowed_types(said)
        free = [isinstance(form, dict) and not form.keys() & _TYPED for form in forms]
        others = [form for form, is_free in zip(forms, free, strict=True) if not is_free]
        if all(types_of(plain) <= types for form in others for plain in self.plain(form)) and self._num_left >= 0:
            node[key] = [{**f, "type": said} if is_free else f for f, is_free in zip(forms, free, strict=True)]
            del node["type"]

    def _all_of(self, node: Any, seen: set[int], depth: int = 0) -> Iterator[dict[str, Any]]:
        """The schemas that `allOf` and a reference bring together, without these; none twice."""
        self._num_left -= 1
        if id(node) in seen:
            return
        seen.add(id(node))
        if not isinstance(node, dict) or depth > limits.MAX_SCHEMA_DEPTH:
            yield {"$ref": None}  # nothing to merge
            return
        forms = node.get("allOf")
        for form in forms if isinstance(forms, list) else ():
            yield from self._all_of(form, seen, depth + 1)
        yield {key: value for key, value in telling(node).items() if key not in ("$ref", "allOf")}
        if "$ref" in node:
            yield from self._all_of(target(self._root, node["$ref"]), seen, depth + 1)

    def exclude_each_other(self, branches: list[Any]) -> bool:
        """Whether no value matches two of these schemas."""
        plain = [self.plain(branch) for branch in branches]
        if self._num_left < 0:
            return False
        for kind in _APART:
            rivals = [of_kind for forms in plain if (of_kind := [form for form in forms if kind in _kinds(form)])]
            listed = [{value for value in listed_values(forms) if value[0] == kind} for forms in rivals]
            if len(rivals) > 1 and not are_apart(listed) and not (kind == "object" and self._objects_are_apart(rivals)):
                return False
        return True

    def plain(self, part: Any) -> list[Any]:
        """The schemas that a schema stands for: those behind its references and in its unions, none twice."""
        found, seen, waiting = list[Any](), set[int](), [part]
        while waiting and self._num_left >= 0:
            part = waiting.pop()
            self._num_left -= 1
            if id(part) in seen:
                continue
            seen.add(id(part))
            unions = [part[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(part, dict) and key in part]
            if isinstance(part, dict) and "$ref" in part:
                waiting.append(target(self._root, part["$ref"]))
            elif unions and isinstance(unions[0], list) and (len(unions[0]) == 1 or "allOf" not in part):
                waiting += unions[0]
            else:
                found.append(part)
        return found

    def values(self, forms: list[Any], name: str) -> set[Value]:
        """The values that schemas of objects list for a property; empty if one of them allows others."""
        found = set[Value]()
        for form in forms:
            is_object = isinstance(form, dict) and form.get("type") == "object"
            values = listed_values(self.plain(form.get("properties", {}).get(name) if is_object else None))
            if not values:
                return set()
            found |= values
        return found

    def _objects_are_apart(self, rivals: list[list[Any]]) -> bool:
        """Whether the values of a property tell objects apart, or properties that each requires and no other allows."""
        if any(not isinstance(form, dict) or types_of(form) != {"object"} for forms in rivals for form in forms):
            return False
        required = [[{*form.get("required", ())} for form in forms] for forms in rivals]
        shared = set.intersection(*(names for forms in required for names in forms))
        if any(are_apart([self.values(forms, name) for forms in rivals]) for name in sorted(shared)):
            return True
        plain = [form for forms in rivals for form in forms]
        if any(form.get("additionalProperties") is not False or "patternProperties" in form for form in plain):
            return False
        allowed = [set[str]().union(*(form.get("properties", ()) for form in forms)) for forms in rivals]
        num_allowing = Counter(name for names in allowed for name in names)
        own = [{name for name in names if num_allowing[name] == 1} for names in allowed]
        told = [all(names & ours for names in forms) for forms, ours in zip(required, own, strict=True)]
        return told.count(False) < 2  # one of them needs no property of its own


def telling(node: dict[str, Any]) -> dict[str, Any]:
    """A schema without its annotations."""
    return {key: value for key, value in node.items() if key not in ANNOTATIONS and not key.startswith("x-")}


def _says_nothing(form: Any) -> bool:
    return form is True or (isinstance(form, dict) and not telling(form))


def _are_equal(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # to Python, 1 equals true


def are_texts(names: Any) -> bool:
    """Whether this is a list of texts."""
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def are_apart(sets: list[set[Any]]) -> bool:
    """Whether no set is empty and no two have a value in common."""
    return all(sets) and len(set[Any]().union(*sets)) == sum(map(len, sets))


def _kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else KINDS[type(value)]


def said_types(form: Any) -> set[str]:
    """The types that a schema names: those of the values that it lists, or its `type`; none if it has neither."""
    if (values := enumerated(form)) is not None:
        return {KINDS[type(value)] for value in values}
    said: Any = form.get("type") if isinstance(form, dict) else None
    return {said} if isinstance(said, str) else {*said} if are_texts(said) else set()


def types_of(form: Any) -> set[str]:
    """The types of a schema's values; all of them if it does not say."""
    is_nullable = isinstance(form, dict) and form.get("nullable") and enumerated(form) is None
    return (not is_nullable and said_types(form)) or TYPES


def _allowed_types(said: Any) -> set[str]:
    """The types of values that a `type` allows: an integer is a number."""
    types = said_types({"type": said})
    return types | {"integer"} if "number" in types else types


def _kinds(form: Any) -> set[str]:
    """The types of a schema's values, without "integer", which is a number."""
    return {"number" if kind == "integer" else kind for kind in types_of(form)}


def listed_values(forms: list[Any]) -> set[Value]:
    """The values that schemas list; empty if one of them allows others, or lists an array or an object."""
    listed = [enumerated(form) for form in forms]
    if any(values is None or any(isinstance(value, dict | list) for value in values) for values in listed):
        return set()
    return {(_kind(value), value) for values in listed for value in values or ()}


def enumerated(form: Any) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if not isinstance(form, dict):
        return None
    values = form.get("enum", [form["const"]] if "const" in form else None)
    return values if isinstance(values, list) else None
