"""Estimates: bytes as they are loaded, floors as they were profiled, drafts by arithmetic; bad input is told apart."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from sameseed import cli, ops
from sameseed.cost.curve import ENGINE_SCHEMA
from sameseed.cost.round import ModelSteps
from sameseed.errors import ConfigError, ModelLoadError, RegistryError, SameseedError, VocabularyError
from sameseed.measure.costs import Profile
from sameseed.models.loader import load_model, resolve_model
from sameseed.plan import paper
from sameseed.plan.estimate import Question, estimate, given_limits, read_bytes
from sameseed.plan.outlook import AcceptChances, DraftPlan, read_acceptance, speeds
from sameseed.plan.paper import sheet
from sameseed.scheme import QuantScheme

LINES = (Path(__file__).parents[3] / "benchmarks" / "results" / "profile.jsonl").read_text().splitlines()
RECORDS = [p for p in (Profile.from_dict(json.loads(line)) for line in LINES) if p.commit in paper.RECORDS]
LIMITS = given_limits(25.0, 1.0, 2)
assert LIMITS is not None


def recorded(shape, format, kv_format):
    """The sheet of a record from before heads had 8 bits at least."""
    return sheet(shape, f"{format},lm_head={format}", kv_format)


@pytest.mark.parametrize("format", ["auto", "w8a8", "fp8"])  # where the reference packs no codes
def test_bytes_on_paper_are_those_of_the_loaded_model(format):
    on_paper = sheet("embedded", format)
    model = load_model(resolve_model("embedded"), ops.resolve("reference"), QuantScheme.parse(format))
    loaded = sum(m.nbytes for m in model.weights.matrices)
    assert loaded <= on_paper.weights <= 1.05 * loaded + 100_000  # norms, and rows that kernels pad


@pytest.mark.parametrize("record", RECORDS, ids=lambda p: p.shape["name"])
def test_floors_on_paper_are_those_of_the_records(record):
    for stored in record.stored:
        own = recorded(record.shape["name"], stored.format, stored.kv_format)
        assert own.weights == pytest.approx(stored.bytes, rel=0.01)
        assert own.peak in (stored.peak, "bf16")
        for x in (x for x in record.costs if x.format == stored.format):
            work = own.work(1, x.rows, x.context)
            assert work.memory_s(record.limits) * 1e3 == pytest.approx(x.memory_ms, rel=0.01)
            assert work.compute_s(record.limits, own.peak) * 1e3 == pytest.approx(x.compute_ms, rel=0.01)


class Passes:
    """Chains and prompts of some records: reading, matrices and attention in seconds at the limits; what they took."""

    def __init__(self, records):
        rows = []
        for i, record in enumerate(records):
            jobs = [(x.format, x.rows, x.context, False, x.ms) for x in record.costs]
            jobs += [(p.format, p.tokens, 0, True, p.ms) for p in record.prefill]
            sheets = {x.format: recorded(record.shape["name"], x.format, x.kv_format) for x in record.stored}
            for name, new, context, prompt, ms in jobs:
                own = sheets[name]
                work, limits = own.work(1, new, context, prompt), record.limits
                matrices, attention = work.matrix_ops / limits.peak(own.peak), work.attention_ops / limits.peak("fp32")
                rows.append(((i, name), new, work.memory_s(limits), matrices, attention, ms / 1e3))
        self.curves = [row[0] for row in rows]
        self.rows, self.reading, self.matrices, self.attention, self.took = np.array([row[1:] for row in rows]).T

    def errors(self, read, compute):
        """Logarithms of predicted over measured."""
        computing = self.matrices / compute + self.attention / paper.ATTENTION
        return np.log(np.hypot(self.reading / read, computing) / self.took)

    def best(self):
        """READ and COMPUTE, to two digits, with the least mean square of these."""
        grid = [(a / 100, b / 100) for a in range(70, 101) for b in range(30, 81)]
        return min(grid, key=lambda g: float(np.mean(self.errors(*g) ** 2)))


def test_shares_of_the_limits_are_derived_from_the_records():
    passes = Passes(RECORDS)
    assert passes.best() == (paper.READ, paper.COMPUTE)
    errors = passes.errors(paper.READ, paper.COMPUTE)
    ones = {c: e for c, n, e in zip(passes.curves, passes.rows, errors, strict=True) if n == 1}
    bent = [e - ones[c] for c, n, e in zip(passes.curves, passes.rows, errors, strict=True) if n > 1]
    spreads = np.std(list(ones.values()), ddof=1), np.sqrt(np.mean(np.square(bent)))
    assert max(spreads) * 1.638 / 1.282 == pytest.approx(paper.SPREAD, rel=0.02)


def test_records_that_were_held_out_are_predicted_within_what_the_guide_says():
    errors = []
    for record in RECORDS:
        shares = Passes([r for r in RECORDS if r is not record]).best()
        errors += list(abs(np.expm1(Passes([record]).errors(*shares))))
    assert np.median(errors) < 0.12 and max(errors) < 0.27


@pytest.mark.parametrize("record", RECORDS, ids=lambda p: p.shape["name"])
def test_batches_are_predicted_though_the_shares_saw_none(record):
    errors = []
    for x in record.batch:
        cost = recorded(record.shape["name"], x.format, x.kv_format).cost(record.limits)
        errors.append(abs(cost.target(x.batch_size, x.batch_size, x.context) * 1e3 / x.ms - 1))
    assert sorted(errors)[-2:][0] < 0.25 and max(errors) < 0.38  # the worst: slower than a chain of as many rows


def test_a_hub_id_is_looked_up_in_the_cache_first(tmp_path, monkeypatch):
    import huggingface_hub

    shutil.copy(resolve_model("embedded") / "config.json", tmp_path)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert sheet("org/name", "w8a8").weights == sheet("embedded", "w8a8").weights
    for name in ("mmproj-a-Q4_0.gguf", "a-Q4_0.gguf", "A-q8_0.gguf", "q8_0.gguf"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, local_files_only: str(tmp_path))
    assert [paper.find(f"org/name{n}").name for n in (":q4_0", "/q8_0.gguf")] == ["a-Q4_0.gguf", "q8_0.gguf"]

    def fails(*_):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("sameseed.hub.fetch", fails)
    with pytest.raises(ModelLoadError, match=r"no network.*--shape"):
        sheet("org/name")


def test_a_folder_with_config_json_alone_is_enough(tmp_path):
    config = resolve_model("embedded") / "config.json"
    shutil.copy(config, tmp_path)
    whole, alone = sheet("embedded", "w4a8"), sheet(str(tmp_path), "w4a8")
    assert (alone.weights, alone.row, alone.config.num_layers) == (whole.weights, whole.row, whole.config.num_layers)
    raw = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="name a --format"):
        sheet(str(tmp_path))


def test_windows_save_time_and_no_memory(tmp_path):
    raw = json.loads((resolve_model("embedded") / "config.json").read_text())
    found = []
    for window in (None, 64):
        own = raw | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        (tmp_path / "config.json").write_text(json.dumps(own))
        found.append(sheet(str(tmp_path)))
    full, windowed = found
    assert windowed.row == full.row
    assert windowed.seconds(LIMITS, 1, 1, 2000) < full.seconds(LIMITS, 1, 1, 2000)
    assert windowed.seconds(LIMITS, 1, 1, 60) == full.seconds(LIMITS, 1, 1, 60)


def test_intervals_hold_the_value_and_an_assumption_widens_them():
    cost, wide = sheet("llama-3.2-1b", "w4a8").cost(LIMITS), {}
    passes = sheet("smollm2-135m", "w8a8").cost(LIMITS).passes
    for low, high, spread in ((0.7, 0.7, 0.0), (0.5, 0.9, 0.0), (0.7, 0.7, 0.5)):
        draft = DraftPlan("x", ModelSteps(passes), AcceptChances((low,), (high,), ""), grade="paper", spread=spread)
        f = speeds(cost, [draft], (1,), 256)[1].speedup
        assert f.low < f.value < f.high
        wide[low, spread] = f.high / f.low
    assert min(wide[0.5, 0.0], wide[0.7, 0.5]) > 1.1 * wide[0.7, 0.0]


def test_estimates_of_the_embedded_pair():
    drafts = ("embedded-draft", "embedded-head", "suffix", "ngram > embedded-draft")
    asked = Question("embedded", drafts=drafts, batches=(4, 1), available=1 << 30)
    found = estimate(asked, LIMITS)
    assert [e.format for e in found] == ["bf16", "w8a8", "w4a8"]
    for e in found:
        assert set(e.memory.max_context) == {1, 4}
        assert e.memory.weights < e.memory.peak.low <= e.memory.peak.value <= e.memory.peak.high
        assert len(e.speeds) == 2 * (1 + len(drafts))
        assert all(f.grade and f.low <= f.value <= f.high for s in e.speeds for f in (s.tokens_per_s, s.speedup))
        assert e.num_speculative_tokens_per_batch_size["suffix"][0][0] == 1
        assert "assumed" in e.acceptance["suffix"]
        json.dumps(asdict(e))
    assert found[0].memory.weights > found[1].memory.weights > found[2].memory.weights


def test_memory_that_is_too_small_names_what_would_fit():
    for asked, words in (
        (Question("llama-3.2-1b", ("bf16",), available=2 << 30), r"--format w8a8 .*--format w4a8"),
        (Question("llama-3.2-1b", ("w4a8",), context=100_000, available=2 << 30), r"take --context \d+"),
        (Question("llama-3.1-70b", available=2 << 30), "smaller model"),
    ):
        with pytest.raises(ConfigError, match=words):
            estimate(asked, LIMITS)
    fits = estimate(Question("llama-3.2-1b", available=2 << 30), LIMITS)
    assert [e.format for e in fits] == ["w8a8", "w4a8"]
    asked = Question("llama-3.1-8b", ("w4a8",), batches=(1,), available=6 * 10**9)
    longest = estimate(asked, LIMITS)[0].memory.max_context[1]
    full = estimate(replace(asked, context=longest), LIMITS)[0].memory
    assert full.peak.low <= asked.available and full.max_context[1] == longest


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        *(({"model": f"org/n{of}"}, ModelLoadError, "no weights are down.*--shape") for of in (":Q4_0", "/a.gguf")),
        ({"drafts": ("mtp",)}, ConfigError, "bench measures"),
        ({"model": "llama-9"}, ModelLoadError, "a shape"), ({"model": "embedded-head"}, ConfigError, "--draft"),
        ({"formats": ("w4a9",)}, RegistryError, "did you mean"), ({"kv_format": "nf4"}, SameseedError, "cache"),
        ({"context": 99_999}, ConfigError, "lower --context"), ({"batches": (0,)}, ConfigError, "--batch must"),
        ({"drafts": ("none",)}, ConfigError, "leave out"),
        ({"drafts": ("draft_model",)}, ConfigError, "draft_model:MODEL"),
        ({"drafts": ("suffix",), "acceptance": ("1.5",)}, ConfigError, "0..1"),
        ({"drafts": ("suffix",), "acceptance": ("none.json",)}, ConfigError, "conditional_accept_rates"),
        ({"drafts": ("suffix",), "acceptance": ("0.5", "0.6")}, ConfigError, "same order"),
    ],
)  # fmt: skip
def test_bad_questions_are_told_apart(changes, error, words):
    with pytest.raises(error, match=words):
        estimate(Question(**{"model": "embedded", **changes}), LIMITS)


def test_a_draft_of_another_family_is_refused(tmp_path):
    draft = resolve_model("embedded-draft")
    raw, tokenizer = (json.loads((draft / name).read_text()) for name in ("config.json", "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "vocab_size": 50_000}))
    with pytest.raises(VocabularyError, match="family"):
        estimate(Question("embedded", drafts=(str(tmp_path),)), LIMITS)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tokens = tokenizer["model"]["vocab"]
    first, second = (next(t for t, i in tokens.items() if i == n) for n in (1000, 1001))
    tokens[first], tokens[second] = 1001, 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(VocabularyError, match=r"token 1000 .*family"):
        estimate(Question("embedded", drafts=(str(tmp_path),)), LIMITS)


def test_profiled_costs_are_used_as_they_are():
    record = RECORDS[0]
    draft = {"drafts": ("smollm2-135m",), "acceptance": ("0.8",)}
    found = estimate(Question("llama-3.2-1b", kv_format="bf16", context=256, batches=(1,), **draft), record)
    assert [e.format for e in found] == list(record.formats)
    for e in found:
        plain, drafted = e.speeds
        ms = 1e3 * record.curve(e.format).cost(1, 1, 256)
        assert plain.tokens_per_s.grade == "profiled"
        assert plain.tokens_per_s.value == pytest.approx(1e3 / (ms + 0.35))
        assert drafted.speedup.grade == "paper"  # of the draft nothing was profiled
        assert e.ttft_s.value == pytest.approx(next(p.ms for p in record.prefill if p.format == e.format) / 1e3)
    question = Question("llama-3.2-1b", (), "bf16", ("llama-3.2-1b",), "", ("0.8",), 256, batches=(1,))
    for format, grade in ((record.formats[0], "profiled"), ("nf4", "paper")):
        found = estimate(replace(question, draft_format=format), replace(record, draft=record))
        assert {e.speeds[1].speedup.grade for e in found} == {grade}
    for other, words in (
        (Question("qwen3-0.6b", context=256), "whose num_parameters|whose num_layers"),
        (Question("llama-3.2-1b", ("nf4",), context=256), "not profiled"),
        (Question("llama-3.2-1b", kv_format="int8", context=256), "--kv-format"),
    ):
        with pytest.raises(ConfigError, match=words):
            estimate(other, record)


def test_acceptance_from_files_and_words(tmp_path):
    file = tmp_path / "speculation_profile.json"
    file.write_text(json.dumps({"conditional_accept_rates": [0.8, 0.6], "num_rounds": 10_000}))
    found = read_acceptance(str(file))
    accepted = [found.at(0.5).drafted(k).accepted for k in range(4)]
    assert accepted == pytest.approx([0, 0.8, 0.8 + 0.48, 0.8 + 0.48 + 0.48 * 0.6], abs=1e-3)
    assert 0.76 < found.low[0] < 0.8 < found.high[0] < 0.84 and not found.assumed
    assert read_acceptance("0.6,0.8").high == (0.8,) and read_acceptance(None).assumed


def test_sizes_and_limits_that_are_given():
    assert [read_bytes(t) for t in ("24GB", "512MiB", "1.5g", " 100 B ")] == [24 * 10**9, 512 << 20, 1_500_000_000, 100]
    for text in ("", "GB", "-1GB", "24 apples", "nan"):
        with pytest.raises(ConfigError, match="24GB"):
            read_bytes(text)
    for read in (100.0, float("nan")):
        with pytest.raises(ConfigError, match="go together, both above 0"):
            given_limits(read, None if read == 100.0 else 1.0, 1)
    assert given_limits(None, None, 1) is None


def test_the_command(tmp_path, capsys):
    machine = ["--machine-read", "100", "--machine-ops", "2", "--memory", "1GiB"]
    assert cli.main(["estimate", "embedded", "--draft", "suffix + embedded-draft", "--draft", "auto", *machine]) == 0
    text = capsys.readouterr().out
    assert "embedded-draft: best length" in text
    assert all(word in text for word in ("paper", "longest text", "assumed", "first token", "best length"))
    assert cli.main(["estimate", "--shape", "Qwen3-0.6B", *machine, "--memory", "2GB", "--context", "4000"]) == 0
    assert "at most" in capsys.readouterr().out
    assert cli.main(["estimate", "--shape", "Qwen3-0.6B", "--json", *machine, "--memory", "4GB"]) == 0
    found = json.loads(capsys.readouterr().out)["estimates"]
    assert found[0]["speeds"][0]["tokens_per_s"]["grade"] == "paper"
    file = tmp_path / "vllm.json"
    file.write_text(json.dumps({"schema": ENGINE_SCHEMA, "engine": "vllm"}))
    for wrong, words in (
        ([], "either a model or a shape"),
        (["--shape", "llama-3.2"], "no shape"),
        (["m", "--cost", str(file)], "tune --engine vllm"),
        (["m", "--cost", str(file), "--machine-read", "1"], "leave out"),
    ):
        assert cli.main(["estimate", *wrong]) == cli.EXIT_USAGE
        assert words in capsys.readouterr().err
