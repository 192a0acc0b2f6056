"""References and unions of JSON schemas: whether the schemas of a `oneOf` exclude each other, so that it is `anyOf`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from sameseed.server import limits

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
KINDS |= {list: "array", dict: "object"}
_APART = {*KINDS.values()} - {"integer"}  # types that share no value
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
    """The unions of one document. It looks at a limited number of schemas; then nothing is told apart any more."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_left = 4 * limits.MAX_SCHEMA_NODES

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

    def plain(self, part: Any, seen: set[int] | None = None) -> list[Any]:
        """The schemas that a schema stands for: those behind its references and in its unions, none twice."""
        seen = set[int]() if seen is None else seen
        self._num_left -= 1
        if id(part) in seen or self._num_left < 0:
            return []
        seen.add(id(part))
        if isinstance(part, dict) and "$ref" in part:
            return self.plain(target(self._root, part["$ref"]), seen)
        for key in ("anyOf", "oneOf", "allOf") if isinstance(part, dict) else ():
            forms = part.get(key)
            if isinstance(forms, list) and (key != "allOf" or len(forms) == 1):
                return [plain for form in forms for plain in self.plain(form, seen)]
        return [part]

    def values(self, forms: list[Any], name: Any) -> set[Value]:
        """The values that schemas of objects list for a property; empty if one of them allows others."""
        found = set[Value]()
        for form in forms:
            properties = form.get("properties") if isinstance(form, dict) and form.get("type") == "object" else None
            part = properties.get(name) if isinstance(properties, dict) and isinstance(name, str) else None
            values = listed_values(self.plain(part))
            if not values:
                return set()
            found |= values
        return found

    def _objects_are_apart(self, rivals: list[list[Any]]) -> bool:
        """Whether the values of a property tell objects apart, or properties that each requires and no other allows."""
        if any(not isinstance(form, dict) or form.get("type") != "object" for forms in rivals for form in forms):
            return False
        required = [[_names(form, "required") for form in forms] for forms in rivals]
        shared = set.intersection(*(names for forms in required for names in forms))
        if any(are_apart([self.values(forms, name) for forms in rivals]) for name in sorted(shared)):
            return True
        if not all(form.get("additionalProperties") is False for forms in rivals for form in forms):
            return False
        allowed = [set[str]().union(*(_names(form, "properties") for form in forms)) for forms in rivals]
        num_allowing = Counter(name for names in allowed for name in names)
        own = [{name for name in names if num_allowing[name] == 1} for names in allowed]
        told = [all(names & ours for names in forms) for forms, ours in zip(required, own, strict=True)]
        return told.count(False) < 2  # one of them needs no property of its own


def are_apart(sets: list[set[Any]]) -> bool:
    """Whether no set is empty and no two have a value in common."""
    return all(sets) and len(set[Any]().union(*sets)) == sum(map(len, sets))


def _names(form: dict[str, Any], key: str) -> set[str]:
    names = form.get(key)
    return {name for name in names if isinstance(name, str)} if isinstance(names, dict | list) else set()


def _kind(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else KINDS[type(value)]


def _kinds(form: Any) -> set[str]:
    """The types of a schema's values, without "integer", which is a number."""
    if (values := _enumerated(form)) is not None:
        return set(map(_kind, values))
    said = form.get("type") if isinstance(form, dict) and not form.get("nullable") else None
    said = [said] if isinstance(said, str) else said
    if not isinstance(said, list) or not all(isinstance(kind, str) for kind in said):
        return _APART
    return {"number" if kind == "integer" else kind for kind in said}


def listed_values(forms: list[Any]) -> set[Value]:
    """The values that schemas list; empty if one of them allows others, or lists an array or an object."""
    listed = [_enumerated(form) for form in forms]
    if any(values is None or any(isinstance(value, dict | list) for value in values) for values in listed):
        return set()
    return {(_kind(value), value) for values in listed for value in values or ()}


def _enumerated(form: Any) -> list[Any] | None:
    if not isinstance(form, dict):
        return None
    values = form.get("enum", [form["const"]] if "const" in form else None)
    return values if isinstance(values, list) else None
