"""Requests as clients send them: which are accepted, which are refused and how, and the limits."""

import json
import logging
from types import SimpleNamespace

import pytest

from sameseed.habits import REQUEST
from sameseed.request import Speculation
from sameseed.server import limits
from sameseed.server.errors import ApiError, clean
from sameseed.server.protocol import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    ResponseFields,
    TokenizeFields,
    read,
)
from sameseed.server.service import sampling, speculation

ROUTES = [
    (CompletionFields, {"prompt": "x"}), (ChatFields, {"messages": [{"role": "user", "content": "x"}]}),
    (ResponseFields, {"input": "x"}), (TokenizeFields, {"prompt": "x"}), (DetokenizeFields, {"tokens": [1]}),
]  # fmt: skip


def refusal(kind, body):
    with pytest.raises(ApiError) as caught:
        read(kind, body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "meant"), [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])]
)
def test_forms_of_a_prompt(prompt, meant):
    assert read(CompletionFields, {"prompt": prompt}).content() == meant


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("prompt", ["a", 1], "prompt[0]"), ("prompt", [], "prompt"), ("prompt", [[]], "prompt[0]"),
        ("prompt", ["x"] * (limits.MAX_PROMPTS + 1), "prompt"), ("prompt", [-1], "prompt[0]"),
        ("prompt", {"a": 1}, "prompt"), ("temperature", "0.5", "temperature"), ("temperature", -0.1, "temperature"),
        ("temperature", float("nan"), "temperature"), ("top_p", -0.1, "top_p"), ("top_p", float("inf"), "top_p"),
        ("min_p", 1.5, "min_p"), ("presence_penalty", float("-inf"), "presence_penalty"),
        ("frequency_penalty", 2.1, "frequency_penalty"), ("repetition_penalty", 0, "repetition_penalty"),
        ("temperature", 2.1, "temperature"), ("top_p", 1.1, "top_p"), ("top_k", -2, "top_k"), ("n", 0, "n"),
        ("n", limits.MAX_N + 1, "n"), ("logprobs", -1, "logprobs"), ("max_tokens", True, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"), ("max_tokens", -1, "max_tokens"),
        ("logprobs", limits.MAX_TOP_LOGPROBS + 1, "logprobs"), ("stop", ["a"] * (limits.MAX_STOP + 1), "stop"),
        ("stop", ["a", ""], "stop[1]"), ("stop", "x" * (limits.MAX_STOP_LENGTH + 1), "stop"), ("stop", 7, "stop"),
        ("logit_bias", {str(i): 1.0 for i in range(limits.MAX_LOGIT_BIAS + 1)}, "logit_bias"),
        ("logit_bias", {"5": float("nan")}, "logit_bias"), ("logit_bias", {"5": 101}, "logit_bias"),
        ("allowed_token_ids", [], "allowed_token_ids"), ("seed", 1.5, "seed"), ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": 3}, "stream_options.include_usage"),
        ("speculation", {"policy": "sometimes"}, "speculation.policy"),
        ("speculation", {"num_draft_tokens": 65}, "speculation.num_draft_tokens"), ("cache_salt", "", "cache_salt"),
        ("response_format", {"type": "a secret"}, "response_format"), ("speculation", "a secret", "speculation"),
    ],
)  # fmt: skip
def test_bad_values_are_named_and_not_repeated(field, value, place):
    error = refusal(CompletionFields, {"prompt": "x", field: value})
    assert "secret" not in error.message
    assert error.message.startswith(f"{place}: ")
    assert error.param == field
    assert len(error.message) < 600
    body = error.body()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "invalid_request_error"


LIMITS = SimpleNamespace(vocab_size=9, max_model_len=99)  # of a model


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {"temperature": 1.0, "max_tokens": 16, "seed": None, "logprobs": None, "skip_special_tokens": True}),
        (dict.fromkeys(("temperature", "top_p", "stop", "n", "max_tokens", "seed_of_nobody")), {"temperature": 1.0}),
        ({"seed": -1}, {"seed": None}), ({"seed": -2}, {"seed": 2**63 - 2}), ({"seed": 2**63 + 5}, {"seed": 5}),
        ({"max_tokens": 10**6}, {"max_tokens": 90}), ({"min_tokens": 40, "max_tokens": 9}, {"min_tokens": 9}),
        ({"top_p": 0, "top_k": 5}, {"top_p": 1.0, "top_k": 1}), ({"top_p": 0.5}, {"top_p": 0.5, "top_k": 0}),
        ({"top_k": -1}, {"top_k": -1}), ({"stop": "ab"}, {"stop": ("ab",)}), ({"stop": ["ab"]}, {"stop": ("ab",)}),
        ({"logit_bias": {"1": -3.0, "8": 2.5}}, {"logit_bias": {1: -3.0, 8: 2.5}}),
        ({"ignore_eos": True, "skip_special_tokens": False}, {"ignore_eos": True, "skip_special_tokens": False}),
        *(({name: [1, 2]}, {name: (1, 2)}) for name in ("banned_token_ids", "allowed_token_ids", "stop_token_ids")),
        *(({name: 0.5}, {name: 0.5}) for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty")),
        *(({name: 2}, {name: 2}) for name in ("repetition_penalty", "n", "logprobs")),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True, "min_tokens": 3}, {"ignore_eos": False}),
    ],
)  # fmt: skip
def test_fields_and_the_parameters_that_they_become(given, meant):
    params = sampling(read(CompletionFields, {"prompt": "x", **given}), LIMITS, 90)
    assert {name: getattr(params, name) for name in meant} == meant


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": {"9": 1.0}}, {"banned_token_ids": [9]}, {"allowed_token_ids": [9]}, {"stop_token_ids": [9]},
        *({"logit_bias": bias} for bias in ({"5": 1.0, "05": 2.0}, {"-5": 1.0}, {"\u0665": 1.0}, {"1e1": 1.0})),
    ],
)  # fmt: skip
def test_tokens_that_the_model_has_not(given):
    with pytest.raises(ApiError) as caught:
        sampling(read(CompletionFields, {"prompt": "x", **given}), LIMITS, 90)
    assert caught.value.status == 400 and caught.value.param in given


def test_no_prompt_is_cut_to_nothing_for_its_answer():
    asked = read(CompletionFields, {"prompt": "x", "truncate_prompt_tokens": -1, "max_tokens": 90})
    assert asked.keep(100) == 10
    with pytest.raises(ApiError, match="lower"):
        asked.keep(80)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": 1}, "messages[0].content"),
        ({"role": "user", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ("x", "messages[0]: Input should be an object"),
    ],
)
def test_bad_messages(message, place):
    assert refusal(ChatFields, {"messages": [message]}).message.startswith(place)


def test_messages_as_templates_take_them():
    parts = [{"type": "text", "text": "a", "cache": 2**70}, {"type": "text", "text": "b"}]
    said = [
        {"role": "developer", "content": "s", "name": "Ann"},
        {"role": "user", "content": parts, "own": [{"x": None}]},
        {"role": "assistant", "content": "c", "refusal": "no", "reasoning": "why", "audio": {"id": "1"}},
        {"role": "tool", "content": "d", "tool_call_id": "e"},
    ]
    assert [m.plain() for m in read(ChatFields, {"messages": said}).messages] == said, "every field, known or not"
    asked = read(ResponseFields, {"input": "x", "instructions": "be brief"})
    assert asked.content().messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "more",
    [
        {"refusal": "no"}, {"tool_calls": []}, {"content": [{"type": "refusal", "refusal": "no"}]},
        {"function_call": {"name": "f", "arguments": "{}"}},
        {"tool_calls": None, "refusal": None, "function_call": None},
    ],
)  # fmt: skip
def test_answers_without_content_are_taken_back(more):
    (said,) = read(ChatFields, {"messages": [{"role": "assistant", "content": None, **more}]}).messages
    calls = [c["function"] for c in said.plain().get("tool_calls", ())]
    assert said.plain().get("content") in (None, [{"type": "text", "text": "no"}])
    assert calls == ([more["function_call"]] if more.get("function_call") else [])


def test_items_of_responses_become_messages():
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "a"}]},
        {
            "type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}],
            "status": "completed",
        },
    ]  # fmt: skip
    assert read(ResponseFields, {"input": items}).content().messages == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [items[2]["content"][0]], "reasoning_content": "hm"},
        {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
    ]


@pytest.mark.parametrize("name", sorted(REQUEST))
def test_what_is_not_offered_is_refused_by_name(name):
    for kind, body in ROUTES:
        if name in kind.model_fields:
            continue
        error = refusal(kind, {**body, name: [{"a": 1}]})
        assert error.param == name and repr(name) in error.message and error.code == "unsupported_parameter"
        read(kind, {**body, name: None})


def test_neutral_values_and_unknown_fields_pass(caplog):
    caplog.set_level(logging.DEBUG, "sameseed.server")
    plain = {"response_format": {"type": "text"}, "tools": [], "best_of": 2, "n": 2, "suffix": ""}
    fields = read(CompletionFields, {"prompt": "x", **plain, "temperature": None, "new_thing": {"a": [1]}})
    assert fields.n == 2 and fields.temperature is None
    assert "new_thing" in caplog.text and "tools" not in caplog.text
    read(ChatFields, {**ROUTES[1][1], "typical_p": 1, "mirostat": 0, "prompt_logprobs": False})
    read(ChatFields, {**ROUTES[1][1], "tfs_z": 1.0, "top_a": 0, "modalities": ["text"], "verbosity": "medium"})
    assert refusal(ChatFields, {**ROUTES[1][1], "prompt_logprobs": 0}).param == "prompt_logprobs", "0 asks for some"
    assert "chat_template_kwargs" in refusal(ChatFields, {**ROUTES[1][1], "enable_thinking": False}).message
    for name, value in {"tool_choice": "required", "add_generation_prompt": False, "include": ["logprobs"]}.items():
        assert refusal(ResponseFields, {"input": "x", name: value}).param == name
    read(ResponseFields, {"input": "x", "add_generation_prompt": True, "include": ["reasoning.encrypted_content"]})
    refusal(CompletionFields, {"prompt": "x", "best_of": 3, "n": 2})


def test_completions_know_both_names_of_the_limit():
    (kind, body), *_ = ROUTES
    assert read(kind, {**body, "max_tokens": 9, "max_completion_tokens": 5}).limit == 5
    assert read(kind, {**body, "max_tokens": 9, "max_completion_tokens": None}).limit == 9
    assert refusal(kind, {**body, "max_completion_tokens": 0}).param == "max_completion_tokens"


def test_settings_of_speculation():
    def of(value):
        return speculation(read(CompletionFields, {"prompt": "x", "speculation": value}), 5)

    assert of(None) is None
    assert of("off") == Speculation("off")
    assert of({"policy": "fixed", "num_draft_tokens": 3}) == Speculation("fixed", 3)
    with pytest.raises(ApiError, match="5 at most"):
        of({"num_draft_tokens": 6})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "no JSON"), (b"{", "no JSON"), (b"[1]", "must be a JSON object"), (b'"x"', "must be a JSON object"),
        (b'{"a": NaN}', "finite"), (b'{"a": -Infinity}', "finite"), (b'{"a": "\xff"}', "no UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"), (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": 1, "b": {"c": [1e400]}}', "finite"), (b'{"a": [{"b": 1, "b": 2}]}', "twice"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "deeper"), (b'{"a": ' + b"[" * 60_000, "deeper"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "deeper"), (b'{"a": 1e999}', "finite"),
        (b'{"a": [' + b"[]," * limits.MAX_CONTAINERS + b"1]}", "more than"),
        (b'{"a": [' + b"1," * (limits.MAX_VALUES + 1) + b"1]}", "more than"),
    ],
)  # fmt: skip
def test_bodies_that_are_no_requests(raw, message):
    with pytest.raises(ApiError, match=message) as caught:
        limits.parse_object(raw)
    assert caught.value.status == 400


NUMBERS = b'{"seed": 5.0, "prompt": [[1.0]], "tools": [1.0, -0.0, 1e6, 1e22, %d], "metadata": {"a": 2.0}}' % 2**70


def test_numbers_stay_as_they_came_but_for_counts():
    came = limits.parse_object(NUMBERS)
    assert json.dumps(came) == json.dumps(json.loads(NUMBERS))
    fields = read(CompletionFields, {"seed": 5.0, "prompt": [[1.0]], "n": 2.0, "metadata": {"a": 2.0}})
    kept = fields.model_dump(include={"seed", "prompt", "n", "metadata"})
    assert json.dumps(kept, sort_keys=True) == '{"metadata": {"a": 2.0}, "n": 2, "prompt": [[1]], "seed": 5}'
    assert refusal(CompletionFields, {"prompt": "x", "n": 1.5}).param == "n"


def test_bodies_at_the_limits():
    deep = {"a": json.loads("[" * 63 + "]" * 63)}
    assert limits.parse_object(json.dumps(deep).encode()) == deep
    unclosed = b'{"a": "' + b'\\"' * 2**20 + b"[" * (limits.MAX_CONTAINERS + 1)
    with pytest.raises(ApiError, match="more than"):
        limits.parse_object(unclosed)  # in time linear in its length, not quadratic
    code = {"a": '"[{,}]\\' * (limits.MAX_VALUES // 2), "b": [[]] * 9}
    assert limits.parse_object(json.dumps(code).encode()) == code, "brackets and commas of a text are no values"
    assert limits.parse_object(b'\xef\xbb\xbf{"a": "\\ud83d\\ude42"}') == {"a": "\U0001f642"}


@pytest.mark.parametrize(
    "leak",
    ["at 0x7f3b530f0648", "in /usr/lib/python3/x.py", "<foo.Bar object at 1>", "~/models/secret/model.bin", "a\nb"],
)
def test_messages_are_cleaned(leak):
    text = clean(f"it failed {leak} badly")
    assert leak not in text and text.startswith("it failed ") and text.endswith("badly")


def test_messages_keep_what_is_meant():
    kept = "POST /v1/completions takes 1/2 or 'org/name', e.g. 'max_tokens': 0.5"
    assert clean(kept) == kept
    assert len(clean("x" * 5000)) < 1100
    assert len(clean("<a object" * 10**6)) < 1100  # in time that does not grow with the text
    assert clean("\ud800").isprintable()
