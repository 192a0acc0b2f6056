"""Untrusted regular expressions: those that could take exponential time are refused, those of real models are not."""

from __future__ import annotations

import pytest

from sameseed.errors import ModelLoadError
from sameseed.models.layouts.patterns import covers, expression, fits

NAME = "model.layers.10.self_attn.q_proj"

SLOW = [
    r"((.+)x?)+!", r"((\w+)\.?)+!", r"(a+)+$", r"(a|aa)*b", r"(x{1,50}){1,50}y", r"(?:(?:a|aa){9}){9}b", r"(a?b?){20}c",
    r"(?P<x>(?:[a-z]+)\.?)*!", r"(?=((\w+)\.?)+!)x", r"(?!(.|..)+!)x", r"((.*?)x)*?!", r"(.|..){30}!", r".?" * 60 + "!",
    r"(.|..)" * 40 + "!", r".*.*.*.*.*.*.*x", r"(.*)\1", r"(a)?(?(1)b|c)", r"a{1000}", r"a{,1000}",
    "(" * 30 + ")" + "{9})" * 29 + "x",
]  # fmt: skip


@pytest.mark.parametrize("text", SLOW, ids=lambda t: t[:40])
def test_expressions_that_could_take_for_ever_are_refused(text):
    with pytest.raises(ModelLoadError, match="too involved"):
        expression(text)


@pytest.mark.parametrize("text", ["[a", "(" * 200, "a**", "(?P<1>a)"], ids=lambda t: t[:40])
def test_what_is_no_expression(text):
    with pytest.raises(ModelLoadError, match="no regular expression"):
        expression(text)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (r".*self_attn\.(q|k|v)_proj", "model.layers.10.self_attn.o_proj"),
        (r"model\.layers\.\d+\.self_attn.*", "model.layers.10.mlp.up_proj"),
        (r".*\.(gate|up|q)_proj$", "model.layers.10.mlp.down_proj"),
        (r"^model\.layers\.(?:[0-9]|1[0-5])\..*", "model.layers.16.mlp.up_proj"),
        (r".*\.layers\.\d+\..*attn\.(q|k|v)(_proj)?", "model.layers.1.mlp.up_proj"),
        (r"^((?!mlp).)*$", "model.layers.1.mlp.up_proj"),
        (r"^(?!.*mlp).*", "model.layers.1.mlp.up_proj"),
        (r"(?:\w\w{3}l.)?model.*q_proj|(?:[a-z]{2}_)+head", "model.layers.10.self_attn.k_proj"),
        (r"model\.layers\.(0|1|2|3|4|5|6|7|8|9|10)\.(self_attn|mlp)\.[qkvo]_proj", "model.layers.11.mlp.up_proj"),
        (r".*layers\.\d+\..*attn.*\.?(q|k)_proj.*", "model.layers.0.mlp.experts.7.down_proj"),
    ],
)
def test_expressions_of_real_checkpoints_are_matched(text, other):
    assert fits(f"re:{text}", NAME) and covers(f"re:{text}", NAME)
    assert not fits(f"re:{text}", other)
