"""schemathesis with the OpenAPI document: valid requests are accepted, the others refused, and no status is 5xx."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_server import serving
from tokenizers import Tokenizer, decoders, models, normalizers

pytest.importorskip("schemathesis")
KEY = "key-of-the-fuzz"
CHECKS = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]  # replaced in fixtures_fuzz.py


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def with_sentences(folder, made):
    """A copy of a model with a tokenizer as sentencepiece has it, and a template with tools."""
    shutil.copytree(folder, made)
    (end,) = {json.loads((folder / "config.json").read_text())["eos_token_id"]}
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁a", "a", "e", "▁the", '{"', '":']
    pieces.insert(end, "</s>")
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(fallback)
    backend.add_special_tokens(["</s>"])
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    backend.save(str(made / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "</s>"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module", params=["bytes", "sentences"])
def server(pair_folders, tmp_path_factory, request):
    model, draft = pair_folders
    flags = ["--draft", str(draft)]
    if request.param == "sentences":
        model, flags = with_sentences(model, tmp_path_factory.mktemp("fuzz") / "target"), ["--draft", "ngram"]
    flags += ["--model", str(model), "--served-model-name", "tiny"]
    with serving(*flags, "--max-model-len", "64", env={"SAMESEED_API_KEY": KEY}) as made:
        yield made
    assert not [entry for entry in made.log if "trace" in entry]


def fuzz(server, folder, *more):
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *CHECKS, "--mode", "all"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--no-color", "--generation-deterministic", *more]
    command += ["--request-timeout", "60", "--max-response-time", "60"]  # its own 10 s are short on a busy machine
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "fixtures_fuzz", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_a_few_examples(server, tmp_path):
    fuzz(server, tmp_path, "--phases", "fuzzing", "--max-examples", "4")


@pytest.mark.slow
def test_two_hundred_examples_an_operation(server, tmp_path):
    fuzz(server, tmp_path, "--phases", "examples,coverage,fuzzing", "--max-examples", "200")
