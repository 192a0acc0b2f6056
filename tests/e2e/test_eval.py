"""`sameseed eval` as a user sees it: what it prints where, its records, and its messages for bad input."""

import json

import pytest
from fixtures_quality import write_data
from lawkit import write_model

from sameseed.cli import main
from sameseed.report import record, schemas


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder, max_position_embeddings=1024)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(write_data(tmp_path_factory.mktemp("data")))


@pytest.fixture
def cli(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *argv: (main(["eval", *argv]), *capsys.readouterr())


def test_one_model_all_tasks(cli, model, data, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="GSM8K and MMLU-Pro run through the harness: pip install '.[eval]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    flags = ["--tasks", "perplexity,humaneval,gsm8k,mmlu_pro", "--data", data, "--limit", "2"]
    code, out, err = cli(model, *flags, "--window", "64", "--stride", "32", "--max-tokens", "8", "--out", "r.jsonl")
    assert code == 0
    for words in ("perplexity", "pass@1", "exact match", "accuracy", "bits a byte", "window 64, stride 32"):
        assert words in out
    assert "are examples" in err
    (line,) = record.read(tmp_path / "r.jsonl")
    assert line["config"]["model"] == "tiny" and line["config"]["format"] == "fp32"
    assert [t["task"] for t in line["tasks"]] == ["humaneval", "gsm8k", "mmlu_pro"]


def test_json_is_the_record_and_a_format_changes_it(cli, model, data):
    values = []
    for more in ([], ["--format", "nf4"], ["--kv-format", "int8"], ["--draft", "ngram"]):
        code, out, _ = cli("--model", model, "--data", data, "--window", "64", "--json", *more)
        assert code == 0
        line = json.loads(out)
        schemas.check(line)
        low, high = line["perplexity"]["interval"]
        assert low < line["perplexity"]["value"] < high
        values.append(line["perplexity"]["value"])
    assert len(set(values[:3])) == 3 and values[3] == values[0]


def test_any_text_file(cli, model, tmp_path):
    (tmp_path / "mine.txt").write_text("the sum of all parts is a whole. " * 30)
    code, out, _ = cli(model, "--text", "mine.txt", "--tokens", "100", "--json")
    found = json.loads(out)["perplexity"]
    assert code == 0 and found["text"] == "mine.txt" and found["tokens"] == 99 and not found["whole"]


def test_comparing(cli, model, data, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the sum of\nthe list is\n")
    flags = ["--data", data, "--prompts", str(prompts), "--repeat", "1", "--tokens", "200", "--window", "64"]
    flags += ["--draft", "ngram"]
    code, out, err = cli("--compare", model, f"{model}@w8a8", *flags, "--plot", "page.png", "--out", "r.jsonl")
    assert code == 0, err
    for words in ("over the baseline's", "tokens/s", "accepted as target", "accepted as draft", "w8a8"):
        assert words in out
    assert "bootstrap intervals" in err and "page.png" in err and (tmp_path / "page.png").exists()
    lines = record.read(tmp_path / "r.jsonl")
    assert [line["config"]["label"] for line in lines] == ["tiny", "tiny w8a8"] * 2
    assert not any(line["comparison"] for line in lines[:2]) and lines[2]["comparison"]["as_draft"] is None
    assert 0.5 < lines[3]["comparison"]["as_draft"]["acceptance_rate"] <= 1.0


def test_a_draft_that_never_agrees_is_warned_of(cli, model, data, tmp_path):
    other = tmp_path / "other"
    write_model(other, seed=77)
    flags = ["--data", data, "--num-prompts", "2", "--repeat", "1", "--tokens", "50", "--draft", str(other), "--json"]
    code, out, err = cli("--compare", model, *flags)
    assert code == 0
    assert "WARNING" in err and "near zero" in err
    (line,) = map(json.loads, out.splitlines())
    assert line["comparison"]["warnings"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tasks", "humanevl"], "did you mean 'humaneval'"),
        (["--limit", "0", "--tasks", "gsm8k"], "limit must be at least 1"),
        (["--plot", "x.png"], "--compare"),
        (["--num-prompts", "4"], "leave out --num-prompts"),
        (["--compare", "embedded", "--format", "w4a8"], "MODEL@FORMAT"),
        (["embedded", "--compare", "embedded"], "no other"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(cli, data, flags, says):
    code, out, err = cli(*flags, "--data", data)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
