"""The comparison with other engines: orchestrator, workers and tables, with a stand-in engine that only waits."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arms
import checkpoints
import client
import environments
import measure
import pytest
import run
import table
import torch
from arms import Arm
from engines.sameseed import Engine

from sameseed.models.loader import open_checkpoint, read_config
from sameseed.studies import rivals

PEERS = Path(run.__file__).parent
PLAN = measure.Plan(rows=(1, 4, 8), rounds=3, slow_rounds=2, batch_steps=4)
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def fake(name: str, **options: object) -> Arm:
    return Arm(name, "fake", "none", 0.1, options)


def start(tmp_path: Path, engine: str = "fake") -> client.Client:
    return client.Client(Path(sys.executable), engine, tmp_path / "worker.log")


def load(arm: Arm) -> dict[str, Any]:
    return {"model": "", "threads": 1, "max_len": 64, "batch": 2, "options": dict(arm.options)}


def run_group(tmp_path: Path, *group: Arm, plan: measure.Plan = PLAN) -> list[measure.Result]:
    heard: list[str] = []
    found: list[measure.Result] = measure.Group(group, plan, lambda arm: start(tmp_path), heard.append).run(load)
    return found


def test_every_engine_measures_everything_in_every_round(tmp_path: Path) -> None:
    results = run_group(tmp_path, fake("a"), fake("b", ms=0.5))
    for result in results:
        assert {what: len(times) for what, times in result.seconds.items()} == {
            "rows 1": 3,
            "rows 4": 3,
            "rows 8": 3,
            "prefill": 2,
            "batch": 2,
        }
        assert not result.missing and result.peak_rss > 0 and result.logits is not None and len(result.logits) == 64
        assert all(second > 0 for times in result.seconds.values() for second in times)
    assert results[0].logits == results[1].logits  # all engines see the same prompt


def text_record(tmp_path: Path, *group: Arm) -> dict[str, Any]:
    """The record of arms that write three texts; the last text ends at once."""
    prompts: list[list[int]] = [[5, 6], [7], []]
    texts = measure.TextGroup(group, PLAN, lambda arm: start(tmp_path), lambda text: None, prompts)
    about = {"model": "", "draft": None, "threads": 1, "max_len": 64}
    results = texts.run(lambda arm: {**about, "options": dict(arm.options)})
    plan = {**PLAN.__dict__, "rows": []}
    made = {**record("embedded"), "plan": plan, "prompts": {"from": "some prompts", "count": 3}}
    return {**made, "groups": [run.make_group("all", results, PLAN)]}


def test_texts_are_written_in_turns_and_held_to_plain_decoding(tmp_path: Path) -> None:
    told = fake("told")
    wrong = arms.guessing(told, "dice", way="dice", text=[9])
    made = text_record(tmp_path, told, arms.guessing(told, "n-grams", way="n"), wrong, fake("broken", fail="write"))
    plain, guessing, wrongly, broken = made["groups"][0]["arms"]
    assert plain["rows"] == [] and plain["texts"]["plain"] is None
    assert plain["texts"]["tokens"] == [2, 1, 0] * PLAN.slow_rounds == guessing["texts"]["tokens"]
    assert guessing["name"] == "told + n-grams" and guessing["texts"]["plain"]["name"] == "told"
    assert (guessing["texts"]["plain"]["same"], guessing["texts"]["plain"]["texts"]) == (6, 6)
    assert wrongly["texts"]["plain"]["same"] == 0, "none is the text of plain decoding"
    assert broken["texts"] is None and broken["missing"] == {"texts": "RuntimeError: told to fail at write"}
    made["groups"][0]["arms"][0]["engine"] = "sameseed"
    text = table.render(json.loads(json.dumps(made)))
    assert "| told + n-grams |" in text and "| 6 of 6 |" in text and "told: times faster" in text
    assert "after 3 prompts (some prompts)" in text and "| broken |" not in text
    report = rivals.report([{**r, "cell": "texts"} for r in rivals.split(made)])
    assert [t.title for t in report.tables] == ["Texts"] and len(report.tables[0].rows) == 3
    assert any("told + " in finding for finding in report.findings)


def test_arms_with_a_parallel_draft_need_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = run.arguments(["--shape", "twin-1b", "--home", str(tmp_path), "--work", str(tmp_path)])
    groups = {"AMD PACE": arms.TEXTS["twin-1b"]["AMD PACE"]}
    kept = run.without_parallel(groups, options)["AMD PACE"]
    assert [arm.name for arm in kept] == ["sameseed bf16", "sameseed bf16 + suffix + head", "AMD PACE bf16"]
    assert capsys.readouterr().out.count("PEERS_PARALLEL") == 2
    checkpoints.path_of(tmp_path, "twin-1b-parallel", "hf-bf16").mkdir(parents=True)
    assert run.without_parallel(groups, options) == groups


def test_a_finding_compares_each_engine_with_our_fastest_format() -> None:
    def passes(engine: str, label: str, ms: float) -> dict[str, Any]:
        config = {"label": label, "group": "all", "shape": "some shape"}
        rows = [{"rows": 1, "ms": [ms, ms], "median": ms}]
        return {"run": "", "cell": "", "engine": engine, "config": config, "rows": rows, "prefill": None, "batch": None}

    ours = [passes("sameseed", "ours slow", 3.0), passes("sameseed", "ours fast", 2.0)]
    report = rivals.report([*ours, passes("near", "near it", 4.0), passes("far", "far it", 9.0)])
    assert report.findings == ["One row: the nearest is near it; ours fast is 2.00 times as fast."]
    assert report.plots[0].panels[0].title == "beside near, all: ms of a pass"


def test_an_engine_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    group = (fake("broken", fail="load"), fake("half", fail="rows"), fake("single", batch=False), fake("well"))
    broken, half, single, well = run_group(tmp_path, *group)
    assert broken.failed and broken.missing == {"load": "RuntimeError: told to fail at load"} and not broken.seconds
    assert set(half.missing) == {"rows 1", "rows 4", "rows 8"} and len(half.seconds["prefill"]) == 2
    assert single.missing == {"batch": "one sequence only"} and len(single.seconds["rows 8"]) == 3
    assert not well.missing and len(well.seconds["rows 8"]) == 3
    record = measure.as_record(broken, PLAN, None)
    assert record["rows"] == [] and record["batch"] is None and record["load_s"] is None


def test_a_time_that_nothing_can_have_taken_is_no_figure(tmp_path: Path) -> None:
    (result,) = run_group(tmp_path, fake("odd", backwards=True))
    assert "batch" not in result.seconds and "-1" in result.missing["batch"] and len(result.seconds["prefill"]) == 2
    assert measure.as_record(result, PLAN, None)["batch"] is None


def test_who_begins_rotates(tmp_path: Path) -> None:
    group = measure.Group([fake(name) for name in "abc"], PLAN, lambda arm: start(tmp_path), lambda text: None)
    orders = [[result.arm.name for result in group._in_turn(i)] for i in range(4)]
    assert orders == [list("abc"), list("bca"), list("cab"), list("abc")]


@linux
def test_an_idle_worker_is_frozen(tmp_path: Path) -> None:
    worker = start(tmp_path)
    try:
        worker.ask(60, do="load", **load(fake("a")))
        state = Path(f"/proc/{worker.process.pid}/stat")
        wait_until(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "T")
        assert worker.ask(60, do="prefill", tokens=4)["seconds"] > 0
        assert "libraries print" in worker.log.read_text()  # not in the protocol's stream
    finally:
        worker.close()
    assert worker.process.returncode == 0


@linux
def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    worker = start(tmp_path)
    group = lambda: [s for s in Path("/proc").glob("[0-9]*/stat") if f" {worker.process.pid} " in stat_of(s)]  # noqa: E731
    about = {"model": "", "draft": None, "threads": 1, "max_len": 64, "options": {"helper": "600"}}
    worker.ask(60, do="load_writer", **about)
    assert len(group()) == 2
    worker.close()
    wait_until(lambda: not group())


def stat_of(file: Path) -> str:
    """The state, parent and group of a process; empty for a process that has ended."""
    try:
        return " ".join(file.read_text().rsplit(")", 1)[1].split()[1:3]) + " "
    except OSError:
        return ""


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come true within 5 s")


def test_a_worker_that_dies_or_hangs_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(client.WorkerError, match="ended with status 1 at 'load': ModuleNotFoundError: No module named"):
        start(tmp_path, "no_such_engine").ask(60, do="load", **load(fake("a")))
    worker = start(tmp_path)
    worker.ask(60, do="load", **load(fake("a", ms=1e6)))
    with pytest.raises(client.WorkerError, match="no answer to 'prefill' within"):
        worker.ask(0.2, do="prefill", tokens=4)
    assert worker.process.returncode == -signal.SIGKILL
    assert "no command" in str(ask_once(tmp_path, do="dance"))


def ask_once(tmp_path: Path, **message: Any) -> dict[str, Any]:
    worker = start(tmp_path)
    try:
        answer: dict[str, Any] = worker.ask(60, **message)
        return answer
    finally:
        worker.close()


def made_up(name: str, engine: str, ms: list[float], rate: float | None) -> measure.Result:
    result = measure.Result(Arm(name, engine, "none", 1.0), {"seconds": 2.0, "versions": {engine: "1"}, "settings": {}})
    result.seconds = {"rows 1": [m / 1e3 for m in ms], "rows 8": [m / 500 for m in ms]}
    if rate is None:
        result.missing = {"prefill": "no such thing"}
    else:
        result.seconds["prefill"] = [PLAN.prefill / rate] * 2
    result.peak_rss = 3 << 30
    return result


def record(shape: str = "tiny") -> dict[str, Any]:
    ours, theirs = made_up("sameseed x", "sameseed", [1, 2, 4], 100.0), made_up("other", "other", [3, 4, 40], None)
    machine = {"cpu": "a processor", "cores": 2}
    plan = {**PLAN.__dict__, "rows": list(PLAN.rows)}
    group = run.make_group("all", [ours, theirs], PLAN)
    found = {"schema": run.SCHEMA, "run": "2026-01-01", "commit": "c0ffee", "machine": machine, "shape": shape}
    return found | {"plan": plan, "groups": [group]}


def test_the_table_shows_medians_and_ratios_within_rounds() -> None:
    text = table.render(json.loads(json.dumps(record())))
    assert "| sameseed x | 2.0 | - | 4.0 | 2.00 | 100 | - | 2.0 | 3.0 |" in text
    assert "| other | 4.0 | - | 8.0 | 2.00 | - | - | 2.0 | 3.0 |" in text
    # Ratios of the rounds are 3, 2 and 10; the ratio of the medians would be 2.
    assert "| sameseed x / other | 3.00 | 3.00 | - | - |" in text
    assert "other: no prefill: no such thing" in text and "commit c0ffee" in text


def test_the_newest_record_of_each_shape_counts(tmp_path: Path) -> None:
    file = tmp_path / "peers.jsonl"
    lines = [record("a"), record("b"), {**record("a"), "commit": "newer"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(r["shape"], r["commit"]) for r in table.newest(file)] == [("a", "newer"), ("b", "c0ffee")]
    file.write_text('{"schema": "other"}\n')
    with pytest.raises(ValueError, match="line 1: schema 'other'"):
        table.newest(file)


def test_percentiles_and_correlation() -> None:
    assert measure.spread([5, 1, 3, 2, 4]) == {"median": 3, "p10": 1, "p90": 5}
    assert measure.correlation([1, 2, 3], [2, 4, 6]) == 1.0
    assert measure.correlation([1, 2, 3], [3, 2, 1]) == -1.0
    assert measure.correlation([1, 1], [1, 2]) is None and measure.correlation(None, [1.0]) is None


def test_arms_are_chosen_by_name_and_formats_replace_ours() -> None:
    groups = arms.PLANS["llama-3.2-1b"]
    chosen = arms.choose(groups, ["LLAMA.CPP Q4_0", "vllm bf16"], ["w4a8-g32"])
    assert {name: [arm.name for arm in found] for name, found in chosen.items()} == {
        "8 bits and fewer": ["sameseed w4a8-g32", "llama.cpp Q4_0"],
        "16 bits": ["sameseed w4a8-g32", "vLLM bf16"],
    }
    assert arms.choose(groups, [], []) == groups
    assert arms.choose(groups, ["no such"], []) == {}


def test_every_arm_names_an_engine_and_a_checkpoint_that_exist() -> None:
    assert set(arms.PLANS) == set(checkpoints.SHAPES)
    for groups in arms.PLANS.values():
        for arm in (arm for group in groups.values() for arm in group):
            assert (PEERS / "engines" / f"{arm.engine}.py").exists() and arm.checkpoint in checkpoints.KINDS
            assert arm.ours or arm.engine in environments.ENVIRONMENTS
        assert all(any(arm.ours for arm in group) for group in groups.values())


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    where = ["--shape", "tiny", "--home", str(tmp_path), "--work", str(tmp_path), "--out", str(out)]
    assert run.main([*where, "--arms", "openvino int4", "--threads", "1"]) == 2
    said = capsys.readouterr().err
    assert "no environment of openvino" in said and "make peers" in said
    assert "checkpoints.py --shape tiny" in said and said.rstrip().endswith("hf-bf16 openvino-int4")
    assert run.main([*where, "--arms", "no such"]) == 2 and "arms.py" in capsys.readouterr().err
    texts = ["--shape", "embedded", *where[2:], "--arms", "openvino int4 + draft*", "--threads", "1"]
    assert run.main([*texts, "--formats", "w4a8"]) == 2
    said = capsys.readouterr().err
    assert "--formats is for passes" in said and "--shape embedded-draft" in said and "openvino-int8" in said
    assert run.main([*where, "--threads", "10000"]) == 2 and "lower --threads" in capsys.readouterr().err
    assert not out.exists()


def test_a_wheels_requirements_less_some() -> None:
    asked = ["torch==2.13; platform_machine == 'x'", "numpy", 'ray>=2; extra == "ray"', "Intel_OpenMP==1"]
    assert environments.requirements_without(asked, {"torch", "intel-openmp"}) == ["numpy"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    where = ["--shape", "tiny", "--home", str(folder), "--work", str(folder)]
    assert checkpoints.main([*where, "hf-w8a8"]) == 0
    return folder


def test_checkpoints_hold_the_same_weights(work: Path) -> None:
    config = read_config(work / "tiny" / "hf-bf16")
    assert (config.num_layers, config.hidden_size, config.head_dim, config.vocab_size) == (2, 256, 64, 2048)
    name = "model.layers.1.mlp.down_proj.weight"
    with open_checkpoint(work / "tiny" / "hf-bf16") as plain, open_checkpoint(work / "tiny" / "hf-w8a8") as quantized:
        plain.check(config)
        quantized.check(read_config(work / "tiny" / "hf-w8a8"))
        q, weight = quantized.stored(name), plain.tensor(name).float()
        assert q.format == "int8" and q.parts["codes"].dtype is torch.int8
        scale = q.parts["scales"].float().reshape(-1, 1)  # [O, 1]
        error = (q.parts["codes"].float() * scale - weight).abs()
        assert (error <= 0.51 * scale + 127 * scale / 256).all()  # half a step, plus the error of the rounded scale
        embedding = "model.embed_tokens.weight"
        assert torch.equal(quantized.tensor(embedding), plain.tensor(embedding))


def test_sameseeds_worker_measures_without_leaving_a_trace(work: Path) -> None:
    engine = Engine()
    about = engine.load(work / "tiny" / "hf-bf16", 1, 448, 4, {"format": "bf16"})
    assert about["settings"]["format"] == "bf16"
    prompt = list(range(3, 20))
    before = engine.probe(prompt, 8)
    free = engine.runner.blocks.num_free
    assert engine.rows([5], 64) > 0 and engine.rows([5, 6, 7, 8], 64) > 0
    assert engine.cached is not None and engine.cached.num_cached == len(engine.cached.token_ids) == 64
    assert engine.rows([5, 6], 32) > 0 and engine.cached.num_cached == 32
    assert engine.prefill(list(range(3, 100))) > 0
    assert engine.batch([prompt, prompt, prompt[::-1], prompt], 5) > 0
    assert not engine.engine.has_work and engine.runner.blocks.num_free == free
    assert engine.probe(prompt, 8) == before and len(before) == 8
