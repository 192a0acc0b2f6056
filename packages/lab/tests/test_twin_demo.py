"""The demo at real size runs the packaged pair, then its twin, and reports the results whatever they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sameseed import demo
from sameseed.cli import main
from sameseed.engine import memory

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 384, "intermediate_size": 768, "num_hidden_layers": 10,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "vocab_size": 4224,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SHOWN_TOKENS", 8), ("TOKENS", 4), ("MOST_PROMPTS", 1)):
        monkeypatch.setattr(demo, name, value)


def test_both_parts_end_in_the_same_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    assert main(["twin-demo", "--shape", str(tmp_path), "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.count("Same output: yes") == 2 and "NO" not in out and "times as fast" in out


def test_too_little_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 2**29)
    assert main(["twin-demo", "--shape", "llama-3.1-8b"]) == 2
    assert "take a smaller model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shape llama-9b", "no shape 'llama-9b'"),
        ("--shape smollm2-135m", "choose a larger shape"),
        ("--seconds 0", "above 0"),
    ],
)
def test_errors_come_before_anything_is_shown(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin-demo", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert said in err and not out
