"""Other engines at the same shapes, in a process of their own: `gpu_peers.py transformers|vllm JSON`.

Prints one line of JSON a measurement, as soon as there is one. Weights are random, and nothing is fetched.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch

STEPS = 24


def tell(**found: Any) -> None:
    """One measurement."""
    print(json.dumps(found), flush=True)


def timed(job: Callable[[], object], device: str) -> float:
    """Milliseconds of a job, the device's work included."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    job()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


@torch.inference_mode()
def with_transformers(raw: dict[str, Any], device: str, batches: list[int], context: int, prompt: int) -> None:
    """Prefill of one prompt and decoding, by the model's own forward: sdpa as it is, then compiled."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

    kind = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "MistralForCausalLM": "mistral"}
    config = AutoConfig.for_model(kind[raw["architectures"][0]], **{k: v for k, v in raw.items() if k != "model_type"})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    shared = {"engine": "transformers", "version": transformers.__version__, "format": "bf16"}

    def decode(batch: int, cache: Any, forward: Callable[..., Any]) -> list[float]:
        ids = torch.randint(raw["vocab_size"], (batch, context), device=device)
        forward(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        taken = []
        for _ in range(STEPS):
            one = ids[:, :1].contiguous()
            taken.append(timed(lambda ids=one: forward(ids, past_key_values=cache, use_cache=True), device))
        return taken[4:]

    ids = torch.randint(raw["vocab_size"], (1, prompt), device=device)
    prefill = [
        timed(lambda: model(ids, past_key_values=DynamicCache(config=config), logits_to_keep=1), device)
        for _ in range(4)
    ][1:]
    tell(**shared, kind="prefill", mode="sdpa", batch=1, rows=prompt, ms=prefill, median_ms=statistics.median(prefill))
    for batch in batches:
        taken = decode(batch, DynamicCache(config=config), model)
        tell(**shared, kind="decode", mode="sdpa", batch=batch, context=context, ms=taken,
             median_ms=statistics.median(taken))  # fmt: skip
    if device == "cpu":
        return
    for batch in batches[:2]:
        cache = StaticCache(config=config, max_cache_len=context + STEPS + 8)
        taken = decode(batch, cache, torch.compile(model, mode="reduce-overhead", dynamic=False))
        tell(**shared, kind="decode", mode="compiled", batch=batch, context=context, ms=taken,
             median_ms=statistics.median(taken))  # fmt: skip


def with_vllm(raw: dict[str, Any], device: str, batches: list[int], context: int, prompt: int) -> None:
    """Decoding by vLLM with dummy weights: the time of more tokens over the time of fewer, per token."""
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**raw, "torch_dtype": "bfloat16", "model_type": "llama"}))
        for quantization in (None, "fp8"):
            how = {"quantization": quantization, "gpu_memory_utilization": 0.8, "enable_prefix_caching": False}
            how |= {"max_model_len": context + 256, "load_format": "dummy", "skip_tokenizer_init": True}
            llm = vllm.LLM(model=folder, **how)

            def run(batch: int, count: int, llm: Any = llm) -> float:
                params = vllm.SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, temperature=0.0)
                prompts = [{"prompt_token_ids": [3 + (i + b) % 500 for i in range(context)]} for b in range(batch)]
                return timed(lambda: llm.generate(prompts, params, use_tqdm=False), device)

            shared = {
                "engine": "vllm",
                "version": vllm.__version__,
                "format": quantization or "bf16",
                "mode": "default",
            }
            for batch in batches:
                run(batch, 8)
                taken = [(run(batch, 8 + STEPS) - run(batch, 8)) / STEPS for _ in range(3)]
                median = statistics.median(taken)
                tell(**shared, kind="decode", batch=batch, context=context, ms=taken, median_ms=median)
            del llm


if __name__ == "__main__":
    {"transformers": with_transformers, "vllm": with_vllm}[sys.argv[1]](**json.loads(sys.argv[2]))
