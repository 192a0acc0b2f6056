"""Turns the fields of a request into the engine's parameters, with OpenAI's defaults."""

from __future__ import annotations

import hashlib
from typing import Any

from sameseed.errors import RequestError
from sameseed.request import SamplingParams, Speculation
from sameseed.server.errors import bad_request
from sameseed.server.guard import Visit
from sameseed.server.protocol import Common, SpeculationFields
from sameseed.server.text import TextCodec


def sampling(
    fields: Common, text: TextCodec, max_tokens: int, room: int, logprobs: int | None, bound: bool = False
) -> SamplingParams:
    """The engine's parameters, with OpenAI's defaults. Raises ApiError 400.

    `room`: tokens left in the context. `bound`: a grammar restricts the text, and the text ends where the grammar does.
    """
    bound = bound or fields.choice is not None
    check_length(max_tokens, text)
    max_tokens = min(max_tokens, room)  # at the context's end the text ends with finish_reason "length"
    bias = fields.logit_bias or {}
    if not all(k.isascii() and k.isdigit() and len(k) < 10 and k == str(int(k)) for k in bias):
        raise bad_request(f"logit_bias: keys must be token ids in 0..{text.vocab_size - 1}", "logit_bias")
    given: dict[str, Any] = {
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "logit_bias": {int(key): value for key, value in bias.items()},
        "stop": (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        "stop_token_ids": tuple(fields.stop_token_ids or ()),
        "banned_token_ids": tuple(fields.banned_token_ids or ()),
        "allowed_token_ids": None if fields.allowed_token_ids is None else tuple(fields.allowed_token_ids),
        "ignore_eos": bool(fields.ignore_eos) and not bound,
        "min_tokens": 0 if bound else min(fields.min_tokens or 0, max_tokens),
        "skip_special_tokens": fields.skip_special_tokens is not False,
        "seed": None if fields.seed is None else fields.seed % 2**63,
    }
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in ("top_p", "top_k", "min_p", *penalties, "n"):
        if getattr(fields, name) is not None:
            given[name] = getattr(fields, name)
    try:
        params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)
        params.check(text.vocab_size, text.max_model_len)
    except RequestError as error:
        raise bad_request(str(error), error.field) from None
    return params


def check_length(max_tokens: int, text: TextCodec) -> None:
    """Raise ApiError 400 for an answer that is longer than the model's context."""
    if max_tokens > text.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {text.max_model_len} tokens; ask for at most as many",
            "max_tokens",
            "context_length_exceeded",
        )


def speculation(fields: Common, most: int) -> Speculation | None:
    """The request's own speculation settings; None if it has none.

    If its policy chooses lengths itself, drafts have up to `most` tokens unless the request says otherwise. Raises
    ApiError 400 for drafts of more than `most` tokens.
    """
    asked = fields.speculation
    if isinstance(asked, SpeculationFields) and (asked.num_draft_tokens or 0) > most:
        raise bad_request(f"speculation: num_draft_tokens may be {most} at most on this server", "speculation")
    if asked is None:
        return None
    policy, number = (asked, None) if isinstance(asked, str) else (asked.policy, asked.num_draft_tokens)
    return Speculation(policy, most if number is None and policy in ("history", "disco", "goodput") else number)


def tenant(visit: Visit, salt: str | None) -> str:
    """The tenant of a request, for the caches: what is kept of one tenant's texts never serves another's."""
    return visit.tenant if salt is None else f"{visit.tenant}:{hashlib.sha256(salt.encode()).hexdigest()[:16]}"
