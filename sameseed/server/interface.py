"""The OpenAPI document and its page /docs. Request schemas are made from the pydantic models that read the bodies.

Also the playground, a web page. Its bytes are the same for every server and user; it fetches data with an API key. Its
Content Security Policy allows only the page's own script, by hash, and connections to this server only. So text from a
model is always shown as text, whatever it contains.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sameseed.server.protocol import TOKEN
from sameseed.server.text import TextCodec

PAGE = Path(__file__).with_name("playground.html")
SUMMARY = "OpenAI's API over a speculating engine: the same text, sooner."


# These fields do the same as `response_format` and `structured_outputs`; a request may have only one of them all.
ONE_OF_THEM = ("guided_choice", "guided_json", "guided_regex", "guided_grammar")


def fitted(document: dict[str, Any], names: tuple[str, ...], text: TextCodec | None, locked: bool) -> dict[str, Any]:
    """The OpenAPI document, fitted to the served model: its names, vocabulary size, context length, and tool support.

    `locked`: requests need an API key.
    """
    made = {**document, "components": {}, "paths": _fit(document["paths"], names, text)}
    if locked:
        made["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        made["security"] = [{"key": []}]
        for path in ("/health", "/ready"):
            made["paths"][path]["get"]["security"] = []
    return made


def _fit(value: Any, names: tuple[str, ...], text: TextCodec | None) -> Any:
    toolless = text is not None and text.calls is None
    dropped = ("CallItem", "CallOutputItem") if toolless else ()  # such a model takes no calls and no results
    if isinstance(value, list):
        return [_fit(v, names, text) for v in value if not (isinstance(v, dict) and v.get("title") in dropped)]
    if not isinstance(value, dict):
        return value
    made = {k: _fit(v, names, text) for k, v in value.items() if k != "422"}  # FastAPI's own error, never sent here
    if isinstance(made.get("properties"), dict):
        made["properties"] = _fit_properties(made["properties"], names, text, toolless)
    if made.pop(TOKEN, False) and text is not None:
        made["maximum"] = text.vocab_size - 1
    return made


def _fit_properties(
    properties: dict[str, Any], names: tuple[str, ...], text: TextCodec | None, toolless: bool
) -> dict[str, Any]:
    dropped = {*ONE_OF_THEM, *(("tools", "tool_call_id", "tool_calls", "function_call") if toolless else ())}
    made = {name: schema for name, schema in properties.items() if name not in dropped}
    if "model" in made:
        made["model"] = {"enum": [*names, None], "title": "Model"}
    if toolless:
        if "tool_choice" in made:
            made["tool_choice"] = {"enum": ["none", "auto", None], "title": "Tool Choice"}
        if "enum" in made.get("role", {}):
            made["role"] = {**made["role"], "enum": [r for r in made["role"]["enum"] if r not in ("tool", "function")]}
    if text is None:
        return made
    if "logit_bias" in made:  # keys are token ids; the pattern allows ids with fewer digits than the largest id
        digits = max(1, len(str(text.vocab_size - 1)) - 1)
        keys = {"propertyNames": {"pattern": f"^[0-9]{{1,{digits}}}$"}}
        made["logit_bias"] = _extended(made["logit_bias"], "object", keys)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in made:
            made[name] = _extended(made[name], "integer", {"maximum": text.max_model_len})
    return made


def _extended(schema: dict[str, Any], kind: str, more: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "anyOf": [form | more if form.get("type") == kind else form for form in schema["anyOf"]]}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI descriptions of the error responses with these statuses."""
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    fields = {"message": text, "type": text, "param": maybe, "code": maybe}
    inner = {"error": {"type": "object", "properties": fields}, "request_id": text}
    schema = {"type": "object", "properties": inner, "required": ["error"]}
    return {s: {"description": "error", "content": {"application/json": {"schema": schema}}} for s in statuses}


def gives(names: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI description of a 200 response: a body with these members, each `name:type`, separated by spaces."""
    properties = {name: {"type": kind.split("|")} for name, _, kind in (n.partition(":") for n in names.split())}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {200: {"description": "the answer", "content": {"application/json": {"schema": schema}}}}


def described(summary: str, answer: str, *kinds: type[BaseModel], streams: bool = False) -> dict[str, Any]:
    """FastAPI's arguments for a route whose body, one of these kinds, is parsed here and not by FastAPI.

    `answer`: members of the response, in the form that `gives` takes.
    """
    schemas = [_schema(kind) for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    responses = errors(400, 401, 403, 404, 408, 413, 415, 429, 500, 503) | gives(answer)
    if streams:
        responses[200]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {"summary": summary, "openapi_extra": {"requestBody": body}, "responses": responses}


@cache
def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Its JSON schema without references; the same object each time, which nobody may change."""
    document = kind.model_json_schema()
    made: dict[str, Any] = _inlined(document, document.pop("$defs", {}))
    return made


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(s, definitions) for s in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {k: _inlined(v, definitions) for k, v in schema.items()}


def page(document: dict[str, Any]) -> str:
    """The page /docs: a table of the routes, without external resources."""
    rows = [
        f"<tr><td><code>{method.upper()}</code></td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(operation.get('summary', ''))}</td></tr>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>sameseed</title>"
        "<meta name=viewport content='width=device-width'><style>body{font-family:system-ui;margin:2em;"
        "color-scheme:light dark}td{padding:.3em 1em .3em 0}</style>"
        f"<h1>sameseed</h1><p>{html.escape(SUMMARY)} All fields: <a href=openapi.json>openapi.json</a>.</p>"
        f"<table>{''.join(rows)}</table></html>"
    )


def playground() -> tuple[bytes, dict[str, str]]:
    """The playground page, the only file that the server sends, and its HTTP headers."""
    body = PAGE.read_bytes()
    return body, secured(body)


def secured(page: bytes) -> dict[str, str]:
    """HTTP headers of a page: its Content Security Policy, no frames, nothing kept by others."""
    return {
        "content-security-policy": policy(page),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }


def policy(page: bytes) -> str:
    """The page's Content Security Policy: its inline scripts and styles, by hash, and requests to its own server.

    Not allowed: handlers or styles in attributes, frames around the page, and text that becomes markup (trusted types).
    """
    return (
        f"default-src 'none'; script-src {_hashes(page, b'script')}; style-src {_hashes(page, b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hashes(page: bytes, tag: bytes) -> str:
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)
