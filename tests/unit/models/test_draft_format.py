"""A draft without a format of its own takes its target's, if it can."""

import pytest

from sameseed.engine.build import models_of
from sameseed.engine.levels import resolve
from sameseed.engine.settings import make_config
from sameseed.models.draft_format import draft_scheme
from sameseed.models.loader import resolve_model
from sameseed.plan.paper import head_sheet, sheet
from sameseed.quantize._run import QuantizePlan, quantize
from sameseed.scheme import QuantScheme

TARGET = resolve_model("embedded-target")


def formats(draft, target_format, **settings):
    """The formats of the draft's models, for the embedded target."""
    level = resolve(make_config(draft, **settings).spec)
    return [str(m.quant) for m in models_of(level, TARGET, QuantScheme.parse(target_format))]


@pytest.mark.parametrize("draft", ["embedded-draft", "embedded-head", "suffix + embedded-head"])
@pytest.mark.parametrize(
    ("target_format", "expected"),
    [
        ("auto", "w8a8"), ("bf16", "w8a8"), ("fp32", "w8a8"), ("w4a8", "w4a8"), ("w8a8n", "w8a8n"),
        ("w4a16-g64-asym", "w4a16-g64-asym"), ("w4a8-qoq", "w4a8-qoq"), ("nf4-dq", "nf4-dq"),
        ("w4a8,lm_head=bf16", "w4a8"), ("q4_k-a8", "w4a8"), ("q6_k-a8", "w8a8"),
    ],
)  # fmt: skip
def test_a_draft_takes_the_format_of_its_target(draft, target_format, expected):
    assert formats(draft, target_format) == [expected]


def test_beside_a_target_in_16_bits_it_stays_as_it_is_on_a_gpu():
    level = resolve(make_config("embedded-draft").spec)
    assert [str(m.quant) for m in models_of(level, TARGET, QuantScheme.parse("bf16"), "cuda")] == ["auto"]


def test_each_level_follows_the_one_that_it_drafts_for():
    assert formats("embedded-draft", "w4a8") == ["w4a8"]
    assert formats("suffix > embedded-draft", "w8a8") == ["w8a8"]


def test_a_group_that_does_not_divide_the_draft_is_left_out():
    """Rows of the draft have 192 values, which groups of 128 do not divide; rows of the target have 256."""
    assert formats("embedded-draft", "w4a8-g128") == ["w4a8"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The embedded target as a folder of 4-bit weights."""
    folder = tmp_path_factory.mktemp("stored") / "w4"
    quantize(QuantizePlan("embedded-target", folder, "w4a16"))
    return folder


def test_a_target_stored_in_few_bits_counts_as_one_in_that_format(stored):
    found = draft_scheme(resolve_model("embedded-head"), stored, QuantScheme())
    assert found.weights == "int4" and found.activations is None


def test_a_draft_that_is_stored_in_few_bits_stays_so(stored):
    assert draft_scheme(stored, TARGET, QuantScheme.parse("w8a8")) == QuantScheme()


def test_the_estimate_knows_it():
    target = sheet("embedded-target", "w4a8")
    assert sheet("embedded-draft", target=target).name == "w4a8"
    assert sheet("embedded-draft", "w8a8", target=target).name == "w8a8"
    assert sheet("embedded-draft", target=sheet("embedded-target", "q4_k-a8")).name == "w4a8"
    assert sheet("embedded-draft", target=sheet("embedded-target", "bf16,model.layers.*=w4a8")).name == "w4a8"
    head = resolve_model("embedded-head")
    assert head_sheet(head, "auto", "auto", target).weights < head_sheet(head, "bf16", "auto", target).weights / 2
