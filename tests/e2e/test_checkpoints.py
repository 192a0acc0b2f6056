"""A GGUF file as a user runs it, and a format from an installed package."""

import json

import fixtures_formats
import pytest
import torch
from fixtures_gguf import write_gguf
from fixtures_models import read_tensors

from sameseed import LLM, SamplingParams
from sameseed.cli import main
from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import read_json
from sameseed.models.loader import resolve_model
from sameseed.quantize._run import QuantizePlan, quantize
from sameseed.scheme import QuantScheme
from sameseed.tokenizer import Tokenizer

PROMPT = "Once upon a time"
TOKENS = 24


@pytest.fixture(scope="module")
def embedded():
    folder = resolve_model("embedded")
    if not (folder / "model.safetensors").exists():
        pytest.skip("the embedded weights are not in this checkout; `sameseed train` makes them")
    return folder


def test_generate_runs_a_gguf_file(embedded, tmp_path, capsys):
    """`sameseed generate --model model.gguf`: the embedded model as bfloat16 GGUF with its tokenizer, the same text."""
    raw = read_json(embedded / "config.json")
    raw["rope_parameters"] = {"rope_theta": raw["rope_theta"]}
    tokenizer = json.loads((embedded / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {t["content"] for t in tokenizer["added_tokens"]}

    def keys(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")  # splits these words like the model's own expression
        writer.add_token_list(vocabulary)
        writer.add_token_types([3 if t in special else 1 for t in vocabulary])
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
        writer.add_bos_token_id(raw["bos_token_id"])
        writer.add_eos_token_id(raw["eos_token_id"])
        writer.add_add_bos_token(True)
        writer.add_chat_template(Tokenizer.from_folder(embedded).chat_template)

    path = write_gguf(tmp_path / "model.gguf", raw, read_tensors(embedded), lambda n: "BF16", tokenizer=keys)
    said = []
    for model in ("embedded", str(path)):
        assert main(["generate", PROMPT, "--model", model, "--max-tokens", str(TOKENS)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len(said[0]) > 20
    # Quantized, with the embedded draft: speculative decoding must not change its tokens either.
    small = write_gguf(tmp_path / "small.gguf", raw, read_tensors(embedded), lambda n: "Q4_0", tokenizer=keys)
    params = SamplingParams(max_tokens=TOKENS)
    plain = LLM(str(small)).generate([PROMPT], params)[0]
    drafted = LLM(str(small), draft="embedded-draft").generate([PROMPT], params)[0]
    assert plain.token_ids == drafted.token_ids and torch.is_tensor(torch.tensor(plain.token_ids))


PARAMS = SamplingParams(temperature=0.0, max_tokens=6)


def test_a_model_in_it_is_quantized_and_read_again(tmp_path):
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
