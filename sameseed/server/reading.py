"""Reads request bodies within limits of size and time, and validates their values, for all routes in this one place.

An error names the field and never repeats its value.

Unknown fields are accepted, as by OpenAI, and named in the debug log. Known fields that would change the text, but are
not supported, are refused by name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from sameseed.server import limits
from sameseed.server.connection import Visit, visit_of
from sameseed.server.conversation import Fields
from sameseed.server.errors import ApiError, bad_request, unavailable

log = logging.getLogger("sameseed.server")
INLINE = 2**16  # bytes: a larger body is parsed in a thread
MAX_INSIDE = 128 * 2**20  # bytes of all bodies that are being read, parsed or checked

# Unsupported fields that would change the text, by why they are refused rather than silently ignored. They are not
# refused on routes that have such a field.
_REASONS = {
    "text after the insertion is not offered; leave 'suffix' out": "suffix",
    "use 'n'; choices are not ranked": "best_of",
    "prompts are text or token ids": "prompt_embeds",
    "use no 'functions'; they are not offered": "functions function_call",
    "tools are for /v1/chat/completions": "tools tool_choice",
    "use 'structured_outputs'": "guided_choice guided_json guided_regex guided_grammar grammar ebnf regex",
    "space between parts of JSON is one character at most": "guided_whitespace_pattern",
    "use 'tools'": "structural_tag",
    "the model's own chat template is used, never a request's": "chat_template",
    "chat templates are for conversations": "chat_template_kwargs documents add_generation_prompt reasoning_effort",
    "the chat template writes all special tokens": "add_special_tokens",
    "send the beginning of the answer to /v1/completions": "continue_final_message",
    "programs in requests are not run": "logits_processors custom_logit_processor",
    "use 'banned_token_ids' or 'logit_bias'": "bad_words",
    "beam search is not offered": "use_beam_search length_penalty early_stopping",
    "use 'stop'": "stop_words",
    "text only": "audio modalities",
    "the server searches nothing": "web_search_options",
    "say it in a message": "verbosity",
    "the stop text is always left out": "include_stop_str_in_output no_stop_trim",
    "responses are not stored; send the whole conversation as 'input'": "previous_response_id conversation",
    "responses are not stored": "background",
    "a stored prompt is not offered": "prompt",
    "use 'truncate_prompt_tokens'": "truncation",
    "'echo' is for /v1/completions": "echo",
    "use 'echo' and 'logprobs' of /v1/completions": "prompt_logprobs",
    "use 'logprobs' of /v1/completions, or /v1/chat/completions": "top_logprobs",
    "log-probabilities are those of the likeliest tokens": "logprob_token_ids",
    "say it by a conversation's 'chat_template_kwargs'": "enable_thinking thinking",
    "thoughts have no limit of their own; use 'max_tokens'": "thinking_token_budget thinking_budget",
    "adapters are not offered; merge it into the model": "lora_request lora_path",
    "use 'repetition_penalty'": "repetition_detection dry_multiplier repeat_penalty",
    "use 'frequency_penalty'": "no_repeat_ngram_size",
    "use 'min_p' or 'top_p'": "typical_p top_n_sigma xtc_probability mirostat top_a tfs_z",
    "the order of sampling is fixed": "samplers",
    "use 'logprobs'": "n_probs",
    "use 'temperature'": "dynatemp_range",
    "use 'max_tokens'": "n_predict max_new_tokens",
    "use 'min_tokens'": "min_new_tokens",
    "use 'response_format'": "json_schema",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "", {"type": "text"})
_NEVER_NEUTRAL = ("enable_thinking", "thinking", "add_generation_prompt")  # false is a request too
# One more value that changes nothing, for some of the refused fields.
_ALSO_NEUTRAL: dict[str, Any] = {"typical_p": 1, "length_penalty": 1, "repeat_penalty": 1, "top_n_sigma": -1}
_ALSO_NEUTRAL |= dict.fromkeys(("xtc_probability", "mirostat", "dynatemp_range", "dry_multiplier", "top_logprobs"), 0)
_ALSO_NEUTRAL |= dict.fromkeys(("top_a", "no_repeat_ngram_size", "n_probs", "min_new_tokens"), 0)
_ALSO_NEUTRAL |= {"tfs_z": 1, "modalities": ["text"], "verbosity": "medium"}
_ALSO_NEUTRAL |= {"add_generation_prompt": True, "truncation": "disabled", "tool_choice": "auto"}

F = TypeVar("F", bound=Fields)


class Intake:
    """Reads bodies, up to a total size: the gate counts a body only after it has been read. One object per server."""

    def __init__(self) -> None:
        self.size_inside = 0

    @asynccontextmanager
    async def held(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Yields the JSON object of a request's body. Its bytes (the visit's `size`) count until the context is left.

        Raises ApiError: 400, 408, 413, 415, 503.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another site can send other types without CORS
            raise ApiError(415, "send JSON, with 'Content-Type: application/json'")
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise ApiError(415, "send the body as it is, without 'Content-Encoding'")
        visit, parts = visit_of(request), list[bytes]()
        try:
            try:
                await asyncio.wait_for(self._collect(request, visit, parts), limits.BODY_TIMEOUT)
            except asyncio.TimeoutError:
                raise ApiError(408, "the body did not arrive in time", code="timeout") from None

            yield await limits.away(visit.size > INLINE, lambda: limits.parse_object(b"".join(parts)), None)
        except ClientDisconnect:
            raise ApiError(400, "the client left") from None
        finally:
            self.size_inside -= visit.size

    async def _collect(self, request: Request, visit: Visit, parts: list[bytes]) -> None:
        async for part in request.stream():
            if visit.size + len(part) > limits.MAX_BODY:
                raise limits.too_large()
            if self.size_inside + len(part) > MAX_INSIDE:
                raise unavailable("too many large requests arrive at once; try again later", retry_after=1)
            parts.append(part)
            visit.size += len(part)
            self.size_inside += len(part)


def _kinds(base: type[Fields]) -> Iterator[type[Fields]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


_NAMES = frozenset(n for k in _kinds(Fields) for f, info in k.model_fields.items() for n in (f, info.alias) if n)


def read(kind: type[F], body: dict[str, Any]) -> F:
    """Validate a body as fields of this kind. Raises ApiError 400 that names one bad field."""
    for name in sorted(body.keys() & REFUSED.keys() - kind.model_fields.keys()):
        also = body.get("n") or 1 if name == "best_of" else _ALSO_NEUTRAL.get(name)
        neutral = (None, also) if name in _NEVER_NEUTRAL else (*_NEUTRAL, also)
        if not any(body[name] == v and isinstance(v, bool) == isinstance(body[name], bool) for v in neutral):
            raise bad_request(f"{name!r} is not supported: {REFUSED[name]}", param=name, code="unsupported_parameter")
    try:
        fields = kind.model_validate(body)
    except ValidationError as error:
        # If a field may have several forms, report the fault of the form that got furthest; never the value.
        faults = error.errors(include_url=False, include_input=False)
        fault = max(faults, key=lambda f: (not f["type"].endswith("_type"), len(f["loc"])))
        place = ""
        for part in fault["loc"]:  # skip names of forms, which stand between the fields' names
            if isinstance(part, int):
                place += f"[{part}]"
            elif part in _NAMES:
                place += f".{part}" if place else part
        param = str(fault["loc"][0])[:64] if fault["loc"] else None
        tags = fault["ctx"]["expected_tags"] if fault["type"] == "union_tag_invalid" else None
        told = f"'type' must be one of {tags}" if tags else fault["msg"][:500]  # that one's message repeats the value
        raise bad_request(f"{place or 'body'}: {told}", param, "invalid_value") from None
    unknown = sorted((fields.model_extra or {}).keys() - REFUSED.keys())
    if unknown:
        log.debug("fields that nobody reads: %s", ", ".join(repr(name[:64]) for name in unknown[:32]))
    return fields
