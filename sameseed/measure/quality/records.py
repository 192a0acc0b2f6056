"""Records of evaluations (`EVAL_SCHEMA`): one per model; a comparison writes one per variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict
from typing import Any

from sameseed import store
from sameseed.measure.quality.bootstrap import estimate
from sameseed.measure.quality.compare import Comparison
from sameseed.measure.quality.suite import PerplexityText, Quality
from sameseed.measure.quality.tasks import TaskSettings
from sameseed.measure.quality.variant import Variant
from sameseed.measure.workload import prompts_name
from sameseed.models.loader import resolve_model
from sameseed.report import record
from sameseed.report.schemas import EVAL_SCHEMA


def make_record(
    variant: Variant,
    tasks: Seq[str],
    settings: TaskSettings,
    text: PerplexityText,
    quality: Quality,
    config: Mapping[str, Any],
    comparison: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record of one evaluated model. `config`: further settings that the results depend on."""
    return {
        **record.origin(EVAL_SCHEMA),
        "run": record.now(),
        "config": {
            "label": variant.label,
            "model": record.model_name(variant.model),
            "model_digest": store.weights_key(resolve_model(variant.model)),
            "asked_format": variant.format,
            "asked_kv_format": variant.kv_format,
            "tasks": list(tasks),
            **{name: value for name, value in vars(settings).items() if name != "data"},
            "window": text.window,
            "stride": text.stride,
            "text_tokens": text.tokens,
            **config,
        },
        **quality.as_dict(settings.seed),
        "comparison": comparison,
    }


def of_comparison(found: Comparison) -> list[dict[str, Any]]:
    """The records of a comparison, the baseline first."""
    run_id, asked, made = record.now(), found.asked, []
    for row in found.rows:
        config = {
            **row.speed.stored,
            "draft": found.draft,
            "speculation": dict(asked.speculation),
            "prompts": prompts_name(asked.prompts),
            "num_prompts": len(row.speed.plain[0].completions),
            "max_tokens_of_speed": asked.max_tokens,
        }
        comparison = {
            "baseline": found.rows[0].variant.label,
            "interleaved": found.interleaved,
            "disk_bytes": row.variant.disk_bytes(),
            "weight_bytes": row.speed.weight_bytes,
            "kv_bytes_per_token": row.speed.kv_row_bytes,
            "peak_memory_bytes": row.memory.peak,
            "memory_added_bytes": row.memory.added,
            "perplexity_ratio": None if row.ratio is None else estimate(*row.ratio),
            "differences": {task: estimate(*difference) for task, difference in row.differences.items()},
            "as_target": asdict(row.as_target),
            "as_draft": None if row.as_draft is None else asdict(row.as_draft),
            **row.speed.as_dict(),
            "warnings": row.warnings,
            "advice": [asdict(a) for a in row.advice],
            "notes": row.notes,
        }
        line = make_record(row.variant, asked.tasks, asked.settings, asked.text, row.quality, config, comparison)
        made.append({**line, "run": run_id})
    return made
