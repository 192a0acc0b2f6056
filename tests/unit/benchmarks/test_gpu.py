"""`make bench-gpu`: the whole script at toy sizes on the CPU, its memory plan, and its clock."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import gpu
import gpu_plan
import gpu_plot
import pytest

from foretoken.errors import ConfigError
from foretoken.study.passes import Pass, cache_bytes
from foretoken.study.shapes import get_shape

SHAPE = get_shape("llama-3.1-8b")
SCRIPT = Path(gpu.__file__)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_dry_run_measures_every_part(tmp_path):
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path / "gpu.jsonl")]
    command += ["--parts", "costs,vllm,speculation,large"]  # importing transformers alone can take half a minute
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    lines = read(tmp_path / "gpu.jsonl")
    end = lines[-1]
    assert [x["part"] for x in lines[:2]] == ["plan", "limits"] and end["part"] == "end"
    assert all(x["schema"] == "foretoken.gpu/1" and x["dry_run"] and x["device"] == "cpu" for x in lines)
    late = {x["what"] for x in end["left_out"] if "were over" in x["why"] or x["why"] == "no time"}
    costs = [x for x in lines if x["part"] == "costs"]
    for format in gpu_plan.DRY.formats:
        passes = [(x["kind"], x["context"], x["rows"]) for x in costs if x["format"] == format]
        wanted = [(p.kind, p.context, p.rows) for p in gpu_plan.passes(gpu_plan.DRY)]
        assert passes == wanted[: len(passes)] and (passes == wanted or f"costs of {format}" in late)
    assert all(x["c"] == 1 for x in costs if x["kind"] == "chain" and x["rows"] == 1)
    assert all(x["read_share"] > 0 and x["peak_bytes"] > x["weight_bytes"] for x in costs)
    spoken = [x for x in lines if x["part"] == "speculation"]
    assert {"plain", "draft_model", "eagle", "cascade"} <= {x["arm"] for x in spoken} or late & {"speculation", "large"}
    assert spoken and all(x["equals_plain"] for x in spoken)
    assert all(x["acceptance_rate"] for x in spoken if x["arm"] == "draft_model")
    assert {"what": "vllm", "why": "it is not installed"} in end["left_out"] or "vllm" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--memory-share 1e-6", "GiB are free"),
        ("--device cuda:99", "cuda:99"),
        ("--parts cots", "no part cots"),
        ("--batches a", "whole numbers"),
        ("--formats bf17", "bf16"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_work_starts(tmp_path, flags, said, monkeypatch, capsys):
    out = tmp_path / "gpu.jsonl"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(out), *flags.split()])
    assert gpu.main() == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_the_plan_names_the_largest_that_fits():
    full = gpu_plan.FULL
    fits = gpu_plan.check_memory(full, SHAPE, "w4a16", "bf16", 80 * 2**30)
    assert 3 * 2**30 < fits["weights"] < 6 * 2**30
    assert fits["cache"] == cache_bytes(SHAPE, "bf16", gpu_plan.passes(full))
    free = fits["weights"] + full.workspace + 3 * 2**30
    with pytest.raises(ConfigError, match=r"batches of (\d+) at context 1024, or contexts of (\d+)") as error:
        gpu_plan.check_memory(full, SHAPE, "w4a16", "bf16", free)
    found = re.search(r"batches of (\d+) .* contexts of (\d+)", str(error.value))
    assert found is not None
    batch, context = int(found[1]), int(found[2])
    for count, holds in ((batch, True), (batch + 1, False)):
        assert (cache_bytes(SHAPE, "bf16", [Pass("batch", 1024, count)]) <= 3 * 2**30) is holds
    for length, holds in ((context, True), (context + 1, False)):
        assert (cache_bytes(SHAPE, "bf16", [Pass("chain", length, 64)]) <= 3 * 2**30) is holds
    with pytest.raises(ConfigError, match="smaller --shape"):
        gpu_plan.check_memory(full, SHAPE, "bf16", "bf16", 10 * 2**30)


def test_twins_that_do_not_fit_are_left_out(monkeypatch):
    """On a GPU of 24 GiB: the 8B twin in bf16 and its draft fit, 70B in 4 bits does not."""
    monkeypatch.setattr(gpu, "available_memory", lambda: 24 * 2**30)
    args = argparse.Namespace(device="cpu", memory_share=1.0, parts=["vllm", "speculation", "large"])
    found = gpu.plan(args, gpu_plan.FULL, SHAPE)
    assert args.parts == ["vllm", "speculation"] and list(found["unfit"]) == ["large"]
    assert "70b in w4a16 needs" in found["unfit"]["large"] and "24.0 are free" in found["unfit"]["large"]
    assert 18 * 2**30 < found["speculation"] < 22 * 2**30


@pytest.mark.parametrize("sizes", [gpu_plan.FULL, gpu_plan.DRY])
def test_the_parts_fit_the_run(sizes):
    total = sum(sizes.seconds.values()) + (len(sizes.formats) - 1) * sizes.seconds["costs"]
    assert total <= 60 * sizes.minutes and sizes.minutes < 9


def test_a_part_ends_in_its_time_and_the_next_one_runs():
    clock = gpu_plan.Clock(1.0)
    with clock.part("endless", 0.2):
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # who catches faults must not catch the alarm
                raise AssertionError from None
    with clock.part("broken", 5):
        raise ValueError("no luck\nat all")
    with clock.part("sound", 5):
        time.sleep(0.3)
    assert [x["what"] for x in clock.left_out] == ["endless", "broken"]
    assert clock.left_out[1]["why"] == "ValueError: no luck"
    spent = gpu_plan.Clock(0.0)
    with spent.part("late", 5):
        time.sleep(0.5)
    assert spent.left_out == [{"what": "late", "why": "no time"}]


def test_series_of_the_plot():
    lines = [
        {"part": "costs", "kind": "chain", "format": f, "context": c, "rows": r, "c": r * 1.5}
        for f in ("bf16", "fp8") for c in (8, 9) for r in (1, 2)
    ]  # fmt: skip
    assert gpu_plot.series([*lines, {"part": "end"}], "chain", "c", 8) == {
        "bf16": [(1, 1.5), (2, 3.0)],
        "fp8": [(1, 1.5), (2, 3.0)],
    }
