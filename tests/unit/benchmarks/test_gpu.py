"""`make bench-gpu`: the whole script at toy sizes on the CPU, its memory plan, and its clock."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import gpu
import gpu_clock
import gpu_page
import gpu_parts
import gpu_plan
import gpu_summary
import pytest
import torch

from sameseed.errors import ConfigError
from sameseed.study.passes import cache_bytes
from sameseed.study.shapes import get_shape

SHAPE = get_shape("llama-3.1-8b")
SCRIPT = Path(gpu.__file__)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(tmp_path, *flags):
    """A dry run; returns its records except the last, the last record, and its output."""
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path / "gpu.jsonl"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, end = read(tmp_path / "gpu.jsonl")
    assert lines[0]["part"] == "plan" and end["part"] == "end"
    assert all(x["schema"] == "sameseed.gpu/1" and x["dry_run"] and x["device"] == "cpu" for x in lines)
    assert len(list(tmp_path.iterdir())) <= 3  # records, the error log, the page
    return lines, end, done.stdout


def test_a_dry_run_measures_and_sums_up(tmp_path):
    lines, end, said = run(tmp_path, "--parts", "limits,costs,transformers", "--formats", "w4a16")
    late = {x["what"].partition(":")[0] for x in end["left_out"]}
    costs = [x for x in lines if x["part"] == "costs"]
    passes = [(x["kind"], x["context"], x["rows"]) for x in costs]
    wanted = [(p.kind, p.context, p.rows) for p in gpu_plan.passes(gpu_plan.DRY)]
    assert passes == wanted[: len(passes)] and (passes == wanted or "costs of w4a16" in late)
    assert all(x["c"] == 1 for x in costs if x["kind"] == "chain" and x["rows"] == 1)
    assert all(x["read_share"] > 0 and x["peak_bytes"] > x["weight_bytes"] for x in costs)
    theirs = {x["kind"] for x in lines if x["part"] == "peers"}
    assert theirs == {"decode", "prefill"} or any("transformers" in x["what"] for x in end["left_out"])
    assert "DRY RUN" in said and "c(8) of w4a16" in said and " met" not in said
    shown = (tmp_path / "gpu.html").read_text()
    assert "DRY RUN" in shown and shown.count("<svg") >= 2 and "c(8) of w4a16" in shown


def test_parts_that_fail_cost_the_others_nothing(tmp_path, monkeypatch):
    """A missing library or a dying process costs only its own part: the rest is recorded and shown on the page."""
    worker, out = tmp_path / "worker.py", tmp_path / "gpu.jsonl"
    worker.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import os, types, gpu_worker\n"
        "sys.modules['dying'] = types.SimpleNamespace(die=lambda *_, **__: os._exit(3))\n"
        "gpu_worker.PARTS |= {'costs': ('no_such_library', 'x'), 'micro': ('dying', 'die')}\n"
        "sys.exit(gpu_worker.main())\n"
    )
    monkeypatch.setattr(gpu, "WORKER", worker)
    flags = ["--dry-run", "--out", str(out), "--parts", "costs,micro,limits", "--formats", "w4a16"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    assert gpu.main() == 0
    *lines, end = read(out)
    assert "limits" in {x["part"] for x in lines} and "costs" not in {x["part"] for x in lines}
    why = {x["what"]: x["why"] for x in end["left_out"]}
    assert "no_such_library" in why["costs of w4a16: the rest"] and any(name.startswith("micro") for name in why)
    shown = out.with_suffix(".html").read_text()
    assert "no_such_library" in shown and "Not measured" in shown and "TB/s" in shown


def test_the_page_shows_what_there_is():
    """The page draws what was measured, with the aims; records of an unexpected shape cost one plot."""
    lines = [HEAD, *(costs("chain", m, "w4a16", 2.0 + m, c=1.0 + m / 8) for m in (1, 8, 64))]
    lines += [costs("batch", 1, f, 2.0, read_share=share) for f, share in (("bf16", 0.7), ("fp8-a8", 0.6))]
    lines += [{**SPOKEN, "format": "<w4>", "arm": "eagle", "tokens_per_s": 300.0}, {"part": "host", "kind": "chain"}]
    shown = gpu_page.page([*lines, {"part": "end", "left_out": [{"what": "large", "why": "no time"}]}])
    assert shown.count("<svg") == 4 and shown.count("<polyline") == 2 and shown.count("Not measured") == 2
    assert "&lt;w4&gt; eagle" in shown and "<w4>" not in shown and "large: no time" in shown and "DRY RUN" not in shown
    assert shown.count("v19") == 2 and "MISSED" in shown
    assert "Not measured" in gpu_page.page([])


@pytest.mark.slow
def test_a_dry_run_measures_every_part(tmp_path):
    lines, end, _ = run(tmp_path, "--parts", ",".join(k for k in gpu_plan.KINDS if k != "transformers"))
    late = {x["what"].partition(":")[0] for x in end["left_out"] if x["why"] != "it is not installed"}
    told = {x["part"] for x in lines}
    assert {"limits", "costs", "goodput", "host", "device", "micro", "speculation"} <= told or late
    spoken = [x for x in lines if x["part"] == "speculation"]
    assert {"plain", "draft_model", "eagle", "cascade", "ngram"} <= {x["arm"] for x in spoken} or late
    assert spoken and all(x["equals_plain"] for x in spoken)


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


def test_the_plan_adds_up_what_a_format_takes():
    full = gpu_plan.FULL
    fits = gpu_plan.check_memory(full, SHAPE, "w4a16", "bf16", 80 * 2**30)
    assert 3 * 2**30 < fits["weights"] < 6 * 2**30
    assert fits["cache"] == cache_bytes(SHAPE, "bf16", gpu_plan.passes(full))
    assert gpu_plan.check_memory(full, SHAPE, "w4a16", "bf16", sum(fits.values())) == fits
    with pytest.raises(ConfigError, match=r"weights 3\..*cache.*workspace 2\.0.*smaller --shape"):
        gpu_plan.check_memory(full, SHAPE, "w4a16", "bf16", sum(fits.values()) - 1)


def test_twins_that_do_not_fit_are_left_out(monkeypatch):
    """On a GPU of 24 GiB: the 8B twin in bf16 and its draft fit, 70B in 4 bits does not."""
    monkeypatch.setattr(gpu, "available_memory", lambda: 24 * 2**30)
    args = argparse.Namespace(device="cpu", memory_share=1.0, parts=["limits", "speculation", "large"])
    found = gpu.plan(args, gpu_plan.FULL, SHAPE)
    assert args.parts == ["limits", "speculation"] and list(found["unfit"]) == ["large"]
    assert "70b in w4a16 needs" in found["unfit"]["large"] and "24.0 are free" in found["unfit"]["large"]
    assert 18 * 2**30 < found["speculation"] < 22 * 2**30


@pytest.mark.parametrize("sizes", [gpu_plan.FULL, gpu_plan.DRY])
def test_the_parts_fit_the_run(sizes):
    todo = gpu_plan.parts(sizes, gpu_plan.KINDS)
    total = sizes.seconds["compiling"] + sum(p.seconds for p in todo)
    assert total <= 60 * sizes.minutes and gpu_plan.FULL.minutes < 9
    assert {p.kind for p in todo} | {"compiling"} == set(gpu_plan.KINDS)
    assert gpu_plan.Sizes.from_dict(json.loads(json.dumps(asdict(sizes)))) == sizes


def test_time_that_one_part_leaves_goes_to_the_next():
    part = [gpu_plan.Part("costs", str(i), 10.0) for i in range(3)]
    clock = gpu_plan.Clock(0.5)
    assert 9.9 < clock.share(part[0], part[1:]) <= 10  # no time is to spare
    assert 19.9 < clock.share(part[2], []) <= 20  # 20 s are to spare, but a part gets at most twice its own time
    clock.started -= 25
    assert 4.9 < clock.share(part[2], []) <= 5
    clock.started -= 10
    assert clock.share(part[2], []) == 0


HEAD = {"part": "plan", "sizes": asdict(gpu_plan.FULL), "machine": {"gpu": "a GPU"}, "device": "cuda",
        "dry_run": False, "run": "now", "commit": "c"}  # fmt: skip
SPOKEN = {"part": "speculation", "shape": "llama-3.1-8b", "batch": 1, "policy": "fixed", "host_share": None, "k": 5}


def costs(kind: str, rows: int, format: str, median_ms: float, **more: object) -> dict[str, object]:
    found = {"part": "costs", "kind": kind, "rows": rows, "format": format, "median_ms": median_ms}
    return {"context": 1024, "c": None, "read_share": 0.5, **found, **more}


def test_every_aim_has_its_row():
    lines = [HEAD]
    assert {r.verdict for r in gpu_summary.rows(lines)} == {gpu_summary.NONE}
    batches = ((1, "bf16", 4.0, 0.9), (1, "w4a16", 2.0, 0.5), (16, "bf16", 6.0, 0.6))
    lines += [costs("batch", b, f, ms, read_share=share) for b, f, ms, share in batches]
    lines += [costs("chain", 8, "fp8-a8", 1.0, context=c, c=1.0 + c / 1e4) for c in (512, 8192)]
    lines += [
        {"part": "peers", "engine": "transformers", "kind": "decode", "mode": "sdpa", "batch": b, "median_ms": 24.0}
        for b in (1, 16)
    ]
    spoken = {**SPOKEN, "equals_plain": True, "host_share": 0.05, "timed_by": "PyTorch's profiler"}
    for shape, format, arm, speed in (
        ("llama-3.1-8b", "bf16", "plain", 100.0), ("llama-3.1-8b", "w4a16", "eagle", 600.0),
        ("llama-3.1-70b", "w4a16", "cascade", 60.0), ("llama-3.1-70b", "w4a16", "draft_model", 50.0),
    ):  # fmt: skip
        lines.append({**spoken, "shape": shape, "format": format, "arm": arm, "tokens_per_s": speed, "speedup": 2.4})
    lines += [{"part": "broken", "ops": []}, {"part": "broken", "ops": ["linear (int4)"]}]
    found = {r.what: r for r in gpu_summary.rows(lines)}
    got = {what: (r.got.split(" ")[0], r.verdict) for what, r in found.items()}
    assert got["decoding at batch 1, bf16: share of the copy bandwidth"] == ("90.0%", "met")
    assert got["decoding at batch 1, w4a16: share of the copy bandwidth"] == ("50.0%", "MISSED")
    assert got["c(8) of fp8"] == ("1.051", "MISSED") and got["c(16) of fp8"][1] == gpu_summary.NONE
    assert got["8B w4 with a head or a draft over plain bf16, batch 1"] == ("6.00x", "met")
    assert got["8B w4 with a head or a draft over its own plain"] == ("2.40x", "MISSED")
    assert got["70B w4: cascade over the best two-level setting"] == ("1.20x", "MISSED")
    assert got["host share of a round at batch 1, eagle"] == ("5.0%", "met")
    assert got["plain decoding over transformers bf16 (sdpa), batch 1"] == ("12.00x", "met")
    assert got["plain decoding over transformers bf16 (sdpa), batch 16"] == ("4.00x", "met")
    assert found["kernels that do not compile (computed by the reference)"].got == "1: linear (int4)"
    assert "MISSED" in gpu_summary.text(lines)


@pytest.mark.parametrize(
    "more",
    [
        [{**SPOKEN, "format": "w4a16", "arm": "eagle", "tokens_per_s": 5.0, "speedup": None, "equals_plain": None},
         {**SPOKEN, "format": "bf16", "arm": "plain", "tokens_per_s": 0.0, "speedup": 1.0, "equals_plain": True}],
        [{"part": "costs", "kind": "batch", "rows": 1, "format": "bf16", "median_ms": 0.0, "read_share": None},
         {"part": "peers", "engine": "transformers", "kind": "decode", "mode": "sdpa", "batch": 1, "median_ms": 24.0}],
        [{"part": "limits"}],
        [{"part": "costs", "kind": "chain", "rows": 8, "format": "fp8"}],
    ],
)  # fmt: skip
def test_no_record_costs_the_table(more):
    """The summary table appears whatever fields a record lacks, and where a measured time is 0."""
    said = gpu_summary.text([HEAD, *more])
    assert "host share of a round at batch 1, plain" in said
    assert ("c(32) of fp8" in said) is ("chains: KeyError" not in said)


def test_what_failed_is_no_best_and_is_told():
    spoken = {**SPOKEN, "format": "w4a16", "arm": "eagle", "equals_plain": None, "speedup": None}
    lines = [HEAD, {**spoken, "tokens_per_s": 1e6, "failed": 2}, {**spoken, "tokens_per_s": 9.0, "failed": 0},
             {**spoken, "format": "bf16", "arm": "plain", "equals_plain": True, "tokens_per_s": 3.0}]  # fmt: skip
    found = {r.what: r for r in gpu_summary.rows(lines)}
    assert found["8B w4 with a head or a draft over plain bf16, batch 1"].got.startswith("3.00x")
    failed = found["texts that ended in an error or too early"]
    assert (failed.got, failed.verdict) == ("2", "MISSED")
    assert found["law 1: settings of the twins whose texts differ"].got == "0 of 1"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), False),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_what_breaks_a_device_for_good(error, fault):
    assert gpu_clock.is_fault(error) is fault


def test_one_measurement_that_fails_leaves_the_others(capsys):
    told = []
    with gpu_parts.attempted("a long one", told.append):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
    assert told == [{"omit": "a long one", "why": "OutOfMemoryError: CUDA out of memory."}]
    with pytest.raises(RuntimeError), gpu_parts.attempted("a fault", told.append):
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_a_trace_says_how_long_the_device_worked(tmp_path):
    """The device's busy time: overlapping kernels of two streams count once, the host's events do not count."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 10, "dur": 5},
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 12, "dur": 5},
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 30, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100},
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = gpu_clock.read_trace(path)
    assert found.seconds == pytest.approx(9e-6) and found.top() == {"a": [pytest.approx(0.01), 2], "copy": [0.002, 1]}
    path.write_text(json.dumps({"traceEvents": events[3:]}))
    with pytest.raises(RuntimeError, match="saw nothing"):
        gpu_clock.read_trace(path)
