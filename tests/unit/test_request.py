"""Parameters out of range are refused with the reason; a Sequence knows its pending tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from sameseed.errors import RequestError, SameseedError
from sameseed.request import MAX_SEED, SamplingParams

BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
    ({"temperature": math.nan}, "temperature must be at least 0, got nan"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": "1"}, "'temperature' must be of type float, got '1'"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"min_p": -0.1}, "min_p must lie in 0..1"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -2}, "top_k must lie in -1..2.14748e+09, got -2"),
    ({"top_k": 2.0}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
    ({"repetition_penalty": -math.inf}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty must lie in -2..2"),
    ({"frequency_penalty": math.nan}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens, 4, got 5"),
    ({"n": 0}, "n must lie in 1..128"),
    ({"n": 129}, "n must"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"logprobs": 101}, "logprobs"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias: a token"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias: a token"),
    ({"logit_bias": {5: math.inf}}, "logit_bias: a bias"),
    ({"logit_bias": {5: math.nan}}, "logit_bias: a bias"),
    ({"allowed_token_ids": ()}, "leaves no token that is not banned"),
    ({"allowed_token_ids": (1, 2), "banned_token_ids": (2, 1, 3)}, "leaves no token that is not banned"),
    ({"banned_token_ids": (-1,)}, "banned_token_ids: a token"),
    ({"stop_token_ids": (1.0,)}, "stop_token_ids[0]"),
    ({"stop": ("",)}, "stop strings must be non-empty"),
    ({"stop": (5,)}, "stop[0]"),
]


@pytest.mark.parametrize(("params", "message"), BAD, ids=[str(p) for p, _ in BAD])
def test_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert message in str(caught.value)
    assert isinstance(caught.value, SameseedError)
    assert isinstance(caught.value, ValueError)


def test_edges_that_are_fine() -> None:
    for params in (
        {"temperature": 0},
        {"temperature": 1e-300},
        {"top_p": 1, "min_p": 1, "top_k": -1},
        {"seed": MAX_SEED},
        {"seed": 0},
        {"min_tokens": 4, "max_tokens": 4},
        {"logit_bias": {5: -math.inf}},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"logprobs": 0, "n": 128},
    ):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_what_is_given_loosely_is_kept_strictly() -> None:
    stops = ["a", "b"]
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], allowed_token_ids=[3], logit_bias={1: 2})  # type: ignore[arg-type]
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.allowed_token_ids == (3,)
    listed = SamplingParams(stop=stops)  # type: ignore[arg-type]
    stops.append("c")
    assert listed.stop == ("a", "b"), "a copy"
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert dataclasses.replace(params, temperature=0.5).stop == ("END",)


def test_derived() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=1e-9).greedy
    assert not SamplingParams(presence_penalty=0.0, repetition_penalty=1.0).has_penalties
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", -0.1), ("frequency_penalty", 0.1)):
        assert SamplingParams(**{name: value}).has_penalties  # type: ignore[arg-type]
