"""Whole runs that train a head of a small target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lawkit
import torch
from safetensors.torch import load_file

from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine.build import build_engine
from sameseed.request import SamplingParams
from sameseed_train.head import run_head
from sameseed_train.head_recipe import HeadRecipe
from sameseed_train.own import Sources, Trained
from sameseed_train.seeds import held_out

NEW_TOKENS = 32
PROMPTS = [{"prompt": f"the sum of all parts {i} is"} for i in range(8)] + [
    {"messages": [{"role": "user", "content": "return a + b"}], "domain": "chat"},
    {"text": "def add(a, b): return a + b the loop ends when the list is empty"},
]


def run(
    folder: Path, out: Path, recipe: HeadRecipe, prompts: Path | None = None, measure: Path | None = None, **how: Any
) -> Trained:
    sources = Sources(prompts or folder / "prompts.jsonl", measure=measure or folder / "held.jsonl")
    return run_head(recipe, sources, out, quiet=True, **how)


def tensors(out: Path) -> dict[str, torch.Tensor]:
    return load_file(str(out / "head" / "model.safetensors"))


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["stage"] == "head"]


def assert_resumed_equals_whole(folder: Path, root: Path, recipe: HeadRecipe, stop_after: int) -> None:
    run(folder, root / "whole", recipe)
    run(folder, root / "parts", recipe, stop_after=stop_after)
    assert len(losses(root / "parts")) == stop_after
    run(folder, root / "parts", recipe, resume=True)
    whole, parts = tensors(root / "whole"), tensors(root / "parts")
    assert all(torch.equal(whole[n], parts[n]) for n in whole)
    assert losses(root / "whole") == losses(root / "parts")


def assert_learned_and_counted(folder: Path, out: Path, spec: SpecConfig, late: int) -> None:
    """The loss fell, and the engine's greedy chains of 4 have the drafted and accepted tokens that were counted.

    The engine gives a text's last token to the target; the count may take `late` of its tokens for accepted guesses.
    """
    seen = losses(out)
    assert sum(seen[-5:]) < 0.7 * sum(seen[:5])
    counted = json.loads((out / "results.json").read_text())["acceptance"]["all"]
    assert counted["accepted"] > 0
    engine = build_engine(str(folder / "target"), EngineConfig(spec=spec, cache=CacheConfig(format="fp32")))
    prompts = [ids for ids, _ in held_out(folder / "held.jsonl", engine.tokenizer, engine.max_model_len, NEW_TOKENS)]
    done = [c.metrics.spec for c in lawkit.run(engine, prompts, SamplingParams(max_tokens=NEW_TOKENS, seed=0))]
    assert 0 <= counted["accepted"] - sum(m.num_accepted_tokens for m in done) <= late * len(done)
    assert abs(sum(m.num_draft_tokens for m in done) - counted["drafted"]) <= 4 * len(done)
