"""The demo runs the embedded pair, and reports the results whatever they are."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from sameseed import hub
from sameseed.cli import demo, main
from sameseed.measure.bench import Run


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, value in (("SHOWN_TOKENS", 8), ("TOKENS", 4), ("MOST_PROMPTS", 1)):
        monkeypatch.setattr(demo, name, value)


def test_without_the_index_the_packaged_pair_answers(capsys, monkeypatch):
    monkeypatch.delenv(hub.MODELS, raising=False)
    assert main(["demo", "--fetch-seconds", "0", "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.count("Same output: yes") == 2 and "Without a trained model" in out and "times as fast" in out


def test_a_trained_model_answers_where_it_is_there(tmp_path, capsys, monkeypatch):
    """The packaged pair's target stands for it: a folder in the place of its file."""
    monkeypatch.setenv(hub.MODELS, str(tmp_path))
    monkeypatch.setattr(demo, "REAL", "embedded")
    monkeypatch.setitem(hub.PACKAGED, "embedded", hub.Packaged("toy", "toy==0", "toy.gguf", ""))
    (tmp_path / "toy.gguf").write_bytes(b"")
    assert main(["demo", "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.count("Same output: yes") == 2 and "greedy, on" in out and "made up" not in out


def test_no_time_to_measure_is_refused(capsys):
    assert main(["demo", "--seconds", "0"]) == 2
    out, err = capsys.readouterr()
    assert "above 0" in err and not out


def test_another_text_is_said_aloud(capsys):
    def run(*tokens):
        done = SimpleNamespace(token_ids=tokens)
        return Run(seconds=1.0, completions=[done])

    same = {"greedy": (run(1, 2, 3), run(1, 2, 3))}
    assert demo.conclude(same, Console()) and "Same output: yes" in capsys.readouterr().out
    assert not demo.conclude({**same, "sampled": (run(1, 2), run(1, 3))}, Console())
    assert "NO" in capsys.readouterr().out
