"""`sameseed quantize` as a user runs it, and the text that its checkpoints write."""

import json
import os
import signal
import time

import pytest
from fixtures_gguf import QWEN2, bpe_keys, trained, write_gguf
from fixtures_quantize import SMALL
from fixtures_server import start
from lawkit import write_model
from safetensors.torch import load_file

from sameseed import LLM, SamplingParams
from sameseed.cli import main


@pytest.fixture(scope="module")
def gguf_file(small_model, tmp_path_factory):
    """The same matrices in 8 bits, as others publish them."""
    keys = bpe_keys(trained(QWEN2, 303), "qwen2", {"<e>": 3}, eos_token_id=2)
    raw, tensors = json.loads((small_model / "config.json").read_text()), load_file(small_model / "model.safetensors")
    raw = {"rope_parameters": {"rope_theta": 10000.0}, **raw}
    path = tmp_path_factory.mktemp("gguf") / "model-Q8_0.gguf"
    return write_gguf(path, raw, tensors, lambda name: "Q8_0", tokenizer=keys)


@pytest.mark.parametrize(("source", "ends"), [("small_model", "auto"), ("gguf_file", "bf16")])
def test_a_checkpoint_writes_the_text_of_the_model_quantized_in_memory(source, ends, tmp_path, request, capsys):
    model, out = request.getfixturevalue(source), tmp_path / "out"
    assert main(["quantize", str(model), "--scheme", "w4a8-g32", "-o", str(out)]) == 0
    # "auto" caches of a quantized checkpoint are bf16.
    in_memory = LLM(str(model), format=f"w4a8-g32,lm_head={ends},model.embed_tokens={ends}", kv_format="bf16")
    prompt = "the sum of all parts"
    expected = in_memory.generate(prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    argv = ["generate", "--model", str(out), "--draft", "none", "--max-tokens", "24", "--temperature", "0", "--json"]
    capsys.readouterr()
    assert main([*argv, "--ignore-eos", prompt]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected[0].text


def test_json_and_tables(small_model, calibration, tmp_path, capsys):
    base = ["quantize", str(small_model), "--method", "rotate+gptq", "--scheme", "w4a16-g32"]
    base += ["--calibration", str(calibration)]
    sizes = ["--samples", "4", "--length", "32"]
    assert main([*base, *sizes, "-o", str(tmp_path / "a"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(tmp_path / "a") and len(found["modules"]) == 14
    assert found == {"folder": str(tmp_path / "a"), **json.loads((tmp_path / "a" / "quantization.json").read_text())}
    budget = ["--budget", "6", "--candidates", "w4a16-g32,w8a16", "-o", str(tmp_path / "b")]
    assert main([*base, *sizes, *budget]) == 0
    captured = capsys.readouterr()
    assert "what got which bits" in captured.out and "model.layers.1.down" in captured.out
    assert "layer 2/2: output error q " in captured.err


def test_an_interruption_says_how_to_go_on(calibration, tmp_path):
    write_model(tmp_path / "model", **{**SMALL, "num_hidden_layers": 12})
    argv = ["quantize", str(tmp_path / "model"), "--method", "awq", "--scheme", "w4a16-g32"]
    argv += ["-o", str(tmp_path / "out"), "--calibration", str(calibration), "--samples", "8", "--length", "64"]
    process = start(*argv, text=True)
    first = tmp_path / "out.partial" / "layer-00000.safetensors"
    while not first.exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130 and "the same command with --resume goes on" in stderr
    assert not (tmp_path / "out").exists()
    assert main([*argv, "--resume", "--json"]) == 0
    assert (tmp_path / "out" / "config.json").exists() and not first.parent.exists()


@pytest.mark.parametrize(("argv", "words"), [(["--scheme", "w4a8"], "-o is missing"), (["-o", "."], "exists")])
def test_bad_usage(small_model, tmp_path, monkeypatch, capsys, argv, words):
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", str(small_model), *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and words in captured.err
    assert not (tmp_path / "out").exists()
