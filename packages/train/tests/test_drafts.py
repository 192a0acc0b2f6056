"""Drafts learn from a target's own texts, a token or several in a pass: rows as in drafting, and what they learn."""

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
from sameseed.quantize._run import QuantizePlan, quantize
from sameseed.request import Completion, Sequence
from sameseed.spec.draft import Draft
from sameseed_train import learning
from sameseed_train.checkpoint import export_model
from sameseed_train.draft import begin_draft, chain_lengths, components, mask_of, masked_rows, run_draft
from sameseed_train.learning import Sources
from sameseed_train.model import LlamaForTraining, ModelShape
from sameseed_train.recipe import DraftRecipe, DraftSize, TextSettings, TrainSettings
from sameseed_train.states import TextStates
from sameseed_train.trainer import Log

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
    settings = DraftRecipe(parallel=4, mask_token=MASK, keep=0.9)
    rows = masked_rows(texts, 4, settings, 5, "cpu")
    draft = LlamaForTraining(SHAPE, 3)
    with torch.no_grad():
        for weight in draft.parameters():  # rounded as they will be stored
            weight.copy_(weight.bfloat16())
        logits = draft.hidden(rows.ids, rows.positions, rows.seen) @ draft.model.embed_tokens.weight.T
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
    rows = masked_rows(texts, 4, DraftRecipe(parallel=5, mask_token=MASK), 1, "cpu")
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
    settings = DraftRecipe(parallel=8, mask_token=MASK, keep=keep, least_kept=least)
    lengths = chain_lengths(20_000, settings, torch.Generator().manual_seed(1))
    for i in range(1, 8):
        assert float((lengths >= i).float().mean()) == pytest.approx(max(keep**i, least), abs=0.02)
    assert lengths.max() <= 7


def test_components_keep_what_tells_tokens_apart() -> None:
    """Products of rows equal the original's if its rank is at most the number of kept dimensions."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(40, 6, generator=generator) @ torch.randn(6, 24, generator=generator)
    embedding = torch.zeros(40, 8)
    components(embedding, weight)
    torch.testing.assert_close(embedding @ embedding.T, weight @ weight.T, atol=1e-3, rtol=1e-3)


# --- whole runs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, prompts, and an ordinary draft that learned from the target."""
    root = tmp_path_factory.mktemp("drafts")
    write_model(root / "target")
    prompts = [{"prompt": f"the loop ends when {i}"} for i in range(6)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    (root / "held.jsonl").write_text('{"prompt": "the loop ends when none"}\n')
    with pytest.MonkeyPatch.context() as patch:  # so small a draft predicts only what it has learned
        patch.setattr(learning, "not_measured", lambda seeds, *_: seeds)
        run(root, root / "usual", usual(root), measure=root / "prompts.jsonl")
    return root


def usual(root: Path) -> DraftRecipe:
    size = DraftSize(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1)
    return replace(recipe_for(root), begin="", parallel=0, size=size)


def recipe_for(root: Path, **changes: Any) -> DraftRecipe:
    return DraftRecipe(
        target=str(root / "target"),
        begin=str(root / "usual" / "draft"),
        parallel=4,
        texts=TextSettings(num_texts=6, prompt_tokens=32, new_tokens=32, greedy=1.0, corpus_share=0.0),
        train=TrainSettings(60, rows=6, row_tokens=64, warmup=2),
        **changes,
    )


def run(root: Path, out: Path, recipe: DraftRecipe, measure: Path | None = None, **how: Any) -> dict[str, Any]:
    sources = Sources(root / "prompts.jsonl", measure=measure)
    return run_draft(recipe, sources, out, quiet=True, measured_tokens=24, **how).results


def steps(out: Path) -> list[dict[str, Any]]:
    return [row for row in Log(out / "log.jsonl").rows() if row["stage"] == "draft"]


def answers(root: Path, draft: SpecConfig, **how: Any) -> list[Completion]:
    """Greedy answers to the prompts, which are those without a draft."""
    prompts = [json.loads(line)["prompt"] for line in (root / "prompts.jsonl").read_text().splitlines()]
    params = SamplingParams(max_tokens=24, **how)
    done = LLM(str(root / "target"), draft=draft, policy="fixed").generate(prompts, params)
    plain = LLM(str(root / "target")).generate(prompts, params)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    return done


def test_a_draft_learns_and_is_accepted_as_counted(folder: Path) -> None:
    losses = [row["loss"] for row in steps(folder / "usual")]
    assert len(losses) == 60 and sum(losses[-5:]) < 0.9 * sum(losses[:5])
    made = folder / "usual" / "draft"
    config, target = read_config(made), read_config(folder / "target")
    assert (config.num_layers, config.hidden_size, config.num_heads) == (1, 32, 2)
    assert (config.vocab_size, config.eos_token_ids) == (target.vocab_size, target.eos_token_ids)
    counted = json.loads((folder / "usual" / "results.json").read_text())["acceptance"]["all"]
    done = answers(folder, SpecConfig("draft_model", str(made), num_draft_tokens=4))
    drafted, accepted = (
        sum(getattr(c.metrics.spec, name) for c in done) for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    # The engine gives a text's last token to the target; the count may take it, and one before, for accepted drafts.
    assert counted["accepted"] > 0 and 0 <= counted["accepted"] - accepted <= 2 * len(done)
    assert 0 <= counted["drafted"] - drafted <= 4 * len(done)


def accepted_per_draft(folder: Path, draft: SpecConfig) -> float:
    done = [c.metrics.spec for c in answers(folder, draft, ignore_eos=True)]
    return sum(s.num_accepted_tokens for s in done) / sum(s.num_drafts for s in done)


def test_a_draft_learns_to_draft_behind_masks(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out", recipe_for(folder))
    made = tmp_path / "out" / "draft"
    raw = json.loads((made / "config.json").read_text())
    assert (raw["pard_token"], raw["spd_type"], raw["para_num"]) == (TOKENIZER_SIZE, "pard", 4), "the first free id"
    config = read_config(made)
    assert (config.num_layers, config.hidden_size) == (1, 32), "sizes are those of the draft that it began with"
    options = {"mask_token": TOKENIZER_SIZE}
    before = accepted_per_draft(folder, SpecConfig("parallel", recipe_for(folder).begin, options=options))
    after = accepted_per_draft(folder, SpecConfig("draft_model", str(made)))
    assert after > before + 0.3, (before, after)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": 1}, "parallel"),
        ({"keep": 0.1}, "least_kept"),
        ({"mask_token": MODEL_VOCAB}, "mask_token"),
        ({"mask_token": 302, "parallel": 0}, "--parallel K"),
        ({"size": DraftSize(num_layers=3)}, "--begin"),
        ({"begin_layers": (1,)}, "begin_layers"),
        ({"begin": "", "size": DraftSize(num_heads=3, num_kv_heads=2)}, "num_kv_heads"),
    ],
)
def test_bad_settings(folder: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(folder, tmp_path, replace(recipe_for(folder), **changes))
    with pytest.raises(ConfigError, match="--measure"):
        run(folder, tmp_path, recipe_for(folder), measure=folder / "held.jsonl")


@pytest.mark.parametrize(
    ("config", "said"), [({}, "tied embeddings"), ({"tie_word_embeddings": True, "vocab_size": 310}, "310 tokens")]
)
def test_what_cannot_be_begun_with(folder: Path, tmp_path: Path, config: dict[str, Any], said: str) -> None:
    write_model(tmp_path / "other", **config)
    with pytest.raises(ConfigError, match=said):
        run(folder, tmp_path / "out", replace(recipe_for(folder), begin=str(tmp_path / "other")))


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


# --- the command line ---

SMALL = ["--num-texts", "8", "--new-tokens", "16", "--steps", "2", "--rows", "4"]


@pytest.mark.parametrize("parallel", [False, True])
def test_train_draft_from_flags(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: bool
) -> None:
    argv = ["train", "draft", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    argv += ["--out", str(tmp_path / "out"), *SMALL, "--json"]
    sizes = ["--num-layers", "1", "--hidden-size", "16", "--head-dim", "4"]
    begun = ["--parallel", "3", "--mask-token", "302", "--begin", str(folder / "usual" / "draft")]
    assert main([*argv, *(begun if parallel else sizes)]) == 0
    found = json.loads(capsys.readouterr().out)
    config = read_config(Path(found["draft"]))
    assert (config.mask_token, config.num_parallel) == ((302, 3) if parallel else (None, 0))
    assert parallel or config.head_dim == 4
    assert found["results"]["training"]["step"] == 2
    assert main(argv) == 2
    assert "add --resume" in capsys.readouterr().err


def test_train_head_from_flags(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "head", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    held = str(folder / "held.jsonl")
    own = f"--layers 1 1 2 --draft-vocab-size 100 --unroll 2 --measure {held}".split()
    assert main([*argv, "--out", str(tmp_path / "out"), *SMALL, *own]) == 0
    text = capsys.readouterr().out
    assert "drafts accepted" in text and f"--draft {tmp_path / 'out' / 'head'}" in text
    card = (tmp_path / "out" / "head" / "README.md").read_text()
    assert "| all |" in card and "layers = [1, 1, 2]" in card and "100 of the target's" in card
    assert main(["train", "head", "--target", str(folder / "target"), "--prompts", argv[-1]]) == 2
    assert "--out is missing" in capsys.readouterr().err
    assert main([*argv, "--out", str(tmp_path / "new"), "--unroll", "0"]) == 2
    assert "unroll" in capsys.readouterr().err
