"""`sameseed profile` as a user sees it, on a tiny shape."""

import json
from pathlib import Path

import pytest
from fixtures_models import tiny_shape

from sameseed.cli import EXIT_INTERRUPTED, main
from sameseed.cli.console import warn_if_busy
from sameseed.measure.passes import TimedModel
from sameseed.report import record

QUICK = "--context 8 --prefill-tokens 16 --batch-sizes 2 --repeats 3 --seconds 0.01 --rows 1,2"


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tiny_shape(monkeypatch)


def run(words):
    return main(["profile", *words.split()])


def test_tables_files_and_record(capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "160")
    assert run(f"--shape tiny --formats bf16,w8a8 {QUICK} --json p.json --plot p.png --record") == 0
    out, err = capsys.readouterr()
    for word in ("tiny", "bf16", "w8a8", "M=1", "M=2", "GB/s", "prefill 16", "batch 2"):
        assert word in out, word
    for name in ("p.json", "p.png", "p.svg", "profile.jsonl"):
        assert name in err.replace("\n", "")
    data = json.loads(Path("p.json").read_text())
    assert [(x["format"], x["rows"]) for x in data["costs"]] == [("bf16", 1), ("bf16", 2), ("w8a8", 1), ("w8a8", 2)]
    assert record.read(Path("benchmarks/results/profile.jsonl")) == [data]
    assert Path("p.png").stat().st_size and Path("p.svg").stat().st_size


def test_json_on_standard_output(capsys):
    assert run(f"--shape tiny {QUICK} --json -") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["costs"][0]["c"] == 1.0 and data["threads"] >= 1


def test_a_draft_may_be_a_model_by_any_name(capsys):
    assert run(f"--shape tiny {QUICK} --json - --draft embedded-draft") == 0
    assert json.loads(capsys.readouterr().out)["draft"]["shape"]["name"] == "embedded-draft"


def test_an_interruption_writes_what_there_is(capsys, monkeypatch):
    seconds = TimedModel.seconds

    def stops_at_the_prompt(self, job):
        if job.kind == "prefill":
            raise KeyboardInterrupt
        return seconds(self, job)

    monkeypatch.setattr(TimedModel, "seconds", stops_at_the_prompt)
    assert run(f"--shape tiny {QUICK} --json p.json") == EXIT_INTERRUPTED
    data = json.loads(Path("p.json").read_text())
    assert data["interrupted"] is True and len(data["costs"]) == 2 and data["prefill"] == []
    assert "kept" in capsys.readouterr().err


def test_a_busy_machine_is_named(capsys, monkeypatch):
    for load, said in ((0.0, False), (99.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        warn_if_busy()
        assert ("machine is busy (load 99.0" in capsys.readouterr().err) is said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shape tinny", "no shape 'tinny'"), ("", "either a shape"),
        (f"--shape tiny {QUICK} --draft x", "give a folder, a GGUF file"),
        ("--shape tiny --rows 1,x", "--rows takes whole numbers"), ("--shape tiny --plot p.pdf", "not as '.pdf'"),
        ("--shape tiny --json .", "another with --json"),
        ("--shape tiny --json /proc/none/p.json", "choose another with --json"),
    ],
)  # fmt: skip
def test_errors(words, said, capsys):
    assert run(words) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
