"""Reading what clients send: values are checked here, once, and a refusal names the field and never repeats the value.

A field that nobody knows is accepted, as OpenAI does, and named in the debug log; one that would change the text and is
not offered is refused by its name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from sameseed.server.conversation import Fields
from sameseed.server.errors import ApiError, bad_request
from sameseed.server.protocol import ChatFields, CompletionFields, TokenizeChatFields, TokenizeFields

log = logging.getLogger("sameseed.server")

# Asked for by name, these would change what is written; silence would be a lie.
REFUSED = {
    "suffix": "text after the insertion is not offered; leave 'suffix' out",
    "best_of": "use 'n'; choices are not ranked",
    "prompt_embeds": "prompts are text or token ids",
    "functions": "use no 'functions'; they are not offered",
    "function_call": "use no 'functions'; they are not offered",
    "tools": "tools are for /v1/chat/completions",
    "grammar": "use 'guided_grammar'",
    "guided_whitespace_pattern": "space between parts of JSON is one character at most",
    "structural_tag": "use 'tools'",
    "chat_template": "the model's own chat template is used, never a request's",
    "chat_template_kwargs": "the model's own chat template is used, without arguments",
    "continue_final_message": "send the beginning of the answer to /v1/completions",
    "logits_processors": "programs in requests are not run",
    "bad_words": "use 'banned_token_ids' or 'logit_bias'",
    "use_beam_search": "beam search is not offered",
    "audio": "text only",
    "include_stop_str_in_output": "the stop text is always left out",
    "previous_response_id": "responses are not stored; send the whole conversation as 'input'",
    "background": "responses are not stored",
    "conversation": "responses are not stored; send the whole conversation as 'input'",
    "prompt": "a stored prompt is not offered",
}
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "", {"type": "text"})

F = TypeVar("F", bound=Fields)
_OFFERED = {
    CompletionFields: {"prompt"},
    TokenizeFields: {"prompt"},
    TokenizeChatFields: {"prompt"},
    ChatFields: {"tools"},
}


def read(kind: type[F], body: dict[str, Any]) -> F:
    """The fields of a request. Raises ApiError 400 that names the first bad one."""
    for name in sorted(body.keys() & REFUSED.keys()):
        if name not in _OFFERED.get(kind, ()) and not any(body[name] is v or body[name] == v for v in _NEUTRAL):
            if name == "best_of" and body[name] == (body.get("n") or 1):
                continue
            raise bad_request(f"{name!r} is not supported: {REFUSED[name]}", param=name, code="unsupported_parameter")
    try:
        fields = kind.model_validate(body)
    except ValidationError as error:
        raise _first_fault(error) from None
    unknown = sorted((fields.model_extra or {}).keys() - REFUSED.keys())
    if unknown:
        log.debug("fields that nobody reads: %s", ", ".join(repr(name[:64]) for name in unknown[:32]))
    return fields


def _kinds(base: type[Fields]) -> Iterator[type[Fields]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


_NAMES = frozenset(n for k in _kinds(Fields) for f, info in k.model_fields.items() for n in (f, info.alias) if n)


def _first_fault(error: ValidationError) -> ApiError:
    """Where a value got furthest before it was refused, among the forms that a field may have; never the value."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    fault = max(faults, key=lambda f: (not f["type"].endswith("_type"), len(f["loc"])))
    place = ""
    for part in fault["loc"]:  # names of the forms stand between those of the fields
        if isinstance(part, int):
            place += f"[{part}]"
        elif part in _NAMES:
            place += f".{part}" if place else part
    param = str(fault["loc"][0])[:64] if fault["loc"] else None
    return bad_request(f"{place or 'body'}: {fault['msg'][:500]}", param=param, code="invalid_value")
