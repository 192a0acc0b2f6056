"""A format from an installed package works like one of the project's own: it loads, is stored and is read again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fixtures_formats
import pytest

from sameseed import LLM, SamplingParams
from sameseed.models.checkpoint import Checkpoint
from sameseed.quantize._plan import QuantizePlan
from sameseed.quantize._run import quantize
from sameseed.scheme import QuantScheme

PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def test_a_model_in_it_is_quantized_and_read_again(site: Path, tmp_path: Path) -> None:
    with fixtures_formats.installed(site):
        text = LLM("embedded", format="ternary-g64", draft="none").generate(["One"], PARAMS)[0].token_ids
        drafted = LLM("embedded", format="ternary-g64", draft="ngram").generate(["One"], PARAMS)[0].token_ids
        assert text == drafted
        quantize(QuantizePlan("embedded", tmp_path / "out", "ternary-g64", "rtn"))
        with Checkpoint(tmp_path / "out") as checkpoint:
            assert "model.layers.0.mlp.up_proj.codes2" in checkpoint
        stored = LLM(str(tmp_path / "out"), draft="none")
        assert stored.generate(["One"], PARAMS)[0].token_ids
        assert str(QuantScheme.parse("ternary-a8-g64")) == "ternary-a8-g64"


def test_the_command_line_takes_it(site: Path) -> None:
    fixtures_formats.write_package(site)
    command = [sys.executable, "-m", "sameseed", "generate", "One", "--format", "ternary-a8", "--max-tokens", "4"]
    command += ["--policy", "fixed"]  # another would measure its kernels, which are slow, for long
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
