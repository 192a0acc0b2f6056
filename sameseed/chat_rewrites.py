"""Conversations rewritten for chat templates that refuse them, or drop a part of them without a word.

A template is asked on a small conversation of the same kind, with marks in it. A rewrite is used only if marks are
missing from its text (or it refuses), and all are there once the small conversation is rewritten too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence as Seq
from functools import partial
from itertools import groupby, takewhile
from typing import Any, NamedTuple

Messages = Seq[Mapping[str, Any]]

MARK = re.compile(r"mark\d+")
SYSTEM = ("system", "developer")  # roles that give instructions
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, as in transformers
OF_TOOLS = ("tool", "function")  # roles that give the result of a call


class Rewrite(NamedTuple):
    """`apply` rewrites messages, or returns them unchanged; `example` makes a small conversation of their kind."""

    apply: Callable[[Messages], Messages]
    example: Callable[[Messages], Messages]


def rewrites_for(source: str) -> list[Rewrite]:
    """What may be done for a template, in this order."""
    form = next((form for sign, form in _FORMS.items() if sign in source), None)
    return [
        Rewrite(_one_instruction, _outline),
        Rewrite(_short_ids, _with_long_id),
        Rewrite(_one_call_each, lambda messages: _EXAMPLE_OF_TWO),
        Rewrite(_text_in_reasoning, lambda messages: _EXAMPLE_OF_BOTH),
        *([Rewrite(partial(_calls_in_text, form), lambda messages: _EXAMPLE_OF_ONE)] if form else []),
    ]


def _one_instruction(messages: Messages) -> Messages:
    """All instructions as one message at the beginning, since many templates read only the first message as such."""
    instructions = [m for m in messages if m["role"] in SYSTEM]
    if instructions in ([], list(messages[:1])):
        return messages
    text = "\n\n".join(filter(None, map(_text, instructions)))
    return [{**instructions[0], "content": text}, *(m for m in messages if m["role"] not in SYSTEM)]


def _outline(messages: Messages) -> Messages:
    """Where the instructions stand: between them the roles that a run of questions and answers begins and ends with."""
    spoken = (m["role"] for m in messages if m["role"] not in OF_TOOLS and not _calls(m))
    roles: list[str] = []
    for instructs, run in groupby(spoken, lambda role: role in SYSTEM):
        whole = list(run)
        roles += whole if instructs else list(dict.fromkeys((whole[0], whole[-1])))
    return [{"role": r, "content": f"mark{n}" if r in SYSTEM else "x"} for n, r in enumerate(roles)]


def _short_ids(messages: Messages) -> Messages:
    """The ids of calls as nine letters and digits: Mistral's templates refuse others."""
    short = {i: hashlib.sha256(i.encode()).hexdigest()[:9] for i in _long_ids(messages)}
    if not short:
        return messages

    def renamed(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        known = fields.get(name)
        return {**fields, name: short[known]} if isinstance(known, str) and known in short else fields

    made = [renamed(message, "tool_call_id") for message in messages]
    return [{**m, "tool_calls": [renamed(c, "id") for c in calls]} if (calls := _calls(m)) else m for m in made]


def _long_ids(messages: Messages) -> list[str]:
    """The ids of calls that are not nine letters and digits."""
    ids = [call.get("id") for m in messages for call in _calls(m)] + [m.get("tool_call_id") for m in messages]
    return [i for i in ids if isinstance(i, str) and not re.fullmatch("[A-Za-z0-9]{9}", i)]


def _with_long_id(messages: Messages) -> Messages:
    """A call whose id is as long as the first of those: some templates take the last nine characters."""
    size = len(_long_ids(messages)[0])
    identifier = ("call_" + "0" * size)[:size]
    return [_QUESTION, _answer([{**_CALLS[0], "id": identifier}]), {**_RESULTS[0], "tool_call_id": identifier}]


def _one_call_each(messages: Messages) -> Messages:
    """Several calls of an answer as answers of their own, each before its results.

    gpt-oss's template drops all but the first call, and those of Llama 3 refuse them.
    """
    made: list[Mapping[str, Any]] = []
    at = 0
    while at < len(messages):
        answer, at = messages[at], at + 1
        calls = _calls(answer)
        if len(calls) < 2:
            made.append(answer)
            continue
        ids, of_call = [call.get("id") for call in calls], [list[Mapping[str, Any]]() for _ in calls]
        for number, result in enumerate(takewhile(lambda m: m["role"] in OF_TOOLS, messages[at:])):
            known = result.get("tool_call_id")  # a result belongs to the call with its id, or else in turn
            of_call[ids.index(known) if ids.count(known) == 1 else min(number, len(ids) - 1)].append(result)
        at += sum(map(len, of_call))
        for number, (call, results) in enumerate(zip(calls, of_call)):
            made += [{**answer, "tool_calls": [call]} if number == 0 else _answer([call]), *results]
    return made if len(made) > len(messages) else messages


def _text_in_reasoning(messages: Messages) -> Messages:
    """The text beside a call as the end of the reasoning: gpt-oss's template takes one of both, and reads it so."""
    made = []
    for message in messages:
        name = next((name for name in REASONING if message.get(name) is not None), "")
        if message.get(name) and _calls(message) and (text := _text(message)):
            message = {**message, "content": "", name: f"{message[name]}\n{text}"}
        made.append(message)
    return made


class _Form(NamedTuple):
    """How a model writes a list of calls: what stands around it, and one call by its name and arguments."""

    begin: str
    end: str
    call: Callable[[str, Mapping[str, Any]], str]


def _calls_in_text(form: _Form, messages: Messages) -> Messages:
    """The calls as the model wrote them, in the text: templates that know results of tools may know no calls."""
    made = []
    for message in messages:
        if calls := _calls(message):
            functions = (_boxed(opened(call))["function"] for call in calls)
            written = ", ".join(form.call(function["name"], function["arguments"]) for function in functions)
            message = {**message, "content": f"{_text(message)}{form.begin}{written}{form.end}"}
        made.append(message)
    return made


def _as_json(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, default=str)


def _as_python(name: str, arguments: Mapping[str, Any]) -> str:
    spelled = {k: json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v) for k, v in arguments.items()}
    return f"{name}({', '.join(f'{key}={value}' for key, value in spelled.items())})"


_FORMS = {  # by what a template shows
    "<|tool_call|>": _Form("<|tool_call|>[", "]", _as_json),  # Granite 3
    "List of tools: ": _Form("<|tool_call_start|>[", "]<|tool_call_end|>", _as_python),  # LFM2
}


def opened(call: Any) -> Any:
    """A tool call with its arguments as templates take them: an object, where they are the JSON text of one, or ""."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (LookupError, TypeError, ValueError, RecursionError):  # a model may have written anything
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}} if isinstance(arguments, dict) else call


def boxed(message: dict[str, Any]) -> dict[str, Any]:
    """A message with objects as the arguments of its calls; a text, such as one that was cut off, is put into one."""
    calls = _calls(message)
    if all(isinstance(call["function"].get("arguments"), Mapping) for call in calls):
        return message
    return {**message, "tool_calls": list(map(_boxed, calls))}


def _boxed(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = call["function"].get("arguments") or {}
    whole = arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
    return {**call, "function": {**call["function"], "arguments": whole}}


def _calls(message: Mapping[str, Any]) -> list[Any]:
    """The calls of a message; none unless all have the form of OpenAI's API."""
    calls = message.get("tool_calls")
    whole = isinstance(calls, list | tuple) and all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) and "name" in call["function"]
        for call in calls
    )
    return list(calls) if whole and calls else []


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _answer(calls: Seq[Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields, "tool_calls": list(calls)}


TOOL = {
    "type": "function",
    "function": {"name": "x", "description": "x", "parameters": {"type": "object", "properties": {}}},
}
_QUESTION = {"role": "user", "content": "x"}
_CALLS = [
    {"id": f"abcdefgh{n}", "type": "function", "function": {"name": f"mark{n}", "arguments": "{}"}} for n in (1, 2)
]
_RESULTS = [{"role": "tool", "tool_call_id": call["id"], "content": f"mark{n}"} for n, call in enumerate(_CALLS, 3)]
_EXAMPLE_OF_ONE: Messages = [_QUESTION, _answer(_CALLS[:1]), _RESULTS[0]]
_EXAMPLE_OF_TWO: Messages = [_QUESTION, _answer(_CALLS), *_RESULTS]
_EXAMPLE_OF_BOTH: Messages = [
    _QUESTION, _answer(_CALLS[:1], content="mark5", reasoning_content="mark6"), _RESULTS[0]
]  # fmt: skip
