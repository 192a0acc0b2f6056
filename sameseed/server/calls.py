"""Calls that have to be: the grammar of tool calls in the form that the model's template teaches it."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import Any

from sameseed.server import limits, schemas
from sameseed.server.conversation import NamedTool, Tool
from sameseed.server.errors import bad_request
from sameseed.server.structured import GrammarSource
from sameseed.server.tools import CLOSE, OPEN

# How a call begins and ends, and what stands between calls, by parser.
_FORMS = {
    "qwen": (OPEN + '\n{"name": NAME, "arguments": ', "}\n" + CLOSE, "\n"),
    "llama3": ('{"name": NAME, "parameters": ', "}", "; "),
}
_ANY = {"type": "object"}


def source(tools: Seq[Tool], choice: str | NamedTool | None, several: bool, parser: str | None) -> GrammarSource | None:
    """The grammar of an answer that must call, or whose calls must match; None where the model is free.

    `several`: more than one call may come; `parser`: the form of calls. Raises ApiError 400 for a name that was not
    offered, for nothing to call, for a schema that cannot be enforced.
    """
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise bad_request(f"tool_choice names {choice.function.name!r}, which 'tools' lacks", "tool_choice")
        return _source({"stop_after_first": True, "at_least_one": True}, named[:1], parser)
    if choice == "required":
        if not tools:
            raise bad_request("tool_choice is 'required' and there are no 'tools'", "tool_choice")
        return _source({"stop_after_first": not several, "at_least_one": True}, tools, parser)
    if choice == "none" or not any(tool.function.strict for tool in tools):
        return None
    if parser == "qwen":  # free text, until a call opens
        free = {"type": "triggered_tags", "triggers": [OPEN], "at_least_one": False}
        return _source({**free, "stop_after_first": not several}, tools, parser)
    raise bad_request("this model's calls have no mark of their own: 'strict' needs tool_choice 'required'", "tools")


def _source(how: dict[str, Any], tools: Seq[Tool], parser: str | None) -> GrammarSource | None:
    if parser is None:
        return None
    begin, end, separator = _FORMS[parser]
    tags, size = [], 0
    for tool in tools:
        schema, length = _parameters(tool)
        size += length
        if size > limits.MAX_TOOL_SCHEMAS:
            raise bad_request(f"tools: their schemas may have {limits.MAX_TOOL_SCHEMAS} characters in all", "tools")
        content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
        opening = begin.replace("NAME", json.dumps(tool.function.name))
        tags.append({"type": "tag", "begin": opening, "content": content, "end": end})
    separated = {"type": "tags_with_separator", "separator": separator} if "type" not in how else {}
    made = {"type": "structural_tag", "format": {**separated, **how, "tags": tags}}
    return GrammarSource("tag", json.dumps(made, ensure_ascii=False), "tools")


def _parameters(tool: Tool) -> tuple[dict[str, Any], int]:
    """The schema of a tool's arguments, an object always, and its length as text."""
    schema = tool.function.parameters or _ANY
    if schema.get("type", "object") != "object":
        raise bad_request(f"tools: arguments of {tool.function.name!r} must be an object", "tools")
    length = len(schemas.check(schema, "tools"))
    whole = schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}
    return schema if whole else {"type": "object", **schema}, length
