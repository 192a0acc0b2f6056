"""A whole run: the checkpoint it writes, resuming after an interruption, and what it refuses."""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from fixtures_models import all_logits, oracle_logits, prompt
from fixtures_quantize import SMALL
from lawkit import write_model, write_tokenizer
from safetensors.torch import load_file

from sameseed import ops
from sameseed.errors import ConfigError, ModelSaveError, SameseedError
from sameseed.models.checkpoint import Checkpoint
from sameseed.models.loader import load_model, read_config
from sameseed.quantize import _work
from sameseed.quantize._calibrate import pack, read_calibration
from sameseed.quantize._run import FILE, QuantizePlan, quantize
from sameseed.store import replacing
from sameseed.tokenizer import Tokenizer


@pytest.fixture
def plan(small_model, calibration, tmp_path):
    return QuantizePlan(str(small_model), tmp_path / "out", "w4a16-g32", "gptq", calibration, samples=6, length=32)


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(a, b):
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(first[n].equal(second[n]) for n in first)


def interrupted(plan):
    """Interrupts a run after its first layer."""

    def report(stage, *more):
        if stage == "layers":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(plan, report)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "smooth", "rotate", "rotate+gptq", "smooth+gptq", "awq+gptq"])
def test_what_is_written_loads_and_says_what_was_lost(plan, method):
    seen = []
    result = quantize(replace(plan, method=method), lambda *told: seen.append(told))
    config = read_config(result.folder)
    model = load_model(result.folder, ops.resolve("reference"))
    assert model.weights.layers[0].down.format == "int4"
    assert model.weights.embedding.format == model.weights.lm_head.format == "fp32", "they stay as they are"
    found = json.loads((result.folder / FILE).read_text())
    assert found == json.loads(json.dumps(result.quantization))
    assert len(found["modules"]) == 7 * config.num_layers
    assert all(0 < m["relative"] < 0.5 and m["scheme"] == "w4a16-g32" for m in found["modules"])
    assert found["bits_per_weight"] == pytest.approx(4.5)
    assert [e.module for *_, errors in seen for e in errors] == [m["module"] for m in found["modules"]]
    assert not list(plan.out.parent.glob("*.partial"))


def test_rules_name_head_and_layers(plan):
    scheme = "w4a16-g32,lm_head=w8a16,model.layers.1.mlp.*=bf16,*.v_proj=fp8"
    result = quantize(replace(plan, scheme=scheme, method="gptq"))
    schemes = {m["module"]: m["scheme"] for m in result.quantization["modules"]}
    assert schemes["lm_head"] == "w8a16" and schemes["model.layers.0.self_attn.v_proj"].startswith("fp8")
    assert schemes["model.layers.1.mlp.up_proj"] == "bf16" and "model.embed_tokens" not in schemes
    with Checkpoint(result.folder) as checkpoint:
        checkpoint.check(read_config(result.folder))
        assert str(checkpoint.scheme("lm_head.weight")) == "w8a16"
        assert checkpoint.scheme("model.layers.1.mlp.up_proj.weight") is None
        assert checkpoint.dtype("model.layers.1.mlp.up_proj.weight") == torch.bfloat16


@pytest.mark.parametrize("method", ["rtn", "rotate"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rule_keeps_embedding_or_head_dense(plan, tmp_path, method, tied):
    write_model(tmp_path / "model", **SMALL, tie_word_embeddings=tied)
    scheme = "w4a16-g32,lm_head=bf16,model.embed_tokens=fp16"
    result = quantize(replace(plan, model=str(tmp_path / "model"), scheme=scheme, method=method))
    one = tied and method == "rtn"
    stored = weights(result.folder)
    assert stored["model.embed_tokens.weight"].dtype == (torch.bfloat16 if one else torch.float16)
    assert ("lm_head.weight" in stored) != one
    assert one or stored["lm_head.weight"].dtype == torch.bfloat16
    if method == "rtn":
        before = weights(tmp_path / "model")["model.embed_tokens.weight"]
        assert torch.allclose(stored["model.embed_tokens.weight"].float(), before.float(), rtol=2**-8, atol=1e-6)
    assert not {"lm_head", "model.embed_tokens"} & {m["module"] for m in result.quantization["modules"]}
    load_model(result.folder, ops.resolve("reference"))


@pytest.mark.parametrize(
    ("method", "scheme", "formats"),
    [
        ("rtn", "w8a8", ("fp32", None)),
        ("rotate", "w8a8", ("fp32", "fp32")),  # a rotated head absorbs the last norm, so it differs from the embedding
        ("rtn", "w8a8,lm_head=w8a16", ("fp32", "int8")),
        ("rtn", "w8a8,lm_head=w8a16,model.embed_tokens=w8a16", ("int8", None)),
        ("rtn", "w8a8,model.embed_tokens=w8a16", ("int8", None)),
    ],
)
def test_tied_embeddings(plan, tmp_path, method, scheme, formats):
    write_model(tmp_path / "tied", **SMALL, tie_word_embeddings=True)
    result = quantize(replace(plan, model=str(tmp_path / "tied"), scheme=scheme, method=method))
    model = load_model(result.folder, ops.resolve("reference"))
    head = None if model.config.tied_embeddings else model.weights.lm_head.format
    assert (model.weights.embedding.format, head) == formats


def test_a_tied_head_in_other_bits_opens_in_transformers(plan, tmp_path):
    pytest.importorskip("compressed_tensors")
    settings = {**SMALL, "tie_word_embeddings": True, "model_type": "llama"}
    write_model(tmp_path / "tied", **settings)
    scheme = "w4a16-g32,lm_head=w8a16"
    result = quantize(replace(plan, model=str(tmp_path / "tied"), scheme=scheme, method="gptq"))
    ours = all_logits(load_model(result.folder, ops.resolve("reference")), prompt(9))
    assert (oracle_logits(result.folder, prompt(9)) - ours).abs().max() < 1e-3


BUDGET = {"budget": 7.0, "candidates": ("w4a16-g32", "w8a16"), "samples": 8}


@pytest.mark.parametrize("change", [{}, {"method": "rotate+awq"}, BUDGET], ids=str)
def test_a_resumed_run_gives_the_same_bits(plan, change):
    plan = replace(plan, **{"scheme": "w4a8-g32,lm_head=w8a8", **change})
    whole = quantize(replace(plan, out=plan.out.with_name("whole")))
    interrupted(plan)
    assert not plan.out.exists(), "nothing half stands under the final name"
    with pytest.raises(ConfigError, match="--resume goes on"):
        quantize(plan)
    resumed = quantize(replace(plan, resume=True))
    assert same(whole.folder, resumed.folder)
    assert whole.quantization == resumed.quantization


def test_resuming_another_run_is_refused(plan, tmp_path):
    interrupted(plan)
    write_model(tmp_path / "other", seed=9, **SMALL)
    changes = {"scheme": "w8a8", "method": "awq", "seed": 1, "samples": 5, "length": 16, "options": {"clip": False}}
    for name, value in {**changes, "model": str(tmp_path / "other")}.items():
        with pytest.raises(ConfigError, match=f"begun with ({name}|calibration) .*--overwrite"):
            quantize(replace(plan, resume=True, **{name: value}))
    quantize(replace(plan, overwrite=True, scheme="w8a8"))  # starts again


def test_a_damaged_layer_file_is_named(plan):
    interrupted(plan)
    file = plan.out.with_name("out.partial") / "layer-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ConfigError, match=r"layer-00000\.safetensors is damaged"):
        quantize(replace(plan, resume=True))


def test_a_full_disk_says_how_to_go_on(plan, monkeypatch):
    def full(path, mode=0o666):
        if path.name == "layer-00001.safetensors":
            raise OSError(28, "No space left on device")
        return replacing(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(_work, "replacing", full)
        with pytest.raises(ModelSaveError, match=r"layer-00001.*No space left.*--resume"):
            quantize(plan)
    whole = quantize(replace(plan, out=plan.out.with_name("whole")))
    assert same(whole.folder, quantize(replace(plan, resume=True)).folder)


@pytest.mark.parametrize("method", ["gptq", "rotate+awq"])
def test_one_layer_is_in_memory_at_a_time(plan, tmp_path, monkeypatch, method):
    write_model(tmp_path / "deep", **{**SMALL, "num_hidden_layers": 6})
    alive = set()
    most = 0

    def watched(self, name):
        nonlocal most
        found = original(self, name)
        if ".layers." in name and found.dim() == 2:
            layer = name.split(".")[2]
            key = f"{layer}:{name}"
            alive.add(key)
            weakref.finalize(found, alive.discard, key)
            most = max(most, len({k.split(":")[0] for k in alive}))
        return found

    original = Checkpoint.tensor
    monkeypatch.setattr(Checkpoint, "tensor", watched)
    quantize(replace(plan, model=str(tmp_path / "deep"), method=method))
    assert most == 1
    assert not alive


def test_a_budget_is_kept_and_spent(plan):
    candidates = ("w4a16-g32", "w8a16", "bf16")
    plan = replace(plan, budget=6.0, candidates=candidates, samples=8)
    result = quantize(plan)
    found = result.quantization
    assert 5.0 < found["bits_per_weight"] <= 6.0
    schemes = {m["module"].split("layers.")[1]: m["scheme"] for m in found["modules"]}
    for i in range(2):
        assert len({schemes[f"{i}.self_attn.{n}_proj"] for n in "qkv"}) == 1, "one product"
        assert schemes[f"{i}.mlp.gate_proj"] == schemes[f"{i}.mlp.up_proj"]
    assert len(found["sensitivity"]) == 2 * 4 * len(candidates)
    losses = {(s["unit"], s["scheme"]): s["loss"] for s in found["sensitivity"]}
    for unit, _ in losses:
        assert losses[unit, "bf16"] < losses[unit, "w8a16"] < losses[unit, "w4a16-g32"]
    load_model(result.folder, ops.resolve("reference"))


def test_rules_count_in_the_budget(plan):
    rule = "w4a16,model.layers.0.mlp.down_proj=bf16"
    plan = replace(plan, scheme=rule, budget=7.0, candidates=("w4a16-g32", "w8a16"), samples=8)
    found = quantize(plan).quantization
    schemes = {m["module"]: m["scheme"] for m in found["modules"]}
    assert schemes["model.layers.0.mlp.down_proj"] == "bf16"
    assert 6.0 < found["bits_per_weight"] <= 7.0
    assert [s["scheme"] for s in found["sensitivity"] if s["unit"] == "model.layers.0.down"] == ["bf16"]


BUDGETED = {"budget": 6.0, "candidates": ("w4a16-g32", "w8a16")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({**BUDGETED, "candidates": ("w4a16-g32", "w4a16-g128")}, "divide"), ({"model": "/nowhere/at/all"}, "no model"),
        ({**BUDGETED, "scheme": "w4a16,lm_head=w4a16-g128"}, "divide"), ({"scheme": "w4a61"}, "did you mean 'w4a16'"),
        ({"options": {"dampin": 1.0}}, "did you mean 'damping'"), ({"options": {"damping": float("nan")}}, "damping"),
        ({**BUDGETED, "scheme": "w4a16,*.q_proj=bf16"}, "alike"), ({"scheme": "w8a16,lm_head=w4a16-g128"}, "divide"),
        ({**BUDGETED, "candidates": ("bf16",)}, "--candidates"), ({"method": "gptq+rotate"}, "rotate first"),
        ({"calibration": None}, "--calibration"), ({"method": "gptq+awq"}, "comes last"), ({"seed": -1}, "seed"),
        ({**BUDGETED, "budget": 3.0}, "raise"), ({"scheme": "w4a16-g128"}, "divide"), ({"scheme": "auto"}, "--scheme"),
        ({"scheme": "q4_k-a8"}, "256 .*take q5_0-a8"), ({**BUDGETED, "candidates": ("q6_k-a8",)}, "256 .*take q5_0-a8"),
    ],
)  # fmt: skip
def test_bad_plans(plan, change, words):
    """Each is refused with its remedy before anything is computed."""
    with pytest.raises(SameseedError, match=words):
        quantize(replace(plan, **change), lambda *_: pytest.fail("refused too late"))
    assert not plan.out.exists()


def test_a_destination_in_use(plan, small_model):
    quantize(replace(plan, method="rtn"))
    before = weights(plan.out)
    with pytest.raises(ConfigError, match="--overwrite"):
        quantize(replace(plan, method="rtn"))
    quantize(replace(plan, method="rtn", scheme="w8a8", overwrite=True))
    assert weights(plan.out).keys() != before.keys()
    with pytest.raises(ModelSaveError, match="the model itself"):
        quantize(replace(plan, out=small_model, overwrite=True))


def test_a_quantized_source_keeps_its_codes(plan, caplog):
    quantize(replace(plan, method="rtn", scheme="w4a16-g32,model.embed_tokens=w8a16-g32"))
    again = quantize(replace(plan, model=str(plan.out), out=plan.out.with_name("b"), scheme="auto,*.down_proj=w8a16"))
    assert "twice" in caplog.text, "the other matrices are rounded twice"
    old, new = weights(plan.out), weights(again.folder)
    assert {n.split(".")[-2] for n, t in old.items() if n not in new or not t.equal(new[n])} == {"down_proj"}


@pytest.mark.parametrize(
    ("method", "scheme", "kept"),
    [("rtn", "w8a16", False), ("rotate", "w8a16", False), ("rtn", "nf4", False), ("rtn", "nf4,*.o_proj=w8a16", True)],
)
def test_embedding_and_head_keep_their_codes_where_only_we_read_them(plan, method, scheme, kept):
    ends = ("model.embed_tokens", "lm_head")
    quantize(replace(plan, method="rtn", scheme=",".join(["w4a16-g32", *(f"{name}=w8a16-g32" for name in ends)])))
    again = quantize(replace(plan, model=str(plan.out), out=plan.out.with_name("b"), method=method, scheme=scheme))
    with Checkpoint(again.folder) as checkpoint:
        checkpoint.check(read_config(again.folder))
        assert [checkpoint.scheme(f"{name}.weight") is not None for name in ends] == [kept, kept]
        assert kept or {checkpoint.dtype(f"{name}.weight") for name in ends} == {torch.bfloat16}


def test_a_folder_in_the_way(plan):
    folder = plan.out.with_name("out.partial")
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    for change in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(ConfigError, match="move or delete"):
            quantize(replace(plan, **change))
    assert (folder / "mine.txt").exists()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(r)}\n" for r in rows), encoding="utf-8")
    return path


def test_every_kind_of_line(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "the sum"}, {"role": "assistant", "content": "is a whole"}]
    path = write(tmp_path / "a.jsonl", {"text": "the list is empty"}, {"prompt": "the loop"}, {"messages": messages})
    found = read_calibration(path, tokenizer, 1, 8, seed=0)
    assert found.rows.shape == (1, 8) and len(found.held_out) == 0
    all_tokens = read_calibration(path, tokenizer, 99, 8, seed=0).rows.flatten().tolist()
    text = tokenizer.decode(all_tokens)
    assert "user: the loop" in text or "user: the sum" in text, "the chat template wrote it"


def test_a_plain_text_file(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("the end of the list " * 50)
    found = read_calibration(tmp_path / "a.txt", tokenizer, 4, 16, seed=0)
    assert found.rows.shape == (4, 16)
    assert found.source == "a.txt: 4 rows of 16 tokens"
    ids = tokenizer.encode("the end of the list " * 50)
    assert found.rows[0].tolist() == ids[:16]
    assert found.rows[1].tolist() == ids[16:32]


def test_later_pieces_open_with_the_begin_token():
    documents = [[1, *range(10, 30)], [1, 40, 41]]
    assert pack(documents, 8, 9, [1]) == [
        [1, 10, 11, 12, 13, 14, 15, 16],
        [1, 17, 18, 19, 20, 21, 22, 23],
        [1, 24, 25, 26, 27, 28, 29, 1],
    ]


def test_rows_follow_the_seed_and_held_out_rows_are_others(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", *({"text": f"the list number {i} is empty, return {i * 7}"} for i in range(60)))
    first, again, other = (read_calibration(path, tokenizer, 6, 16, seed=s, held_out=2) for s in (1, 1, 2))
    assert first.rows.equal(again.rows) and not first.rows.equal(other.rows)
    assert first.held_out.shape == (2, 16) and first.rows.shape == (6, 16)
    assert not any(row.equal(kept) for row in first.rows for kept in first.held_out)


def test_a_short_text_gives_what_it_has(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", {"text": "the list"})
    assert read_calibration(path, tokenizer, 128, 512, seed=0).rows.tolist() == [tokenizer.encode("the list")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"\n \n", "give lines"), ("a.jsonl", b'{"text": "fine"}\n{"txt": "not"}\n', "a.jsonl:2"),
        ("a.jsonl", b'{"text": "open\n', "a.jsonl:1"), ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "a.jsonl:1"),
        ("a.parquet", b"x", ".jsonl or a .txt"), ("a.txt", b"\xff\xfe\x00", "UTF-8"), ("missing.jsonl", None, "give"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, tokenizer, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_calibration(tmp_path / name, tokenizer, 4, 16, seed=0)
