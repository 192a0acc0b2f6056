"""A part of `make bench-gpu`: transformers at the same shape with random weights, in bf16 with sdpa attention."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gpu_clock import wall
from gpu_parts import Tell
from gpu_plan import Sizes

from sameseed.measure.shapes import SHAPES
from sameseed.models.loader import resolve_model
from sameseed.models.save import source_config
from sameseed.ops import Ops

STEPS, COLD = 20, 4
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "MistralForCausalLM": "mistral"}


def raw_shape(name: str) -> dict[str, Any]:
    """The config.json of a shape."""
    return dict(SHAPES[name]) if name in SHAPES else dict(source_config(resolve_model(name)))


@torch.inference_mode()
def measure_transformers(sizes: Sizes, ops: Ops, device: str, tell: Tell) -> None:
    """Measure decode steps of the model's own forward, batch sizes 1 and 16 first, and the prefill of one prompt."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    try:
        import transformers
    except ImportError:
        tell({"omit": "transformers", "why": "it is not installed"})
        return
    raw = raw_shape(sizes.shape)
    settings = {k: v for k, v in raw.items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(MODEL_TYPES[raw["architectures"][0]], **settings)
    with torch.device(device):
        make = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    shared = {"part": "peers", "engine": "transformers", "version": transformers.__version__, "format": "bf16"}

    def record(job: Callable[[], object], count: int, cold: int, **found: Any) -> None:
        taken = [1e3 * wall(job, device) for _ in range(count + cold)][cold:]
        line: Mapping[str, Any] = {**shared, "mode": "sdpa", **found, "ms": taken}
        tell({**line, "median_ms": statistics.median(taken)})

    for batch in sorted(sizes.batches, key=lambda b: (b not in (1, 16), b)):
        cache = transformers.DynamicCache(config=config)
        ids = torch.randint(config.vocab_size, (batch, sizes.batch_context), device=device)
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        one = ids[:, :1].contiguous()
        record(
            lambda: model(one, past_key_values=cache, use_cache=True), STEPS, COLD,  # noqa: B023 - called at once
            kind="decode", batch=batch, context=sizes.batch_context,
        )  # fmt: skip
    ids = torch.randint(config.vocab_size, (1, sizes.prompts[-1]), device=device)
    record(
        lambda: model(ids, past_key_values=transformers.DynamicCache(config=config), logits_to_keep=1), 3, 1,
        kind="prefill", batch=1, rows=sizes.prompts[-1],
    )  # fmt: skip
