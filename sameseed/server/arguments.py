"""Arguments of earlier tool calls: JSON text on the wire, objects to a chat template; read where the template runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Any

from sameseed.server import limits
from sameseed.server.errors import ApiError

log = logging.getLogger("sameseed.server")


def opened(messages: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with arguments as objects, where they are such; a model may have written anything."""
    return [{**m, "tool_calls": [_opened(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in messages]


def _opened(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        return {**call, "function": {**function, "arguments": limits.parse_object(function["arguments"].encode())}}
    except ApiError:
        log.debug("arguments of a tool call that are no object")
        return call
