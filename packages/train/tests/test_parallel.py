"""Drafts trained to guess several tokens in one pass: rows as in drafting, dropped masks, and what they learn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lawkit import MODEL_VOCAB, TOKENIZER_SIZE, write_model

from sameseed import LLM, SamplingParams, ops
from sameseed.cli import main
from sameseed.config import SpecConfig
from sameseed.errors import ConfigError
from sameseed.kvcache.cache import KVCache
from sameseed.models.loader import load_model, read_config
from sameseed.models.runner import ModelRunner
from sameseed.quantize._plan import QuantizePlan
from sameseed.quantize._run import quantize
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed_train.checkpoint import export_model
from sameseed_train.draft import DraftRecipe, DraftSize, begin_draft, run_draft
from sameseed_train.losses import fused_soft_cross_entropy
from sameseed_train.model import LlamaForTraining, ModelShape
from sameseed_train.own import Sources
from sameseed_train.parallel import MaskSettings, chain_lengths, mask_of, masked_rows
from sameseed_train.recipe import TrainSettings
from sameseed_train.seeds import TextSettings
from sameseed_train.states import TextStates

SHAPE = ModelShape(MODEL_VOCAB, 16, 2, 2, 1, 8, 24, max_positions=256)
MASK = MODEL_VOCAB - 1


def text_of(length: int, given: int, seed: int) -> TextStates:
    """A text whose hidden states are their positions plus 1000 times the seed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, TOKENIZER_SIZE, (length,), generator=generator, dtype=torch.int32)
    states = torch.arange(length - 1).float()[:, None] + 1000 * seed
    return TextStates(ids, given, states.repeat(1, 4).bfloat16().float())


def test_rows_are_what_drafting_sees(tmp_path: Path) -> None:
    """Every row, also of masks, has the logits of the exported model after that text and as many masks."""
    texts = [text_of(12, 4, 1), text_of(9, 0, 2)]
    settings = MaskSettings(4, MASK, keep=0.9)
    rows = masked_rows(texts, 4, settings, 5, "cpu")
    draft = LlamaForTraining(SHAPE, 3)
    with torch.no_grad():
        logits = draft.hidden_where(rows.ids, rows.positions, rows.seen) @ draft.model.embed_tokens.weight.T
        for weight in draft.parameters():  # rounded as they will be stored
            weight.copy_(weight.bfloat16())
        logits = draft.hidden_where(rows.ids, rows.positions, rows.seen) @ draft.model.embed_tokens.weight.T
    export_model(draft, tmp_path, None, ())
    model = load_model(tmp_path, ops.resolve("reference"))
    looked = 0
    for b, text in enumerate(texts):
        n = len(text.states)
        depth = 0
        for r in range(len(rows.ids[b])):
            position = int(rows.positions[b, r])
            depth = depth + 1 if r >= n and rows.seen[b, r, r - 1] and r > n else int(r >= n)
            if r >= n and not rows.counts[b, r]:
                continue  # padding
            known = text.ids[: position + 1 - depth].tolist()
            runner = ModelRunner(model, KVCache([(1, 8)] * 2, 8, 16, "fp32"))
            seq = Sequence(0, known, SamplingParams(), 0)
            runner.blocks.reserve(seq, len(known) + depth)
            out = runner.forward([seq], Draft.chains([[MASK] * depth]), [len(known)])
            torch.testing.assert_close(logits[b, r], out.logits[depth], atol=2e-4, rtol=2e-3)
            looked += depth > 0
    assert looked > 20


def test_places_point_at_the_targets_states() -> None:
    texts = [text_of(11, 4, 1), text_of(9, 0, 2), text_of(5, 5, 3)]
    rows = masked_rows(texts, 4, MaskSettings(5, MASK), 1, "cpu")
    assert len(rows.places) == int(rows.counts.sum()) > len(rows.last)
    wanted = []
    for b in range(3):
        wanted += [1000 * (b + 1) + p for p in rows.positions[b][rows.counts[b]].tolist()]
    said = rows.last[rows.places][:, 0]
    assert said.tolist() == torch.tensor(wanted).float().bfloat16().float().tolist()
    masks = (rows.ids == MASK) & rows.counts
    assert masks.any() and rows.positions[masks].max() <= 9, "no mask guesses beyond the text"


@pytest.mark.parametrize(("keep", "least"), [(0.7, 0.2), (1.0, 1.0), (0.5, 0.0)])
def test_the_drop_keeps_the_shares(keep: float, least: float) -> None:
    settings = MaskSettings(8, MASK, keep, least)
    lengths = chain_lengths(20_000, settings, torch.Generator().manual_seed(1))
    for i in range(1, 8):
        assert float((lengths >= i).float().mean()) == pytest.approx(max(keep**i, least), abs=0.02)
    assert lengths.max() <= 7


def test_targets_by_place_are_targets_by_row() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(7, 5, generator=generator), torch.randn(11, 5, generator=generator)
    targets, shares = torch.rand(3, 11, generator=generator), torch.rand(7, generator=generator)
    places = torch.tensor([0, 1, 2, 2, 0, 1, 1])
    found = fused_soft_cross_entropy(hidden, weight, targets, shares, places)
    assert found.item() == pytest.approx(fused_soft_cross_entropy(hidden, weight, targets[places], shares).item())


# --- whole runs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, and an ordinary draft that learned from the target."""
    root = tmp_path_factory.mktemp("parallel")
    write_model(root / "target")
    prompts = [{"prompt": f"the loop ends when {i}"} for i in range(6)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    recipe = replace(recipe_for(root), begin="", parallel=0)
    sized = replace(recipe, size=DraftSize(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1))
    run_draft(sized, Sources(root / "prompts.jsonl"), root / "usual", quiet=True)
    return root


def recipe_for(root: Path, **changes: Any) -> DraftRecipe:
    return DraftRecipe(
        target=str(root / "target"),
        begin=str(root / "usual" / "draft"),
        parallel=4,
        texts=TextSettings(num_texts=6, prompt_tokens=32, new_tokens=32, greedy=1.0, corpus_share=0.0),
        train=TrainSettings(60, rows=6, row_tokens=64, warmup=2),
        **changes,
    )


def accepted(root: Path, draft: SpecConfig) -> float:
    """Accepted tokens per draft of four, on the target's greedy answers to the prompts."""
    prompts = [json.loads(line)["prompt"] for line in (root / "prompts.jsonl").read_text().splitlines()]
    llm = LLM(str(root / "target"), draft=draft, policy="fixed")
    done = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    plain = LLM(str(root / "target")).generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    return float(llm.engine.metrics.num_accepted_tokens / llm.engine.metrics.num_drafts)


def test_a_draft_learns_to_guess_behind_masks(folder: Path, tmp_path: Path) -> None:
    done = run_draft(recipe_for(folder), Sources(folder / "prompts.jsonl"), tmp_path / "out", quiet=True)
    raw = json.loads((done.folder / "config.json").read_text())
    assert (raw["pard_token"], raw["spd_type"], raw["para_num"]) == (TOKENIZER_SIZE, "pard", 4), "the first free id"
    config = read_config(done.folder)
    assert (config.num_layers, config.hidden_size) == (1, 32), "sizes are those of the draft that it began with"
    before = accepted(folder, SpecConfig("parallel", recipe_for(folder).begin, options={"mask_token": TOKENIZER_SIZE}))
    after = accepted(folder, SpecConfig("draft_model", str(done.folder)))
    assert after > before + 0.3, (before, after)
    assert "guesses up to 4 tokens in one pass" in (done.folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": 1}, "parallel must be 2..64 tokens, or 0"),
        ({"keep": 0.1}, "least_kept <= keep"),
        ({"mask_token": MODEL_VOCAB}, f"mask_token {MODEL_VOCAB} is none of the target's {MODEL_VOCAB}"),
        ({"size": DraftSize(num_layers=3)}, "has sizes of its own"),
    ],
)
def test_bad_settings(folder: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_draft(replace(recipe_for(folder), **changes), Sources(folder / "prompts.jsonl"), tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("config", "said"),
    [({}, "only a Llama with tied embeddings"), ({"tie_word_embeddings": True, "vocab_size": 310}, "has 310 tokens")],
)
def test_what_cannot_be_begun_with(folder: Path, tmp_path: Path, config: dict[str, Any], said: str) -> None:
    write_model(tmp_path / "other", **config)
    recipe = replace(recipe_for(folder), begin=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=said):
        run_draft(recipe, Sources(folder / "prompts.jsonl"), tmp_path / "out", quiet=True)


def test_it_may_begin_with_a_draft_that_is_stored_in_codes(folder: Path, tmp_path: Path) -> None:
    recipe, config = recipe_for(folder), read_config(folder / "target")
    quantize(QuantizePlan(recipe.begin, tmp_path / "w8", "w8a16"))
    codes, _ = begin_draft(replace(recipe, begin=str(tmp_path / "w8")), config)
    whole, _ = begin_draft(recipe, config)
    for name, weight in whole.named_parameters():
        assert torch.allclose(codes.get_parameter(name), weight, atol=0.01 * float(weight.detach().abs().max())), name


def test_the_mask_is_a_token_that_no_text_has(folder: Path) -> None:
    target = folder / "target"
    config = read_config(target)
    assert mask_of(7, target, config) == 7
    assert mask_of(-1, target, config) == TOKENIZER_SIZE
    with pytest.raises(ConfigError, match="with --mask-token ID"):
        mask_of(-1, target, replace(config, vocab_size=TOKENIZER_SIZE))
    embedded = Path(__file__).parents[3] / "sameseed" / "assets" / "target"
    assert mask_of(-1, embedded, read_config(embedded)) == 0, "its padding token"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["draft", "--mask-token", "302"], "--mask-token: only with --parallel K"),
        (["head", "--block-size", "7", "--num-layers", "2"], "--block-size, --num-layers: only with --kind block"),
        (["head", "--kind", "block", "--unroll", "2"], "--unroll: only with --kind eagle3"),
    ],
)
def test_flags_that_nothing_heeds_are_refused(
    argv: list[str], said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ["--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    assert main(["train", *argv, *sources, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_train_draft_parallel_from_flags(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "draft", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    argv += ["--parallel", "3", "--mask-token", "302", "--begin", str(folder / "usual" / "draft"), "--json"]
    small = ["--num-texts", "4", "--new-tokens", "16", "--steps", "2", "--rows", "4", "--out", str(tmp_path / "out")]
    assert main([*argv, *small]) == 0
    found = read_config(Path(json.loads(capsys.readouterr().out)["draft"]))
    assert (found.mask_token, found.num_parallel) == (302, 3)
