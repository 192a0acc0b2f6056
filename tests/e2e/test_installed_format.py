"""A format from an installed package works like one of the project's own: it loads, is stored and is read again."""

from __future__ import annotations

from pathlib import Path

import fixtures_formats

from sameseed import LLM, SamplingParams
from sameseed.models.checkpoint import Checkpoint
from sameseed.quantize._plan import QuantizePlan
from sameseed.quantize._run import quantize
from sameseed.scheme import QuantScheme

PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


def test_a_model_in_it_is_quantized_and_read_again(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
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
