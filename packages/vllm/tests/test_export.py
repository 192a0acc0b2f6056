"""A profile in other engines' terms: the command has what they support, and the rest is reported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sameseed.cli import main
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.hub import PACKAGED
from sameseed.plan.profile_file import write
from sameseed.tuned import AcceptRates, Chosen, Scope, Tuned, TunedMachine, TunedModel
from sameseed_vllm.export import STALLS, UNTESTED, export

CHOSEN = Chosen(draft="embedded-head", num_draft_tokens=5, max_num_seqs=16, threads=3)
TABLE = ((1, 5), (3, 2), (9, 0))


def tuned(chosen: Chosen = CHOSEN) -> Tuned:
    rates = AcceptRates((0.8, 0.7), (0.8, 0.56), 2.36, 400)
    return Tuned(TunedMachine("c", 3), TunedModel("embedded"), chosen, Scope(context=512), acceptance=rates)


def with_(**changes: object) -> Tuned:
    return tuned(dataclasses.replace(CHOSEN, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draft", "method", "tested"),
    [("embedded-head", "eagle3", True), ("block:org/DFlash", "dflash", True), ("org/small", "draft_model", False)],
)
def test_vllm_gets_the_table_by_batch(draft: str, method: str, tested: bool) -> None:
    made = export(with_(draft=draft, by_batch=TABLE, policy="goodput"), "vllm")
    words = made.command
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert (config["method"], config["num_speculative_tokens"]) == (method, 5)
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 2, 5], [3, 8, 2], [9, 16, 0]]
    assert words[words.index("--max-num-seqs") + 1] == "16" and made.environment["OMP_NUM_THREADS"] == "3"
    assert STALLS in made.notes and (UNTESTED in made.notes) != tested
    assert any("goodput" in note for note in made.notes)


def test_plain_decoding_stays_plain() -> None:
    for engine in ("vllm", "sglang", "llama.cpp"):
        for chosen in (Chosen(draft="none"), Chosen(draft="embedded-head", num_draft_tokens=0)):
            assert not any("spec" in word for word in export(tuned(chosen), engine).command)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"format": "w4a8"}, "w4a8"), ({"kv_format": "qoq"}, "kv-format qoq"),
        ({"draft_format": "w4a8"}, "draft-format w4a8"), ({"draft": "suffix + embedded-head"}, "alone"),
        ({"draft": "ngram > embedded-draft"}, "embedded-draft alone"), ({"draft": "self_quant"}, "plain decoding"),
        ({"draft_options": {"num_heads": 9}}, "num_heads"), ({"policy": "goodput"}, "goodput"),
        ({"draft": "ngram", "by_batch": TABLE}, "from 9: off"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_said(engine: str, changes: dict[str, object], word: str) -> None:
    if engine == "llama.cpp" and "draft_format" in changes:
        word = "Q4_0"
    assert any(word in note for note in export(with_(**changes), engine).notes)


@pytest.mark.parametrize(
    ("format", "told"), [("w4a8", "w4a8"), ("q6_k-a8", "w8a8"), ("bf16", "w8a8"), ("auto", "w8a8")]
)
def test_a_draft_is_exported_in_the_format_that_it_took(format: str, told: str) -> None:
    notes = " ".join(export(with_(format=format), "sglang").notes)
    assert f"--draft-format {told}: a draft is read as stored" in notes


def test_llama_cpp_has_k_quants() -> None:
    words = export(with_(format="q4_k-a8"), "llama.cpp").command
    assert words[words.index("-m") + 1].endswith("-Q4_K_M.gguf")
    assert words[words.index("-md") + 1].endswith("-Q4_0.gguf"), "in four bits, as its target"


def test_sglang_says_the_same() -> None:
    words = export(with_(kv_format="fp8", format="bf16"), "sglang").command
    flags = dict(zip(words[3:-1:2], words[4::2], strict=False))
    assert flags["--speculative-algorithm"] == "EAGLE3" and flags["--dtype"] == "bfloat16"
    assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("5", "6")
    assert flags["--max-running-requests"] == "16" and flags["--kv-cache-dtype"] == "fp8_e4m3"
    assert "NGRAM" in export(with_(draft="ngram"), "sglang").command
    assert "STANDALONE" in export(with_(draft="embedded-draft"), "sglang").command


@pytest.mark.parametrize("engine", ["sglang", "llama.cpp"])
def test_a_parallel_draft_writes_a_token_a_pass_elsewhere(engine: str) -> None:
    made = export(with_(draft="parallel:embedded-draft"), engine)
    assert any("has no parallel drafting" in note for note in made.notes)
    assert not any("parallel" in note for note in export(with_(draft="embedded-draft"), engine).notes)


def test_llama_cpp_says_the_same() -> None:
    made = export(with_(kv_format="int8", format="w8a8"), "llama.cpp")
    text = " ".join((*made.command, *made.notes))
    assert "-m target-Q8_0.gguf" in text and "--spec-type draft-eagle3 -md head-Q8_0.gguf --spec-draft-n-max 5" in text
    assert "-ctk q8_0 -ctv q8_0" in text and "-np 16 -c 8192 -t 3" in text and "convert_hf_to_gguf.py" in text
    made = export(with_(draft="embedded-draft"), "llama.cpp")
    assert "draft-simple" in made.command and "sameseed quantize" not in " ".join(made.notes)


FILE = "-m target-Q4_1.gguf"


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("org/m-GGUF:Q4_K_M", {}, "-hf org/m-GGUF:Q4_K_M"), ("org/m-GGUF", {}, "-hf org/m-GGUF"),
        ("org/m/a.gguf", {}, "-hf org/m -hff a.gguf"), ("./some/a.gguf", {}, "-m some/a.gguf"),
        ("embedded", {"draft": "org/m/a.gguf"}, "-hfd org/m -md a.gguf"), ("smollm2", {}, "-m {folder}/SmolLM2"),
        ("embedded", {"draft": "smollm2"}, "-md {folder}/SmolLM2"), ("embedded", {"format": "q4_1-a8"}, FILE),
    ],
)  # fmt: skip
def test_llama_cpp_finds_the_files_of_our_names(
    model: str, changes: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PACKAGED["smollm2"].file).touch()
    monkeypatch.setenv("SAMESEED_MODELS", str(tmp_path))
    made = export(dataclasses.replace(with_(**changes), model=TunedModel(model)), "llama.cpp")
    assert words.format(folder=tmp_path) in " ".join(made.command)
    if model == "smollm2":
        with pytest.raises(ModelLoadError, match="give the checkpoint's folder"):
            export(dataclasses.replace(tuned(), model=TunedModel(model)), "vllm")


def test_a_gguf_file_measured_in_another_format_is_said() -> None:
    made = dataclasses.replace(with_(format="w8a8"), model=TunedModel("org/m/a.gguf"))
    assert "--format w8a8: the file is read as stored" in " ".join(export(made, "llama.cpp").notes)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tuned(), tmp_path / "p.toml")
    argv = ["export", "vllm", str(tmp_path / "p.toml")]
    assert main([*argv, "--out", str(tmp_path / "files")]) == 0
    found = capsys.readouterr()
    assert found.out.startswith("OMP_NUM_THREADS=3 VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve ")
    rates = json.loads((tmp_path / "files" / "speculation_profile.json").read_text())
    assert rates["conditional_accept_rates"] == [0.8, 0.7] and "speculation_profile.json" in found.err
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"][:2] == ["vllm", "serve"]
    with pytest.raises(ConfigError, match="there are vllm"):
        export(tuned(), "ollama")
