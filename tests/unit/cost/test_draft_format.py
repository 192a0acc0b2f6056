"""A draft model that is stored in few bits is loaded in 4 where a round then brings more for its bytes."""

from pathlib import Path

import pytest

from sameseed.cost.draft_format import FEW, cheaper, chosen_scheme, read_bytes
from sameseed.engine.build import models_of
from sameseed.engine.levels import resolve
from sameseed.engine.settings import make_config
from sameseed.models.loader import open_checkpoint, read_config, resolve_model
from sameseed.plan.paper import sheet
from sameseed.quantize._plan import QuantizePlan
from sameseed.quantize._run import quantize
from sameseed.scheme import QuantScheme

TARGET, AUTO, TARGET_FORMAT = resolve_model("embedded-target"), QuantScheme(), QuantScheme.parse("w8a8")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft as a folder of 8 bits."""
    folder = tmp_path_factory.mktemp("stored") / "w8a8"
    quantize(QuantizePlan("embedded-draft", folder, "w8a8"))
    return folder


def test_8_bits_become_4_beside_a_target_of_its_size(stored: Path) -> None:
    assert chosen_scheme(stored, TARGET, TARGET_FORMAT) == FEW
    level = resolve(make_config(str(stored)).spec)
    assert [m.quant for m in models_of(level, TARGET, TARGET_FORMAT)] == [FEW]
    assert sheet(str(stored), target=sheet("embedded-target", "w8a8")).name == str(FEW)


def test_beside_a_far_larger_target_only_acceptance_counts(stored: Path) -> None:
    config = read_config(stored)
    with open_checkpoint(stored) as source:
        source.check(config)
        own = read_bytes(config, source, AUTO)
        assert cheaper(config, source, 2 * own) == FEW
        assert cheaper(config, source, 1000 * own) == AUTO


def test_only_on_a_cpu_and_only_where_no_format_is_named(stored: Path) -> None:
    assert chosen_scheme(stored, TARGET, TARGET_FORMAT, "cuda") == AUTO
    level = resolve(make_config(str(stored), draft_format="w8a8").spec)
    assert [str(m.quant) for m in models_of(level, TARGET, TARGET_FORMAT)] == ["w8a8"]
