"""Chat templates: Jinja as transformers sets it up, in a sandbox, and messages in the form that a template takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sameseed.chat_rewrites import MARK, REASONING, TOOL, Messages, Rewrite, boxed, opened, rewrites_for
from sameseed.errors import RequestError

MAX_ADDED = 2**20  # characters that a chat template may add to a conversation
TAKES_TOOLS = re.compile(r"role\W{1,4}[!=]=\s*['\"]tool['\"]")  # a template that knows messages of tools
ANY_DAY = datetime(2026, 1, 1)  # whether a template takes a conversation does not depend on it


class ChatTemplate:
    """One compiled template. Raises RequestError, as its method does, for a template that fails."""

    def __init__(self, source: str, special: Mapping[str, Any]) -> None:
        """`special`: the tokenizer's special tokens, as variables of the template."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._lists, self._texts, self._nones = _content_forms(environment.parse(source))
        except Exception as error:  # a template comes with the weights: whatever it breaks is its fault
            raise _failed(error) from None
        self._developer = "'developer'" in source or '"developer"' in source
        self._joins = "tool_responses" in source and not TAKES_TOOLS.search(source)
        self._special, self._rewrites = special, rewrites_for(source)
        self._helps = lru_cache(64)(self._rewrite_helps)  # small conversations repeat: they show only a kind

    def render(self, messages: Seq[Any], values: Mapping[str, Any], now: datetime) -> str:
        """The text of `messages`, of at most MAX_ADDED characters beyond theirs. `values`: the other variables.

        Messages that the template refuses or drops are rewritten, where that helps: see `chat_rewrites`.
        """
        messages, tools = list(messages), bool(values.get("tools"))
        for message in messages:
            _check(message)
        for rewrite in self._rewrites:
            rewritten = rewrite.apply(messages)
            if rewritten != messages and self._helps(rewrite, json.dumps(rewrite.example(messages)), tools):
                messages = rewritten
        return self._rendered(messages, {"strftime_now": now.strftime, **values})

    def _rewrite_helps(self, rewrite: Rewrite, example: str, tools: bool) -> bool:
        """Does the template lose marks of this conversation (JSON), and none once it is rewritten?"""
        small = json.loads(example)
        return not self._shows_marks(small, tools) and self._shows_marks(rewrite.apply(small), tools)

    def _shows_marks(self, messages: Messages, tools: bool) -> bool:
        """Does the template take these messages, beside an offered tool or none, and write all their marks?"""
        values = {"documents": None, "add_generation_prompt": True, "tools": [TOOL] if tools else None}
        try:
            text = self._rendered(messages, {"strftime_now": ANY_DAY.strftime, **values, **self._special})
        except RequestError:
            return False
        return set(MARK.findall(json.dumps(messages))) <= set(MARK.findall(text))

    def _rendered(self, messages: Messages, values: Mapping[str, Any]) -> str:
        """The text of the first form of the messages that the template takes."""
        tried: list[list[dict[str, Any]]] = []
        failed: list[Exception] = []
        for form in self._forms(messages):
            if form in tried:
                continue
            tried.append(form)
            try:
                return self._text({**values, "messages": _joined(form) if self._joins else form})
            except RequestError:
                raise
            except Exception as error:  # any error of the template's own code
                failed.append(error)
        # What the template itself says with `raise_exception` helps more than how it fails on another form.
        raise _failed(next((error for error in failed if type(error) is TemplateError), failed[0]))

    def _forms(self, messages: Messages) -> Iterator[list[dict[str, Any]]]:
        """Forms of the messages, those that most templates take first.

        The arguments of calls are objects where they are the text of one; then all are as they came; at last all are
        objects. Each form is followed by the same with "" where there is no content.
        """
        given = [self._message(m, opened) for m in messages]
        as_came = [self._message(m, lambda call: call) for m in messages]
        for forms in ([given, as_came], [list(map(boxed, given))]):
            yield from forms
            yield from ([{**m, "content": m.get("content") or ""} for m in form] for form in forms)

    def _text(self, values: Mapping[str, Any]) -> str:
        most = MAX_ADDED + len(json.dumps(values["messages"], ensure_ascii=False, default=str))
        kept, size = [], 0
        for part in self._template.generate(values):
            size += len(part)
            if size > most:
                raise RequestError(f"the chat template writes more than {most} characters; use a plain prompt")
            kept.append(part)
        return "".join(kept)

    def _message(self, message: Mapping[str, Any], opener: Callable[[Any], Any]) -> dict[str, Any]:
        """The message as the template takes it; `opener` is applied to each of its calls.

        Templates that list the parts of a content get lists, the others text. As in transformers, a field that is None
        is left out; one that asks whether the content is none is told so.
        """
        made = {name: value for name, value in message.items() if value is not None}
        if isinstance(calls := made.get("tool_calls"), list | tuple):
            made["tool_calls"] = list(map(opener, calls))
        content = made.get("content")
        if isinstance(content, str):
            if self._lists and not self._texts:
                made["content"] = [{"type": "text", "text": content}]
        elif content is not None:
            parts = [{**part, "type": "text"} for part in content]
            made["content"] = parts if self._lists else "\n".join(part["text"] for part in parts)
        if made["role"] == "function" or (made["role"] == "developer" and not self._developer):
            made["role"] = {"function": "tool", "developer": "system"}[made["role"]]  # as templates call them
        if content is None and self._nones:
            made["content"] = None
        reasoning = next((made[name] for name in REASONING if name in made), None)
        return made if reasoning is None else {"thinking": reasoning, **made, "reasoning_content": reasoning}


def _check(message: Any) -> None:
    """Raise RequestError for a message without a role or content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message needs 'role' and 'content', both text, got {message!r}")
    content, kinds = message.get("content"), ("text", "input_text", "output_text")
    parts = isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and part.get("type") in kinds and isinstance(part.get("text"), str)
        for part in content
    )
    if not (isinstance(content, str) or parts or (content is None and message["role"] == "assistant")):
        raise RequestError(f"the content of a message must be text, or a list of text parts, got {message!r}")


def _joined(messages: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools as `tool_responses` of the answer that called them, which goes on with the next answer's text.

    The first templates of Gemma 4 take them so, and what an answer says beside its calls as an answer before it.
    """
    made: list[dict[str, Any]] = []
    for message in messages:
        last = made[-1] if made else message
        results, content = last.get("tool_responses", ()), message.get("content", "")
        if message["role"] == "tool" and last.get("tool_calls"):
            calls = last["tool_calls"]
            names = {call["id"]: call["function"]["name"] for call in calls if call.get("id") is not None}
            in_turn = calls[min(len(results), len(calls) - 1)]["function"]["name"]  # where calls have no ids
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            result = {"name": names.get(message.get("tool_call_id"), in_turn), "response": text}
            before = [{"role": "assistant", "content": last["content"]}] if last.get("content") else []
            made[-1:] = [*before, {**last, "content": "", "tool_responses": [*results, result]}]
        elif message["role"] == "assistant" and results and not message.get("tool_calls"):
            made[-1] = {**last, "content": content}
        else:
            made.append(message)
    return made


class Generation(Extension):
    """`{% generation %}`: marks what the model is to learn; it prints its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # Jinja only asks what it contains

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    # Jinja's own filter escapes < > & ' for HTML, which models were not trained on.
    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    extensions: list[Any] = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = tojson
    return environment


def _content_forms(tree: nodes.Template) -> tuple[bool, bool, bool]:
    """Whether a template goes through the parts of a content, and whether it asks if a content is text, or none."""
    named = {"content"} | {
        node.target.name for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, set())
    }  # fmt: skip
    lists = any(_is_content(node.iter, named) for node in tree.find_all(nodes.For))
    asked = {test.name for test in tree.find_all(nodes.Test) if _is_content(test.node, named)}
    return lists, "string" in asked, "none" in asked


def _is_content(node: nodes.Node, named: set[str]) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return (isinstance(node, nodes.Getattr) and node.attr == "content") or (
        isinstance(node, nodes.Name) and node.name in named
    )


def _failed(error: Exception) -> RequestError:
    if isinstance(error, TemplateError):
        return RequestError(f"the chat template refuses these messages: {error}")
    return RequestError(
        f"the chat template fails on these messages ({type(error).__name__}: {error}); use a plain prompt"
    )
