"""Records of evaluations: one model, one line, of `EVAL_SCHEMA`; a comparison writes one for each variant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict
from typing import Any

from sameseed.engine.llm import LLM
from sameseed.study import record
from sameseed.study.quality.compare import Comparison, Row
from sameseed.study.quality.suite import PerplexityText, Quality
from sameseed.study.quality.tasks import TaskSettings
from sameseed.study.quality.variant import Variant, stored_format
from sameseed.study.schemas import EVAL_SCHEMA


def _config(variant: Variant, tasks: Seq[str], settings: TaskSettings, text: PerplexityText) -> dict[str, Any]:
    return {
        "label": variant.label,
        "model": record.model_name(variant.model),
        "model_digest": record.weights_digest(variant.model),
        "asked_format": variant.format,
        "asked_kv_format": variant.kv_format,
        "tasks": list(tasks),
        "limit": settings.limit,
        "chat": settings.chat,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
        "window": text.window,
        "stride": text.stride,
        "text_tokens": text.tokens,
    }


def _record(config: Mapping[str, Any], quality: Quality, seed: int, run_id: str, comparison: Any) -> dict[str, Any]:
    return {
        "schema": EVAL_SCHEMA,
        "run": run_id,
        "time": record.now(),
        "commit": record.commit(),
        "machine": record.machine(),
        "config": dict(config),
        **quality.as_dict(seed),
        "comparison": comparison,
    }


def of_model(
    llm: LLM, variant: Variant, tasks: Seq[str], settings: TaskSettings, text: PerplexityText, quality: Quality
) -> dict[str, Any]:
    """The record of one evaluated model."""
    runner = llm.engine.runner
    config = {
        **_config(variant, tasks, settings, text),
        "num_parameters": runner.model.config.num_parameters,
        "format": stored_format(llm),
        "kv_format": runner.cache.format,
        "backend": runner.model.ops.name,
    }
    return _record(config, quality, settings.seed, record.now(), None)


def of_comparison(found: Comparison) -> list[dict[str, Any]]:
    """The records of a comparison, the baseline first."""
    run_id = record.now()
    return [_of_row(row, found, run_id) for row in found.rows]


def _of_row(row: Row, found: Comparison, run_id: str) -> dict[str, Any]:
    asked = found.asked
    config = {
        **_config(row.variant, asked.tasks, asked.settings, asked.text),
        "format": row.speed.format,
        "kv_format": row.speed.kv_format,
        "backend": row.speed.backend,
        "draft": found.draft,
        "speculation": dict(asked.speculation),
        "prompts": asked.prompts.name,
        "num_prompts": len(row.speed.plain[0].completions),
        "max_tokens_of_speed": asked.max_tokens,
    }
    comparison = {
        "baseline": found.baseline.label,
        "interleaved": found.interleaved,
        "disk_bytes": row.disk_bytes,
        "weight_bytes": row.speed.weight_bytes,
        "kv_bytes_per_token": row.speed.kv_row_bytes,
        "peak_memory_bytes": row.memory.peak,
        "memory_added_bytes": row.memory.added,
        "perplexity_ratio": None if row.ratio is None else _pair(row.ratio),
        "differences": {task: _pair(difference) for task, difference in row.differences.items()},
        "as_target": row.as_target.as_dict(),
        "as_draft": None if row.as_draft is None else row.as_draft.as_dict(),
        **row.speed.as_dict(),
        "warnings": row.warnings,
        "advice": [asdict(a) | {"modules": list(a.modules)} for a in row.advice],
        "notes": row.notes,
    }
    return _record(config, row.quality, asked.settings.seed, run_id, comparison)


def _pair(value: tuple[float, tuple[float, float]]) -> dict[str, Any]:
    low, high = value[1]
    finite = math.isfinite(value[0])
    return {"value": value[0] if finite else None, "interval": None if low != low or not finite else [low, high]}
