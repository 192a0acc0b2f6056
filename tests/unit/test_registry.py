"""Registries: the file name is the key, and no module is imported before it is asked for."""

import subprocess
import sys

import pytest

from sameseed import config, registry
from sameseed.errors import RegistryError


def test_names():
    some = {"drafters": {"ngram", "draft_model"}, "formats": {"fp32", "bf16", "int8"}, "ops": {"reference", "cpu"}}
    for name, known in some.items():
        found = registry.names(name)
        assert known <= set(found) and list(found) == sorted(found)
        assert not any(n.startswith("_") for n in found)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("n-gram", "did you mean 'ngram'"), ("draftmodel", "did you mean 'draft_model'"), ("zzz", "there are: ")],
)
def test_an_unknown_name(name, hint):
    with pytest.raises(RegistryError, match=f"there is no drafter '{name}'") as caught:
        registry.load("drafters", name)
    assert hint in str(caught.value)
    assert "draft_model" in str(caught.value), "it lists what there is"


def test_a_file_that_begins_with_an_underscore_is_no_entry():
    for name in ("_dense", "../ops/cpu", ""):
        with pytest.raises(RegistryError):
            registry.load("formats", name)


def test_what_drafters_own_is_known_before_they_are_loaded():
    assert {n: registry.load("drafters", n).DRAFTER.owns for n in config.OWNS} == config.OWNS
    assert set(config.OWNS) == registry._own("drafters")


def test_the_front_of_a_server_starts_without_pytorch():
    """Its flags name a draft model, whose drafter is looked up; only the process of the engine needs PyTorch."""
    code = (
        "import sys; from sameseed.cli.options import parse; from sameseed.cli.flags import ServeArgs\n"
        "from sameseed.server import run\n"
        "read = parse(ServeArgs, ['--draft', 'embedded-draft', '--policy', 'goodput'], 'x', engine=True)\n"
        "assert 'draft_model' in repr(read.engine.settings)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
