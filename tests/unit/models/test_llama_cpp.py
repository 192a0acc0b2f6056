"""The embedded model as GGUF files by public tools: our logits equal llama.cpp's up to llama.cpp's rounding."""

import ctypes

import numpy as np
import pytest
import torch
from fixtures_gguf import write_gguf
from fixtures_models import all_logits, load, read_tensors

from sameseed.models.config import read_json
from sameseed.models.loader import resolve_model
from sameseed.tokenizer import Tokenizer

llama_cpp = pytest.importorskip("llama_cpp")
TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15}  # values of the C enum llama_ftype
PROMPT = "Once upon a time there was a little bear who lived in a small house near the forest."


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """GGUF files written by the gguf package and quantized by llama.cpp."""
    source, folder = resolve_model("embedded"), tmp_path_factory.mktemp("gguf")
    raw = read_json(source / "config.json")
    raw["rope_parameters"] = {"rope_theta": raw["rope_theta"]}
    found = {"bf16": folder / "bf16.gguf"}
    write_gguf(found["bf16"], raw, read_tensors(source), lambda name: "BF16", keys={"vocab_size": raw["vocab_size"]})
    llama_cpp.llama_backend_init()
    for name, kind in TYPES.items():
        found[name] = folder / f"{name}.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.nthread, params.ftype = 1, kind
        paths = str(found["bf16"]).encode(), str(found[name]).encode()
        assert llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)) == 0
    return found


# llama.cpp rounds activations to 8 bits if weights are quantized, and keeps its cache in fp16.
@pytest.mark.parametrize(("kind", "mean"), [("bf16", 0.01), ("q8_0", 0.03), ("q4_0", 0.03), ("q4_k_m", 0.05)])
def test_logits_are_those_of_llama_cpp(kind, mean, files):
    ids = Tokenizer.from_folder(resolve_model("embedded")).encode(PROMPT)
    model = llama_cpp.Llama(str(files[kind]), n_ctx=128, n_threads=1, logits_all=True, verbose=False)
    model.eval(ids)
    want = torch.from_numpy(np.array(model.scores[: len(ids)])).float()
    got = all_logits(load(files[kind], "reference"), ids)
    assert want.std() > 1  # otherwise the bounds would mean little
    assert (got - want).abs().mean() < mean and (got - want).abs().max() < 15 * mean
    p, q = want.log_softmax(-1), got.log_softmax(-1)
    assert (p.exp() * (p - q)).sum(-1).mean() < 1e-3
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9
