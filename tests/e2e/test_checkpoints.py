"""A format from an installed package: a model is quantized in memory and on disk, and read again."""

import fixtures_formats

from sameseed import LLM, SamplingParams
from sameseed.models.checkpoint import Checkpoint
from sameseed.quantize._run import QuantizePlan, quantize
from sameseed.scheme import QuantScheme

PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


def test_a_model_in_an_installed_format(tmp_path):
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
