"""Scheme names: what they select and refuse, and what is told of their loss; activations by row and group."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, strategies as st

from sameseed.errors import ConfigError, RegistryError
from sameseed.formats._losses import LOSSES, MODELS, likely
from sameseed.scheme import QuantArgs, QuantScheme, quantize_rows, round_rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", QuantScheme()), ("w8a16", QuantScheme("int8")), ("w8a8", QuantScheme("int8", activations="int8")),
        ("W4A8", QuantScheme("int4", activations="int8")), ("w4a16-g32", QuantScheme("int4", 32)),
        ("w4a8-g128-asym", QuantScheme("int4", 128, False, "int8")), (" w4a16-asym ", QuantScheme("int4", None, False)),
        ("fp8", QuantScheme("fp8_e4m3")), ("w4a8-qoq", QuantScheme("qoq", activations="int8")),
        ("w4a8-qoq-mse-g64", QuantScheme("qoq", 64, activations="int8", variant="mse")),
        ("nf4-dq", QuantScheme("nf4", variant="dq")), ("fp8-b128", QuantScheme("fp8_e4m3", variant="b128")),
        ("FP8-auto", QuantScheme("fp8_e4m3", variant="auto")),
        ("fp8-a8-b128", QuantScheme("fp8_e4m3", activations="fp8", variant="b128")),
        ("fp8_e5m2-a8", QuantScheme("fp8_e5m2", activations="fp8")),
        ("bf16-a16", QuantScheme("bf16", activations="bf16")),
        ("int4-a8-g32", QuantScheme("int4", 32, activations="int8")),
        ("w8a8-outliers-g64", QuantScheme("int8", 64, activations="outliers")),
    ],
)  # fmt: skip
def test_names(text, expected):
    found = QuantScheme.parse(text)
    assert found == expected
    assert QuantScheme.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "near"),
    [("w4a9", "w4a8"), ("w8a", "w8a8"), ("fp8_e4m33", "fp8_e4m3"), ("nf-4", "nf4"), ("w4a8g128", "w4a8")],
)
def test_unknown_names_suggest_the_near_one(text, near):
    with pytest.raises(RegistryError, match=f"did you mean '{near}'"):
        QuantScheme.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("w4a8-g48", "no groups of 48, only of 32, 64, 128;"), ("bf16-g32", "no groups of 32;"),
        ("w8a8-asym", "no zero points; leave out -asym, or take w4a8"), ("qoq-asym", "no zero points"),
        ("nf4-b128", "no variant -b128; it has -dq"), ("fp8-b64", "no variant -b64; it has -auto, -b128"),
        ("w4a8-g", "no variant -g; it has none"), ("nf4-a8", "w4a8"),
        ("int4_sparse", "serves the KV cache only"),
    ],
)  # fmt: skip
def test_what_a_format_has_not(text, words):
    with pytest.raises(ConfigError, match=words):
        QuantScheme.parse(text)
    for weights, activations in (("bf16", "int8"), ("int8", "fp8"), ("auto", "fp8"), ("int4", "outliers")):
        with pytest.raises(ConfigError, match=r"w8a8|fp8-a8"):
            QuantScheme(weights, activations=activations)


@pytest.mark.parametrize(
    "text", ["", "-dq", "nf4-g32-dq", "nf4-dq-dq", "-g32", "-asym", "w4a8-asym-g32", "w4a8-g-32", "w4a8\n-g32", "\0"]
)
def test_nonsense(text):
    with pytest.raises(RegistryError, match="no format"):
        QuantScheme.parse(text)


@pytest.mark.parametrize("text", ["w4a8-channel", "w4a16-channel-asym", "w8a8n-channel", "w4a8-qoq-mse-channel"])
def test_a_scale_per_output_is_spelled_channel(text):
    assert str(QuantScheme.parse(text)) == text
    with pytest.raises(ConfigError, match=r"-channel"):
        QuantScheme.parse("nf4-channel")


def test_groups_are_chosen_by_width():
    scheme = QuantScheme.parse("w4a8")
    assert [scheme.args(k).group for k in (4096, 14336, 192, 32, 100)] == [128, 128, 64, 32, None]
    assert QuantScheme.parse("w8a8").args(4096) == QuantArgs(None)
    assert QuantScheme.parse("w4a8-g32-asym").args(4096) == QuantArgs(32, False)
    assert QuantScheme.parse("w4a8-channel").args(4096) == QuantArgs(None)
    with pytest.raises(ConfigError, match=r"-g64"):
        QuantScheme.parse("w4a8-g128").args(192)
    with pytest.raises(ConfigError, match=r"leave the group out"):
        QuantScheme.parse("w8a8-g32").args(72)


def test_activations_are_written_on_the_weight():
    assert QuantScheme.parse("w8a8").encode(torch.ones(1, 8)).activations == "int8"
    assert QuantScheme.parse("w4a16").encode(torch.ones(1, 8)).activations is None
    assert QuantScheme().encode(torch.ones(1, 8, dtype=torch.bfloat16)).format == "bf16"
    # auto-a8 is for matrices that a checkpoint stores as integers; dense matrices beside them keep float rows.
    assert QuantScheme.parse("auto-a8").encode(torch.ones(4, 32)).activations is None


def row_by_hand(x):
    f32 = lambda v: torch.tensor(v, dtype=torch.float32).item()  # noqa: E731
    a = max(abs(v) for v in x)
    if any(math.isnan(v) for v in x) or math.isinf(a):
        return [0] * len(x), math.nan
    if a < 2.0**-100:
        return [0] * len(x), 0.0
    inverse = f32(127.0 / a)  # correctly rounded: for float32 operands, rounding the quotient twice does no harm
    return [max(-127, min(127, round(f32(v * inverse)))) for v in x], f32(a / 127.0)


@given(st.lists(st.floats(width=32), min_size=8, max_size=8), st.sampled_from([None, 2, 4]))
@example([127.0, 0.5, 1.5, -2.5, math.nan, 1.0, 1.0, 1.0], 4)  # ties go to even
@example([-math.inf, 1.0, 1.0, 1.0, 2.0**-101, 0.0, 0.0, 0.0], 4)
def test_rows_of_int8(values, group):
    codes, scales = quantize_rows(torch.tensor([values]), group)
    size = group or 8
    for g in range(8 // size):
        wanted, scale = row_by_hand(torch.tensor(values).tolist()[g * size : (g + 1) * size])
        assert codes[0, g * size : (g + 1) * size].tolist() == wanted
        assert scales[0, g].item() == scale or (math.isnan(scale) and scales[0, g].isnan())


def test_rows_of_fp8_by_example():
    x = torch.tensor([[448.0, 17.0, 19.0, -1.0625], [math.nan, 1, 1, 1], [1e-31, 0, 0, 0]])
    got = round_rows(x)
    assert got[0].tolist() == [448.0, 16.0, 20.0, -1.0]  # ties go to even
    assert got[1].isnan().all() and not got[2].any()
    assert round_rows(torch.zeros(0, 8)).shape == (0, 8)
    torch.testing.assert_close(round_rows(got[:1]), got[:1])


RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "eval.jsonl"


def test_losses_are_those_of_the_records():
    measured = {}
    for r in map(json.loads, RECORDS.read_text().splitlines()):
        for model in MODELS:
            if r["comparison"] and model in r["config"]["model"] and (ratio := r["comparison"]["perplexity_ratio"]):
                measured[r["config"]["asked_format"], model] = ratio["value"]
    for name, losses in LOSSES.items():
        for loss, model in zip(losses, MODELS, strict=False):
            assert loss == pytest.approx(measured[name, model], abs=0.006), (name, model)


@pytest.mark.parametrize(
    ("asked", "near"),
    [("w4a8-g64", "w4a8"), ("w4a8-qoq", "w4a8"), ("w4a16-asym,lm_head=bf16", "w4a16-g64-asym"), ("w8a8-g32", "w8a8")],
)
def test_others_are_estimated_by_the_most_similar(asked, near):
    assert f"{LOSSES[near][0]:.2f}" in likely(QuantScheme.parse(asked))


def test_what_was_not_measured_is_said():
    assert "not measured" in likely(QuantScheme.parse("q6_k"))
