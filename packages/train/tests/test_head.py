"""A head learns from a target's own texts, resumes where it stopped, and is accepted as counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lawkit
import pytest
import torch
from fixtures_eagle import silence
from lawkit import MODEL_VOCAB, write_model
from safetensors.torch import load_file

from sameseed import ops
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine.build import build_engine
from sameseed.errors import ConfigError
from sameseed.models.eagle_loader import load_head
from sameseed.models.head_config import read_head_config
from sameseed.models.loader import load_model
from sameseed.request import SamplingParams
from sameseed_train import learning, states
from sameseed_train.head import run_head, start_from_target
from sameseed_train.head_model import HeadForTraining
from sameseed_train.learning import Sources, Trained, dense
from sameseed_train.optim import OptimSettings
from sameseed_train.prompts import held_out
from sameseed_train.recipe import HeadRecipe, LossSettings, SizeSettings, TextSettings, TrainSettings, head_config
from sameseed_train.trainer import Log

AUX = (1, 2, 3)
NEW_TOKENS = 32
PROMPTS = [{"prompt": f"the sum of all parts {i} is"} for i in range(8)] + [
    {"messages": [{"role": "user", "content": "return a + b"}], "domain": "chat"},
    {"text": "def add(a, b): return a + b the loop ends when the list is empty"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that a head can predict nearly perfectly: only its first layer adds something."""
    root = tmp_path_factory.mktemp("runs")
    write_model(root / "target", num_hidden_layers=3)
    silence(root / "target", 0.5)
    (root / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    (root / "held.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS[1:4] + PROMPTS[8:9]))
    return root


def recipe_for(folder: Path, **changes: Any) -> HeadRecipe:
    recipe = HeadRecipe(
        target=str(folder / "target"),
        layers=AUX,
        batch=8,
        texts=TextSettings(num_texts=24, prompt_tokens=32, new_tokens=24, greedy=0.5),
        loss=LossSettings(unroll=3, alone=0.3, candidates=200),
        train=TrainSettings(12, rows=6, row_tokens=64, warmup=2, decay=0.5, optim=OptimSettings(0.02, 0.002)),
    )
    return replace(recipe, **changes)


def run(
    folder: Path,
    out: Path,
    recipe: HeadRecipe | None = None,
    prompts: Path | None = None,
    measure: Path | None = None,
    **how: Any,
) -> Trained:
    sources = Sources(prompts or folder / "prompts.jsonl", measure=measure or folder / "held.jsonl")
    how = {"quiet": True, "measured_tokens": NEW_TOKENS, **how}
    return run_head(recipe or recipe_for(folder), sources, out, **how)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "model.safetensors"))


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in Log(out / "log.jsonl").rows() if row["stage"] == "head"]


def test_learns_and_is_accepted_as_counted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls, the counted acceptance rises above the first weights', and the engine confirms it."""
    monkeypatch.setattr(learning, "not_measured", lambda seeds, *_: seeds)  # so small a head learns nothing general
    recipe = recipe_for(folder)
    texts = TextSettings(num_texts=9, prompt_tokens=32, new_tokens=NEW_TOKENS, greedy=1.0)
    recipe = replace(recipe, texts=texts, train=replace(recipe.train, steps=80), loss=replace(recipe.loss, alone=0.2))
    before = run(folder, tmp_path / "begun", recipe, stop_after=0).results["acceptance"]["all"]
    done = run(folder, tmp_path / "out", recipe)
    seen, after = losses(tmp_path / "out"), done.results["acceptance"]["all"]
    assert sum(seen[-5:]) < 0.7 * sum(seen[:5])
    assert after["rate"] > before["rate"] + 0.1 and after["agreement"][0] > before["agreement"][0] + 0.1
    spec = SpecConfig("eagle", str(done.folder), num_draft_tokens=4, options={"top_k": 1, "depth": 4})
    engine = build_engine(str(folder / "target"), EngineConfig(spec=spec, cache=CacheConfig(format="fp32")))
    prompts = [ids for ids, _ in held_out(folder / "held.jsonl", engine.tokenizer, engine.max_model_len, NEW_TOKENS)]
    found = lawkit.run(engine, prompts, SamplingParams(max_tokens=NEW_TOKENS, seed=0))
    rounds = [(c.metrics.spec.num_draft_tokens, c.metrics.spec.num_accepted_tokens) for c in found]
    # The engine gives a text's last token to the target; the count may take it, and one before, for accepted drafts.
    assert 0 <= after["accepted"] - sum(accepted for _, accepted in rounds) <= 2 * len(rounds)
    assert abs(sum(drafted for drafted, _ in rounds) - after["drafted"]) <= 4 * len(rounds)


def test_resumed_run_equals_a_whole_one(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_for(folder)
    run(folder, tmp_path / "whole", recipe)
    run(folder, tmp_path / "parts", recipe, stop_after=5)
    assert len(losses(tmp_path / "parts")) == 5
    run(folder, tmp_path / "parts", recipe, resume=True)
    whole, parts = tensors(tmp_path / "whole" / "head"), tensors(tmp_path / "parts" / "head")
    assert all(torch.equal(whole[n], parts[n]) for n in whole)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_texts_stay_and_states_are_a_cache(folder: Path, tmp_path: Path) -> None:
    """Deleted states are computed again, bit for bit; without room for them weights are the same."""
    first = run(folder, tmp_path / "out", stop_after=1)
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "texts").rglob("*.safetensors")}
    read = {p: load_file(str(p))["states"] for p in (tmp_path / "out" / "states").rglob("*.safetensors")}
    for path in read:
        path.unlink()
    run(folder, tmp_path / "out", resume=True, stop_after=1)
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "texts").rglob("*.safetensors")}
    again = [p for p in read if p.exists()]
    assert again and all(torch.equal(load_file(str(p))["states"], read[p]) for p in again)
    none = run(folder, tmp_path / "none", recipe_for(folder, states_gb=0.0), stop_after=1)
    assert not list((tmp_path / "none" / "states").rglob("*.safetensors"))
    assert all(torch.equal(weight, tensors(none.folder)[n]) for n, weight in tensors(first.folder).items())
    damaged = next(iter(files))
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ConfigError, match="delete"):
        run(folder, tmp_path / "out", resume=True)


def test_prompts_may_count(folder: Path, tmp_path: Path) -> None:
    """The same texts give more places to learn from."""
    loss, seen = recipe_for(folder).loss, []
    for prompts in (False, True):
        recipe = recipe_for(folder, loss=replace(loss, learn_prompts=prompts))
        seen.append(run(folder, tmp_path / str(prompts), recipe, stop_after=1).results["training"]["tokens"])
    assert seen[1] > seen[0] > 0


def test_a_narrow_head_begins_with_the_columns_that_contribute_most(tmp_path: Path) -> None:
    write_model(tmp_path / "target", num_hidden_layers=3)
    target = load_model(tmp_path / "target", ops.resolve("reference"))
    c, layer = target.config, target.weights.layers[-1]
    (gate, up), down = dense(target.ops, layer.gate_up).chunk(2), dense(target.ops, layer.down)
    rows = torch.randn(40, c.hidden_size, generator=torch.Generator().manual_seed(0))
    first = c.intermediate_size // 4
    head = HeadForTraining(head_config(recipe_for(tmp_path, size=SizeSettings(intermediate_size=first)), c), seed=0)
    start_from_target(head, target, None, rows)
    normed = torch.nn.functional.rms_norm(rows, layer.post_norm.shape, layer.post_norm, c.rms_eps)
    inner = torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)
    missed = [(x - inner @ down.T).norm() for x in (head.midlayer.mlp(normed), inner[:, :first] @ down[:, :first].T)]
    assert missed[0] < missed[1]


def test_layout_is_the_published_one(folder: Path, tmp_path: Path) -> None:
    """The inference head and vLLM read these names, shapes, offsets and flags; the frequent tokens are kept."""
    size = SizeSettings(draft_vocab_size=150, num_kv_heads=4)
    recipe = recipe_for(folder, size=size, store="w8a8,lm_head=w8a16")
    head = run(folder, tmp_path / "out", recipe, stop_after=2).folder
    config, found = read_head_config(head), tensors(head)
    expected = config.tensors()
    del expected["embed_tokens.weight"]
    assert {n: tuple(t.shape) for n, t in found.items() if n != "t2d"} == expected
    assert found["d2t"].dtype == torch.int64
    ids = torch.arange(150) + found["d2t"]
    assert torch.equal(found["t2d"].nonzero().flatten(), ids)
    raw = json.loads((head / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(AUX)
    texts = states.StoredTexts(sorted((tmp_path / "out" / "texts").rglob("*.safetensors")))
    counts = texts.counts(MODEL_VOCAB)
    left_out = torch.ones(MODEL_VOCAB, dtype=torch.bool).index_fill(0, ids, False)
    assert counts[left_out].max() <= counts[ids].min()
    # The copy in few bits is the same head, rounded.
    target = load_model(folder / "target", ops.resolve())
    whole, packed = (load_head(tmp_path / "out" / name, target, target.ops) for name in ("head", "packed"))
    assert (packed.weights.lm_head.activations, packed.weights.layer.o.activations) == (None, "int8")
    for name in ("lm_head", "fc"):
        wanted, rounded = (dense(target.ops, getattr(h.weights, name)) for h in (whole, packed))
        torch.testing.assert_close(rounded, wanted, atol=0.1 * float(wanted.abs().max()), rtol=0.0)
    with pytest.raises(ConfigError, match="w8a8"):
        run(folder, tmp_path / "out", replace(recipe, store="fp32"), resume=True, stop_after=1)


def test_a_quantized_target_teaches(folder: Path, tmp_path: Path) -> None:
    """Its own states are read, and the card says its format."""
    done = run(folder, tmp_path / "low", recipe_for(folder, format="int8"), stop_after=1)
    run(folder, tmp_path / "full", stop_after=1)
    low, full = (
        {p.name: load_file(str(p))["states"] for p in (tmp_path / n / "states").rglob("*.safetensors")}
        for n in ("low", "full")
    )
    shared = low.keys() & full.keys()
    assert not any(torch.equal(low[n], full[n]) for n in shared)
    assert 'format = "int8"' in (done.folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": SizeSettings(draft_vocab_size=305)}, "draft_vocab_size"),
        ({"size": SizeSettings(num_kv_heads=3)}, "multiple"),
        ({"layers": (1, 2, 4)}, "layers"),
        ({"store": "nf4"}, "--store"),
        ({"texts": TextSettings(new_tokens=300)}, "context"),
        ({"target": ""}, "--target"),
        ({"train": TrainSettings(12, rows=6, row_tokens=8)}, "row_tokens"),
    ],
)
def test_bad_recipes_are_refused(folder: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(folder, tmp_path / "out", recipe_for(folder, **change))
    assert not (tmp_path / "out").exists()


def test_measured_prompts_are_not_learned_from(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few, both = tmp_path / "few.jsonl", tmp_path / "both.jsonl"
    few.write_text(GOOD)
    both.write_text(GOOD + '{"prompt": "a list is not"}\n')
    recipe = recipe_for(folder, texts=TextSettings(num_texts=4, prompt_tokens=32, new_tokens=24))
    found = run(folder, tmp_path / "out", recipe, prompts=both, measure=few, stop_after=1)
    assert found.results["texts"] == 2 and "2 of 4 texts are left out" in caplog.text
    with pytest.raises(ConfigError, match="give others"):
        run(folder, tmp_path / "none", recipe, prompts=few, measure=few)
    assert not (tmp_path / "none").exists()


GOOD = '{"prompt": "the sum of"}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("prompts", None, "prompts.* give"),
        ("prompts", GOOD + '{"question": "b"}', r"prompts\.jsonl:2"),
        ("prompts", "\n", "no prompts"),
        ("measure", None, "measure"),
        ("measure", GOOD + '{"prompt": "a"', r"jsonl:2"),
        ("measure", "\n \n", "no prompts"),
        ("measure", GOOD + '{"text": "a b c"}', "jsonl:2"),
        ("measure", GOOD + json.dumps({"prompt": "the list is empty " * 80}), "jsonl:2 .*context"),
        ("measure", GOOD + '{"messages": [{"role": "user"}]}', "jsonl:2"),
        ("measure", "\udcff", "UTF-8"),
    ],
)
def test_prompts_are_read_before_anything_is_spent(
    folder: Path, tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    """Each bad file is refused with its line and the remedy, and nothing is written."""
    path = tmp_path / f"{name}.jsonl"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=words):
        run(folder, tmp_path / "out", **{name: path})
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_written_over_and_prompts_are_needed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts FILE"):
        run_head(recipe_for(folder), Sources(), tmp_path, quiet=True)
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="--resume"):
        run(folder, tmp_path)
