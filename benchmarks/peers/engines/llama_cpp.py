"""llama.cpp through its C API as bound by llama-cpp-python. Only llama_decode is timed, without Python code inside."""

from __future__ import annotations

import ctypes
import json
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import llama_cpp as api
from protocol import die_with_parent

SERVER = Path(sys.prefix) / "llama.cpp" / "build" / "bin" / "llama-server"  # as environments.py builds it

Row = tuple[int, int, int, bool]  # token, position, sequence, logits wanted


@api.llama_log_callback
def errors_only(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Print errors only; llama.cpp's other messages fill a page per model."""
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        print(text.decode(errors="replace"), end="", flush=True)


class Engine:
    """`options`: kv ("f16" by default, llama.cpp's own; or "bf16", "q8_0")."""

    def load(self, model: Path, threads: int, max_len: int, batch: int, options: dict[str, Any]) -> dict[str, object]:
        api.llama_log_set(errors_only, ctypes.c_void_p(0))
        api.llama_backend_init()
        loading = api.llama_model_default_params()
        loading.n_gpu_layers = 0
        # Read the file instead of mapping it: resident memory then counts each weight once, and no page is read again.
        loading.load_mode = api.LLAMA_LOAD_MODE_NONE
        self.model = api.llama_model_load_from_file(str(model).encode(), loading)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model.name}")
        self.batch_size = max(2048, batch * max_len)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch * -(-max_len // 256) * 256, batch
        params.n_batch, params.n_ubatch = self.batch_size, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = {"f16": 1, "q8_0": 8, "bf16": 30}[options.get("kv", "f16")]
        params.no_perf = True
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context; lower --max-len or the batch")
        self.memory = api.llama_get_memory(self.context)
        self.slots = api.llama_batch_init(self.batch_size, 0, 1)
        self.cached = -1
        return {
            "versions": {"llama-cpp-python": api.__version__},
            "settings": {
                "flash_attention": True,
                "kv": options.get("kv", "f16"),
                "mmap": False,
                "ubatch": 512,
                "weights_bytes": api.llama_model_size(self.model),
                "system": api.llama_print_system_info().decode(),
            },
        }

    def _decode(self, rows: Seq[Row]) -> float:
        slots = self.slots
        slots.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            slots.token[i], slots.pos[i], slots.n_seq_id[i] = token, position, 1
            slots.seq_id[i][0], slots.logits[i] = sequence, wanted
        start = time.perf_counter()
        status = api.llama_decode(self.context, slots)
        api.llama_synchronize(self.context)
        seconds = time.perf_counter() - start
        if status:
            raise RuntimeError(f"llama_decode returned {status} for {len(rows)} rows")
        return seconds

    def _clear(self) -> None:
        api.llama_memory_clear(self.memory, False)
        self.cached = -1

    def rows(self, tokens: Seq[int], context: int) -> float:
        if self.cached != context:
            self._clear()
            self._decode([(3 + i % 500, i, 0, False) for i in range(context)])
            self.cached = context
        seconds = self._decode([(token, context + i, 0, True) for i, token in enumerate(tokens)])
        api.llama_memory_seq_rm(self.memory, 0, context, -1)
        return seconds

    def prefill(self, tokens: Seq[int]) -> float:
        self._clear()
        seconds = self._decode([(token, i, 0, i + 1 == len(tokens)) for i, token in enumerate(tokens)])
        self._clear()
        return seconds

    def batch(self, prompts: Seq[Seq[int]], steps: int) -> float:
        self._clear()
        for b, prompt in enumerate(prompts):
            self._decode([(token, i, b, False) for i, token in enumerate(prompt)])
        context, seconds, draw = len(prompts[0]), 0.0, random.Random(2)
        for step in range(steps):
            seconds += self._decode([(draw.randrange(3, 1000), context + step, b, True) for b in range(len(prompts))])
        self._clear()
        return seconds

    def probe(self, tokens: Seq[int], count: int) -> list[float]:
        self._clear()
        self._decode([(token, i, 0, i + 1 == len(tokens)) for i, token in enumerate(tokens)])
        logits = api.llama_get_logits_ith(self.context, len(tokens) - 1)
        values = [float(logits[i]) for i in range(count)]
        self._clear()
        return values


class Writer:
    """Texts by llama-server. `options`: k, tokens per draft of a draft model; or way, llama.cpp's n-gram method."""

    def load(
        self, model: Path, threads: int, max_len: int, draft: Path | None, options: dict[str, Any]
    ) -> dict[str, object]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--threads", threads, "--ctx-size", max(max_len, 512), "--parallel", 1, "--flash-attn", "on"]
        flags += ["--load-mode", "none", "--no-webui"]
        if draft is not None:
            flags += ["--spec-type", "draft-simple", "--spec-draft-n-max", options["k"], "--threads-draft", threads]
        elif way := options.get("way"):
            flags += ["--spec-type", way]
        models = ["--model", model, *(["--model-draft", draft] if draft is not None else [])]
        command = [str(part) for part in (SERVER, *models, "--port", port, *flags)]
        # In the same process group, so that the server is frozen with the worker.
        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        while not self._ready():
            time.sleep(0.1)
        return {"versions": {"llama-cpp-python": api.__version__}, "settings": {"flags": " ".join(map(str, flags))}}

    def _ready(self) -> bool:
        """Whether the server answers. Raises RuntimeError if it has ended."""
        if self.server.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {self.server.returncode}")
        try:
            with urllib.request.urlopen(f"{self.url}/health"):
                return True
        except OSError:
            return False

    def write(self, prompt: Seq[int], count: int) -> list[int]:
        asked = {"prompt": list(prompt), "n_predict": count, "temperature": 0.0, "return_tokens": True}
        body = json.dumps({**asked, "cache_prompt": False}).encode()
        request = urllib.request.Request(f"{self.url}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return list(json.load(answer)["tokens"])
