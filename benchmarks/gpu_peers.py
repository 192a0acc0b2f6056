"""Other engines at the same shapes, in a process of their own: a job as a line of JSON comes in, lines of JSON go out.

Weights are random, and nothing is fetched. A measurement is told as soon as there is one.
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
from gpu_crew import with_parent

STEPS, COLD = 20, 4
OUT = None  # where lines go: what libraries print does not


def tell(**found: Any) -> None:
    """One measurement."""
    print(json.dumps(found), file=OUT, flush=True)


def timed(job: Callable[[], object], device: str) -> float:
    """Milliseconds of a job, the device's work included."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    job()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


class Hugging:
    """A random model of a shape by transformers, in bf16 with sdpa."""

    def __init__(self, raw: dict[str, Any], device: str) -> None:
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM

        kind = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "MistralForCausalLM": "mistral"}
        left = {k: v for k, v in raw.items() if k != "model_type"}
        self.config = AutoConfig.for_model(kind[raw["architectures"][0]], **left)
        self.device, self.vocab = device, raw["vocab_size"]
        with torch.device(device):
            made = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model = made.eval()
        self.shared = {"engine": "transformers", "version": transformers.__version__, "format": "bf16"}

    def prefill(self, prompt: int) -> None:
        """One prompt, logits of its last token."""
        from transformers import DynamicCache

        ids = torch.randint(self.vocab, (1, prompt), device=self.device)
        taken = [
            timed(
                lambda: self.model(ids, past_key_values=DynamicCache(config=self.config), logits_to_keep=1), self.device
            )
            for _ in range(4)
        ][1:]
        tell(**self.shared, kind="prefill", mode="sdpa", batch=1, rows=prompt, ms=taken,
             median_ms=statistics.median(taken))  # fmt: skip

    def decode(self, batch: int, context: int, mode: str) -> None:
        """Tokens of a batch, one after another, by the model's own forward."""
        from transformers import DynamicCache, StaticCache

        compiled = mode == "compiled"
        cache: Any = DynamicCache(config=self.config)
        forward: Any = self.model
        if compiled:
            cache = StaticCache(config=self.config, max_cache_len=context + STEPS + COLD + 8)
            forward = torch.compile(self.model, mode="reduce-overhead", dynamic=False)
        ids = torch.randint(self.vocab, (batch, context), device=self.device)
        self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        one, taken = ids[:, :1].contiguous(), []
        for _ in range(STEPS + COLD):
            taken.append(timed(lambda: forward(one, past_key_values=cache, use_cache=True), self.device))
        tell(**self.shared, kind="decode", mode=mode, batch=batch, context=context, ms=taken[COLD:],
             median_ms=statistics.median(taken[COLD:]))  # fmt: skip


@torch.inference_mode()
def with_transformers(raw: dict[str, Any], device: str, batches: list[int], context: int, prompt: int) -> None:
    """Decoding, the batch sizes of the comparison first, and the prefill of one prompt: sdpa as it is."""
    engine = Hugging(raw, device)
    for batch in sorted(batches, key=lambda b: (b not in (1, 16), b)):
        engine.decode(batch, context, "sdpa")
    engine.prefill(prompt)


@torch.inference_mode()
def with_compiled(raw: dict[str, Any], device: str, batches: list[int], context: int, prompt: int) -> None:
    """Decoding with a static cache, compiled with CUDA graphs."""
    if device == "cpu":
        raise RuntimeError("only a GPU has CUDA graphs to compile for")
    engine = Hugging(raw, device)
    for batch in [b for b in (1, 16) if b in batches]:
        engine.decode(batch, context, "compiled")


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

            shared = {"engine": "vllm", "version": vllm.__version__, "format": quantization or "bf16"}
            for batch in batches:
                run(batch, 8)
                taken = [(run(batch, 8 + STEPS) - run(batch, 8)) / STEPS for _ in range(3)]
                median = statistics.median(taken)
                tell(**shared, mode="default", kind="decode", batch=batch, context=context, ms=taken, median_ms=median)
            del llm


def main() -> None:
    """Read a job, do it, say that it is done."""
    global OUT
    OUT = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with_parent()
    job = json.loads(sys.stdin.readline())
    peers = {"transformers": with_transformers, "compiled": with_compiled, "vllm": with_vllm}
    try:
        peers[job["peer"]](**job["asked"])
    except Exception as error:
        said = str(error).strip().splitlines()
        tell(omit="the rest", why=f"{type(error).__name__}: {said[0] if said else ''}"[:300])
    tell(done=True)
    OUT.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
