"""Heads in training: they compute what the inference head computes, learn, and resume where they stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_training import NEW_TOKENS, assert_learned_and_counted, assert_resumed_equals_whole, run, tensors
from lawkit import MODEL_VOCAB, write_model
from safetensors.torch import load_file

from sameseed import ops
from sameseed.config import SpecConfig
from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.eagle_loader import load_head
from sameseed.models.eagle_runner import HeadRunner, Level
from sameseed.models.head_config import expected_tensors, read_head_config
from sameseed.models.llama import Llama
from sameseed.models.loader import load_model
from sameseed.request import SamplingParams, Sequence
from sameseed_train import states
from sameseed_train.head import run_head
from sameseed_train.head_job import export_head
from sameseed_train.head_model import GuessRows, HeadForTraining
from sameseed_train.head_recipe import HeadRecipe, LossSettings, SizeSettings, head_config
from sameseed_train.optim import OptimSettings
from sameseed_train.own import Sources, dense
from sameseed_train.recipe import TrainSettings
from sameseed_train.seeds import TextSettings

AUX = (1, 2, 3)
STEPS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = tmp_path_factory.mktemp("head") / "target"
    write_model(folder, num_hidden_layers=3)
    return load_model(folder, ops.resolve())


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 120}, {"num_kv_heads": 4, "intermediate_size": 72}])
def test_guesses_like_the_inference_head(target: Llama, tmp_path: Path, changes: dict[str, int]) -> None:
    """From every row of a text, each step along the text's own tokens has HeadRunner's logits for that chain."""
    config = head_config(HeadRecipe(layers=AUX, size=SizeSettings(**changes)), target.config)
    head = HeadForTraining(config, 3)
    with torch.no_grad():
        for parameter in head.parameters():  # random enough that every weight matters
            parameter.mul_(8.0 if parameter.ndim == 2 else 1.0).add_(0.1 * torch.randn_like(parameter))
    generator = torch.Generator().manual_seed(5)
    own = (
        torch.randperm(MODEL_VOCAB, generator=generator)[:120].sort().values if "draft_vocab_size" in changes else None
    )
    export_head(head, own, tmp_path / "head", "float32")
    loaded = load_head(tmp_path / "head", target, target.ops)
    lengths = [12, 9]
    tokens = torch.randint(1, MODEL_VOCAB, (2, 12), generator=generator)
    states = torch.randn(2, 12, 3 * target.config.hidden_size, generator=generator)
    rows = GuessRows.of(torch.tensor(lengths), torch.tensor([0, 4]), STEPS, 12)
    weight = dense(target.ops, target.weights.lm_head) if own is None else head.lm_head.weight
    with torch.no_grad():
        outputs = head(dense(target.ops, target.weights.embedding)[tokens], states, rows, STEPS)
        learned = [out @ weight.T for out in outputs]
    at = {int(place): i for i, place in enumerate(rows.index)}
    assert [divmod(int(p), 12) for p in rows.index[rows.counts]] == [
        *((0, t) for t in range(12)),
        *((1, t) for t in range(4, 9)),
    ]
    for b, length in enumerate(lengths):
        for base in range(2, length - STEPS + 1):
            guesses = chain(loaded, tokens[b], states[b], base)
            for step, logits in enumerate(guesses):
                row = at.get(b * 12 + base + step)
                if row is not None and rows.counts[row]:
                    torch.testing.assert_close(learned[step][row], logits, atol=2e-4, rtol=2e-4)


def chain(loaded: object, tokens: torch.Tensor, states: torch.Tensor, base: int) -> list[torch.Tensor]:
    """Logits [Vd] of STEPS guesses: after rows 0..base with the target's states, then along the text."""
    c = loaded.config.layer  # type: ignore[attr-defined]
    runner = HeadRunner(loaded, KVCache(c.kv_shapes, 4, 16))  # type: ignore[arg-type]
    holder = Sequence(0, (), SamplingParams(), 0)
    assert runner.blocks.reserve(holder, base + 1 + STEPS)
    logits, feature, _ = runner.extend([holder], [tokens[: base + 1].tolist()], [states[: base + 1]], True)
    found = [logits[0]]
    for step in range(1, STEPS):
        level = Level(holder, [int(tokens[base + step])], [(1 << step) - 1], step - 1)
        logits, feature = runner.expand([level], feature)
        found.append(logits[0])
    return found


# --- whole runs ---


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


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    texts = TextSettings(num_texts=9, prompt_tokens=32, new_tokens=NEW_TOKENS, greedy=1.0)
    longer = recipe_for(folder, texts=texts, loss=LossSettings(unroll=4, alone=0.2))
    run(folder, out, replace(longer, train=replace(longer.train, steps=80)))
    return out


def test_learns_and_is_accepted_more(folder: Path, trained: Path, tmp_path: Path) -> None:
    """The loss falls, the counted acceptance rises above the first weights', and the engine confirms it."""
    begun = run(folder, tmp_path / "begun", recipe_for(folder), stop_after=0)
    before = begun.results["acceptance"]["all"]
    after = json.loads((trained / "results.json").read_text())["acceptance"]["all"]
    assert after["rate"] > before["rate"] + 0.1
    assert after["agreement"][0] > before["agreement"][0] + 0.1
    spec = SpecConfig("eagle", str(trained / "head"), num_draft_tokens=4, options={"top_k": 1, "depth": 4})
    assert_learned_and_counted(folder, trained, spec, 2)


def test_resumed_run_equals_a_whole_one(folder: Path, tmp_path: Path) -> None:
    assert_resumed_equals_whole(folder, tmp_path, recipe_for(folder), 5)


def test_texts_that_are_written_stay(folder: Path, tmp_path: Path) -> None:
    """Deleted states are computed again, bit for bit; a damaged file of texts is refused."""
    run(folder, tmp_path / "out", recipe_for(folder), stop_after=1)
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "texts").rglob("*.safetensors")}
    read = {p: load_file(str(p))["states"] for p in (tmp_path / "out" / "states").rglob("*.safetensors")}
    for path in read:
        path.unlink()
    run(folder, tmp_path / "out", recipe_for(folder), resume=True, stop_after=1)
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "texts").rglob("*.safetensors")}
    again = [p for p in read if p.exists()]
    assert again and all(torch.equal(load_file(str(p))["states"], read[p]) for p in again)
    damaged = next(iter(files))
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ConfigError, match="delete it and run again"):
        run(folder, tmp_path / "out", recipe_for(folder), resume=True)


def test_the_cache_of_states_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """A head trained without room for states has the same weights."""
    run(folder, tmp_path / "kept", recipe_for(folder), stop_after=4)
    run(folder, tmp_path / "none", recipe_for(folder, states_gb=0.0), stop_after=4)
    assert not list((tmp_path / "none" / "states").rglob("*.safetensors"))
    kept, none = tensors(tmp_path / "kept"), tensors(tmp_path / "none")
    assert all(torch.equal(kept[n], none[n]) for n in kept)


def test_layout_is_the_published_one(folder: Path, tmp_path: Path) -> None:
    """The inference head and vLLM read these names, shapes, offsets and flags; the frequent tokens are kept."""
    size = SizeSettings(draft_vocab_size=150, num_kv_heads=4)
    run(folder, tmp_path / "out", recipe_for(folder, size=size), stop_after=2)
    head = tmp_path / "out" / "head"
    config = read_head_config(head)
    expected = expected_tensors(config)
    del expected["embed_tokens.weight"]
    found = tensors(head.parent)
    assert {n: tuple(t.shape) for n, t in found.items() if n != "t2d"} == expected
    assert found["d2t"].dtype == torch.int64
    ids = torch.arange(150) + found["d2t"]
    assert torch.equal(found["t2d"].nonzero().flatten(), ids)
    raw = json.loads((head / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(AUX)
    assert raw["max_position_embeddings"] == 256
    texts = states.StoredTexts(sorted((tmp_path / "out" / "texts").rglob("*.safetensors")))
    written = torch.cat([i[g:] for i, g in zip(texts.ids, texts.num_given)])
    counts = torch.bincount(written, minlength=MODEL_VOCAB)
    left_out = torch.ones(MODEL_VOCAB, dtype=torch.bool).index_fill(0, ids, False)
    assert counts[left_out].max() <= counts[ids].min()


def test_a_head_is_also_written_in_few_bits(folder: Path, tmp_path: Path, target: Llama) -> None:
    """The inference head reads the packed copy, whose matrices are the trained ones, rounded."""
    recipe = recipe_for(folder, size=SizeSettings(draft_vocab_size=150), store="w8a8,lm_head=w8a16")
    out = run(folder, tmp_path / "out", recipe, stop_after=1).folder.parent
    dense_head, packed = (load_head(out / name, target, target.ops) for name in ("head", "packed"))
    assert (packed.weights.lm_head.activations, packed.weights.layer.o.activations) == (None, "int8")
    for name in ("lm_head", "fc"):
        wanted, found = (dense(target.ops, getattr(h.weights, name)) for h in (dense_head, packed))
        torch.testing.assert_close(found, wanted, atol=0.1 * float(wanted.abs().max()), rtol=0.0)
    assert (out / "packed" / "README.md").is_file()
    with pytest.raises(ConfigError, match="w8a8"):
        run(folder, tmp_path / "out", replace(recipe, store="fp32"), resume=True, stop_after=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": LossSettings(unroll=0)}, "unroll"),
        ({"size": SizeSettings(draft_vocab_size=305)}, "draft_vocab_size 305"),
        ({"size": SizeSettings(num_kv_heads=3)}, "multiple"),
        ({"layers": (1, 2, 4)}, "layers"),
        ({"texts": TextSettings(new_tokens=300)}, "context"),
        ({"target": ""}, "--target"),
        ({"train": TrainSettings(12, rows=6, row_tokens=8)}, "train.row_tokens 8 cuts every text before"),
    ],
)
def test_bad_recipes_are_refused(folder: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(folder, tmp_path / "out", recipe_for(folder, **change))
    assert not (tmp_path / "out").exists()


GOOD = '{"prompt": "the sum of"}\n'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("prompts", None, "no prompts at"),
        ("prompts", GOOD + '{"question": "b"}', r"prompts\.jsonl:2: found question; write"),
        ("prompts", "\n", "holds no prompts"),
        ("measure", None, "to measure on"),
        ("measure", GOOD + '{"prompt": "a"', r"jsonl:2 is no JSON"),
        ("measure", "\n \n", "holds no prompts to measure on"),
        ("measure", GOOD + '{"text": "a b c"}', "jsonl:2: found text; write .*messages.* or .*prompt"),
        (
            "measure",
            GOOD + json.dumps({"prompt": "the list is empty " * 80}),
            f"jsonl:2 has .* at most {256 - NEW_TOKENS}",
        ),
        ("measure", GOOD + '{"messages": [{"role": "user"}]}', "jsonl:2: .*content"),
        ("measure", GOOD + '{"messages": ["hello"]}', "jsonl:2: .*'content'"),
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
        run(folder, tmp_path / "out", recipe_for(folder), **{name: path})
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_written_over_and_prompts_are_needed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts FILE"):
        run_head(recipe_for(folder), Sources(), tmp_path, quiet=True)
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match="--resume"):
        run(folder, tmp_path, recipe_for(folder))
