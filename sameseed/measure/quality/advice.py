"""Advice which parts to keep in higher precision: recorded by the quantizer, or measured by restoring parts."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from typing import Any

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.measure.quality.perplexity import perplexity
from sameseed.measure.quality.tasks import Report, silent
from sameseed.measure.quality.variant import Variant
from sameseed.models.config import ModelConfig
from sameseed.models.loader import resolve_model

FILE = "quantization.json"  # written by `sameseed quantize` beside the weights
TOKENS, WINDOW, STRIDE = 4096, 512, 256
MIN_SHARE = 0.1  # least share of the lost log-likelihood that a recommended part recovers
MAX_ADVICE = 3


@dataclass(frozen=True)
class Recommendation:
    """A part of the model (globs over module names) that should keep more bits, and the reason.

    If measured: `recovered`, the share of the lost log-likelihood that it recovers, and `added_bytes`.
    """

    modules: tuple[str, ...]
    reason: str
    recovered: float | None = None
    added_bytes: int | None = None


def recorded(variant: Variant) -> list[Recommendation]:
    """The recommendations in the checkpoint's quantization.json; empty if there are none."""
    folder = resolve_model(variant.model)
    path = folder / FILE if folder.is_dir() else folder.with_name(FILE)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return []
    rows = found.get("recommendation") if isinstance(found, dict) else None
    advice = []
    for row in rows if isinstance(rows, list) else []:
        modules = row.get("modules") if isinstance(row, dict) else None
        if isinstance(modules, list) and modules:
            advice.append(Recommendation(tuple(map(str, modules)), str(row.get("reason", "named by the quantizer"))))
    return advice


def parts(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Parts of a model to try, as globs over module names, by a readable name."""
    last = config.num_layers - 1
    return {
        "embedding and head" if config.tied_embeddings else "embedding, head": ("model.embed_tokens", "lm_head"),
        "first layer": ("model.layers.0.*",),
        **({"last layer": (f"model.layers.{last}.*",)} if last else {}),
        "attention": ("model.layers.*.self_attn.*",),
        "down projections": ("model.layers.*.mlp.down_proj",),
    }


def measured(
    variant: Variant, baseline: Variant, text: str, settings: dict[str, Any], progress: Report = silent
) -> list[Recommendation]:
    """Reload the variant with one part at a time in the checkpoint's own precision, and measure a short text.

    A part is recommended if it recovers at least a tenth of the log-likelihood that the format lost; parts that recover
    most per byte come first. Only for formats chosen at load time: a quantized checkpoint has no higher precision left.
    """
    if variant.format == "auto" or variant.model != baseline.model:
        return []

    def read(format: str) -> tuple[float, int, str, ModelConfig]:
        llm = LLM(variant.model, **{**settings, "format": format, "kv_format": variant.kv_format, "max_num_seqs": 1})
        nats = perplexity(llm, text, WINDOW, STRIDE, TOKENS).nats
        model = llm.engine.runner.model
        return nats, sum(m.nbytes for m in model.weights.matrices), model.weights.dense, model.config

    best, _, _, _ = read(baseline.format)
    nats, size, dense, config = read(variant.format)
    lost = nats - best
    if lost <= 0:
        return []
    found: list[Recommendation] = []
    tried = parts(config)
    for i, (name, globs) in enumerate(tried.items()):
        progress(f"{variant.label}: what to keep, {name}", i, len(tried))
        kept = ",".join([variant.format, *(f"{glob}={dense}" for glob in globs)])
        try:
            its, larger, _, _ = read(kept)
        except (ConfigError, ModelLoadError):
            continue  # not every part of every model can have its own scheme
        gc.collect()
        share, added = (nats - its) / lost, larger - size
        if share >= MIN_SHARE and added > 0:
            reason = f"{name}: in {dense} wins back {share:.0%} of the lost log-likelihood for {added / 1e6:.1f} MB"
            found.append(Recommendation(globs, reason, share, added))
    found.sort(key=lambda a: (a.recovered or 0.0) / (a.added_bytes or 1), reverse=True)
    return found[:MAX_ADVICE]
