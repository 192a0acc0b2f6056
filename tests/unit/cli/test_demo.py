"""The demo runs the embedded pair, then its twin at another size, and reports the results whatever they are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sameseed import demo, hub
from sameseed.cli import main
from sameseed.engine import memory
from sameseed.study.measure import Run

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 10,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "vocab_size": 4224,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SHOWN_TOKENS", 8), ("TOKENS", 4), ("MOST_PROMPTS", 1)):
        monkeypatch.setattr(demo, name, value)


def test_both_parts_end_in_the_same_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    assert main(["demo", "--shape", str(tmp_path), "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.count("Same output: yes") == 2 and "NO" not in out
    for words in (
        "draft tokens accepted: ",
        " passes of the model ",
        "instead of",
        "They are made up",
        "of four in a row",
        "times as fast",
        "Too few prompts to tell",
    ):
        assert words in out, words


def test_too_little_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**29)
    assert main(["demo", "--fetch-seconds", "0"]) == 0  # with the embedded pair only
    out = capsys.readouterr().out
    assert "Same output: yes" in out and "Real size is left out: weights in w4a8 take 0." in out and "0.5 GiB" in out
    assert main(["demo", "--shape", "llama-3.1-8b"]) == 2
    err = capsys.readouterr().err
    assert "take a smaller model" in err


def test_a_trained_model_answers_where_it_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packaged pair's target stands for it: a folder in the place of its file."""
    monkeypatch.setenv(hub.MODELS, str(tmp_path))
    monkeypatch.setattr(demo, "REAL", "embedded")
    monkeypatch.setitem(hub.PACKAGED, "embedded", hub.Packaged("toy", "toy==0", "toy.gguf", ""))
    (tmp_path / "toy.gguf").write_bytes(b"")
    assert main(["demo", "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.count("Same output: yes") == 2 and "greedy, on" in out and "made up" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fetch-seconds 0 --shape llama-9b", "no shape 'llama-9b'"),
        ("--shape smollm2-135m", "choose a larger shape"),
        ("--seconds 0", "above 0"),
    ],
)
def test_errors_come_before_anything_is_shown(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert said in err and not out


def test_another_text_is_said_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*tokens: int) -> Run:
        done: Any = SimpleNamespace(token_ids=tokens)
        return Run(seconds=1.0, completions=[done])

    same = {"greedy": (run(1, 2, 3), run(1, 2, 3))}
    assert demo.conclude(same, Console()) and "Same output: yes" in capsys.readouterr().out
    assert not demo.conclude({**same, "sampled": (run(1, 2), run(1, 3))}, Console())
    assert "NO" in capsys.readouterr().out
