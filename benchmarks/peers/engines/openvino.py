"""OpenVINO's runtime on a stateful model exported by optimum-intel."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

SLACK = 32  # most tokens by which the cached context may differ from the requested one


def select_rows(model: ov.Model) -> None:
    """Make the LM head compute only selected rows, as OpenVINO GenAI does. A new input `logit_rows` [R] selects them.

    Otherwise a prefill would compute the logits of all its tokens, which no other engine does.
    """
    logits = next(o for o in model.outputs if "logits" in o.names).node.input_value(0).node
    while logits.get_type_name() != "MatMul":
        logits = logits.input_value(0).node
    rows = ops.parameter([-1], np.int64, name="logit_rows")
    rows.output(0).set_names({"logit_rows"})
    picked = ops.gather(logits.input_value(0), rows, ops.constant(np.int64(1)))
    logits.input(0).replace_source_output(picked.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()


class Engine:
    """`options`: properties of the CPU plugin, e.g. KV_CACHE_PRECISION; others have their defaults."""

    def load(self, model: Path, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        core = ov.Core()
        graph = core.read_model(model / "openvino_model.xml")
        select_rows(graph)
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, **options}
        compiled = core.compile_model(graph, "CPU", properties)
        self.request = compiled.create_infer_request()
        self.names = {name for i in compiled.inputs for name in i.names}
        self.cached = -1
        shown = ("KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "INFERENCE_PRECISION_HINT")
        return {
            "versions": {"openvino": ov.__version__},
            "settings": {
                **{name.lower(): str(compiled.get_property(name)) for name in shown},
                "weights_bytes": (model / "openvino_model.bin").stat().st_size,
            },
        }

    def _infer(self, tokens: Seq[Seq[int]], position: int, logits: Seq[int]) -> float:
        """Seconds of one pass over tokens [B, T] at `position`, with logits of the rows `logits` of each sequence."""
        B, T = len(tokens), len(tokens[0])
        feed = {
            "input_ids": np.asarray(tokens, dtype=np.int64),
            "attention_mask": np.ones((B, position + T), np.int64),
            "position_ids": np.tile(np.arange(position, position + T), (B, 1)),
            "beam_idx": np.arange(B, dtype=np.int32),
            "logit_rows": np.asarray(logits, dtype=np.int64),
        }
        feed = {name: value for name, value in feed.items() if name in self.names}
        start = time.perf_counter()
        self.request.infer(feed, share_inputs=True, share_outputs=True)
        return time.perf_counter() - start

    def rows(self, tokens: Seq[int], context: int) -> float:
        # The state can only grow. It starts SLACK tokens below the requested context, and is rebuilt SLACK above it.
        if not context - SLACK <= self.cached <= context + SLACK:
            self.request.reset_state()
            self.cached = context - SLACK
            self._infer([[3 + i % 500 for i in range(self.cached)]], 0, [self.cached - 1])
            self._infer([[3]], self.cached, [0])  # grows the state's buffer now, so that no timed pass does
            self.cached += 1
        seconds = self._infer([tokens], self.cached, range(len(tokens)))
        self.cached += len(tokens)
        return seconds

    def prefill(self, tokens: Seq[int]) -> float:
        self._reset()
        seconds = self._infer([tokens], 0, [len(tokens) - 1])
        self._reset()
        return seconds

    def _reset(self) -> None:
        self.request.reset_state()
        self.cached = -1

    def batch(self, prompts: Seq[Seq[int]], steps: int) -> float:
        self._reset()
        context = len(prompts[0])
        self._infer(prompts, 0, [context - 1])
        seconds = sum(self._infer([[3 + b] for b in range(len(prompts))], context + i, [0]) for i in range(steps))
        self._reset()
        return seconds

    def probe(self, tokens: Seq[int], count: int) -> list[float]:
        self._reset()
        self._infer([tokens], 0, [len(tokens) - 1])
        logits = self.request.get_tensor("logits").data[0, -1, :count]
        self._reset()
        return [float(x) for x in logits]


class Writer:
    """Texts by GenAI's pipeline. `options`: way ("ngram": prompt lookup, else the draft model); k, tokens per draft."""

    def load(
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        import openvino_genai as genai

        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        more: dict[str, Any] = {}
        if options.get("way") == "ngram":
            more["prompt_lookup"] = True
        elif draft is not None:
            more["draft_model"] = genai.draft_model(str(draft), "CPU", **properties)
        if more:  # only GenAI's continuous batching speculates
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1, max(1024, max_len), 1
            scheduler.enable_prefix_caching = False
            more["scheduler_config"] = scheduler
        self.pipeline = genai.LLMPipeline(str(model), "CPU", **more, **properties)
        self.config = self.pipeline.get_generation_config()
        self.config.do_sample, self.config.apply_chat_template = False, False
        if more:
            self.config.num_assistant_tokens = options["k"]
        if "prompt_lookup" in more:
            self.config.max_ngram_size = 3
        return {"versions": {"openvino-genai": genai.__version__}, "settings": {**properties, **options}}

    def write(self, prompt: Seq[int], count: int) -> list[int]:
        self.config.max_new_tokens = count
        out = self.pipeline.generate(ov.Tensor(np.asarray([prompt], dtype=np.int64)), self.config)
        return [int(token) for token in out.tokens[0]]
