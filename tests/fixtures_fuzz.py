"""Checks for schemathesis, which finds this file through the variable SCHEMATHESIS_HOOKS.

A request that the OpenAPI document calls valid must be accepted, except for what its schemas do not state: the model's
name, vocabulary and context, what a grammar may hold, and which fields exclude each other.
"""

import re

import schemathesis

NOT_IN_SCHEMAS = (
    "no token was left to choose", "leaves no token that is not banned", "contradict each other",
    "context_length_exceeded", "invalid_schema", "is no JSON", "list of text parts", "cannot be used",
    "cannot be followed", "no text can match", "give one of choice", "may not set", "tool", "logit_bias", "documents",
    "vocabulary", "truncate_prompt_tokens",
)  # fmt: skip
LEAKS = re.compile(r"0x[0-9a-f]{6}|Traceback|\.py\b|site-packages|<[\w.]+ object")
ACCEPTED = {*range(200, 300), 401, 404, 429, 503}


@schemathesis.hook
def map_body(context, body):
    """Ask mostly for the served model and tokens of its vocabulary, or few requests would come as far as the engine."""
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body = {**body, "model": "tiny"}
        for name in ("stop_token_ids", "banned_token_ids", "allowed_token_ids", "tokens", "prompt"):
            if isinstance(ids := body.get(name), list):
                body = {**body, name: [i % 200 if type(i) is int and i >= 0 else i for i in ids]}
    return body


@schemathesis.check
def valid_requests_are_accepted(context, response, case):
    """Replaces `positive_data_acceptance`: valid requests are accepted, except for the reasons in NOT_IN_SCHEMAS."""
    generated = case.meta.generation.mode.is_positive if case.meta is not None else False
    if generated and response.status_code not in ACCEPTED:
        assert response.status_code == 400 and any(t in response.text for t in NOT_IN_SCHEMAS), response.text[:500]


@schemathesis.check
def errors_are_openai_s_and_hold_no_inside(context, response, case):
    """Every error has OpenAI's shape on every route and shows no internals; status 422 never occurs."""
    assert response.status_code != 422
    if response.status_code >= 400 and case.method != "HEAD":
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, response.text[:500]
        assert not LEAKS.search(response.text), response.text[:500]
