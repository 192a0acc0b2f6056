"""A part of `make bench-gpu`: each matrix product of a layer and attention alone, as shares of the copy bandwidth.

The results serve to choose tile sizes. Times are device times (a CUDA graph over more weights than the caches hold). A
profile splits an op's time by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from gpu_clock import busy, device_time, is_fault
from gpu_models import Made, copied, forget
from gpu_parts import Tell, attempted, one_layer
from gpu_plan import Sizes

from sameseed.batch import Rows, build_batch
from sameseed.kvcache.cache import KVCache
from sameseed.laws.kernels import randn
from sameseed.measure.passes import fill
from sameseed.measure.shapes import get_shape
from sameseed.models.config import ModelConfig
from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import WeightReader
from sameseed.ops import Ops, gated_rows, normed_rows, plain_rows
from sameseed.scheme import QuantScheme, QuantTensor

CACHES = 256 << 20  # bytes read before the first weight is read again: more than any level-2 cache holds
MOST = 16  # most copies of a weight
ROWS = (1, 16, 64)
PROFILED = (1, 16)  # numbers of rows at which an op is profiled by kernel
PAGE = 16
KEYS = ((1, 1), (8, 1), (32, 1), (1, 16))  # (rows per sequence, sequences)


def measure_micro(sizes: Sizes, ops: Ops, device: str, tell: Tell, limits: Mapping[str, Any] | None = None) -> None:
    """Write one record per op, format and number of rows: microseconds on the device, share of the copy bandwidth."""
    config = get_shape(sizes.shape)
    read = None if limits is None else float(limits["read_bytes_per_s"])
    for kv_format, format in zip_longest(sizes.kv_formats, sizes.formats):  # alternate, because time may run out
        forget(device)
        if kv_format is not None:
            with attempted(f"attention over {kv_format}", tell):
                measure_attention(sizes, config, kv_format, ops, device, read, tell)
        for name, weight in () if format is None else matrices(config, format, ops, device):
            with attempted(f"{name} in {format}", tell):
                measure_linear(sizes, name, weight, format, ops, device, read, tell)


def matrices(config: ModelConfig, format: str, ops: Ops, device: str) -> list[tuple[str, QuantTensor]]:
    """The weights of one layer, and the LM head."""
    source = Made(RandomCheckpoint(one_layer(config)), device)
    reader = WeightReader(one_layer(config), source, QuantScheme.parse(format), ops, device, None)
    layer = reader.layer("model.layers.0")
    head = reader.matrix("model.embed_tokens" if config.tied_embeddings else "lm_head")
    found = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down, "lm_head": head}
    return [(name, w) for name, w in found.items() if isinstance(w, QuantTensor)]


def call_of(name: str, num_rows: int, w: QuantTensor, ops: Ops, device: str) -> Callable[[QuantTensor], object]:
    """A function that runs the op as the model's forward pass does, on a given weight."""
    height, depth = w.shape
    norm = torch.ones(depth, device=device)
    if name == "down":
        x, residual = randn(num_rows, 2 * depth, seed=1, device=device), randn(num_rows, height, seed=2, device=device)
        return lambda w: ops.product(gated_rows(x), w, residual=residual)
    x = randn(num_rows, depth, seed=1, device=device)
    if name == "o":
        residual = randn(num_rows, height, seed=2, device=device)
        return lambda w: ops.product(plain_rows(x), w, residual=residual)
    return lambda w: ops.product(normed_rows(x, norm, 1e-5), w)


def measure_linear(
    sizes: Sizes, name: str, weight: QuantTensor, format: str, ops: Ops, device: str, read: float | None, tell: Tell
) -> None:
    """Measure one weight's product at each number of rows."""
    count = 1 if device == "cpu" else min(MOST, max(2, -(-CACHES // weight.nbytes)))
    weights = [weight, *(copied(weight) for _ in range(count - 1))]
    for num_rows in (m for m in ROWS if m <= max(sizes.rows)):
        call = call_of(name, num_rows, weight, ops, device)

        def job(call: Callable[[QuantTensor], object] = call) -> None:
            for w in weights:
                call(w)

        seconds, how = device_time(job, device)
        found = {"part": "micro", "op": name, "format": format, "weight": list(weight.shape), "rows": num_rows}
        tell({**found, **_share(seconds / count, weight.nbytes, read), "timed_by": how,
              **kernels(partial(call, weight), device, num_rows in PROFILED)})  # fmt: skip


def measure_attention(
    sizes: Sizes, config: ModelConfig, format: str, ops: Ops, device: str, read: float | None, tell: Tell
) -> None:
    """Measure attention of one layer: few rows over each context, and a batch at the shortest context."""
    dim, kv_heads = config.head_dim, config.num_kv_heads
    for context in sizes.contexts:
        for rows, seqs in KEYS:
            if seqs > 1 and context != min(sizes.contexts):
                continue
            blocks = -(-(context + rows) // PAGE)
            one = KVCache([(kv_heads, dim)], seqs * blocks, PAGE, format, device)
            count = 1 if device == "cpu" else min(MOST, max(2, -(-CACHES // one.nbytes)))
            cache = KVCache([(kv_heads, dim)] * count, seqs * blocks, PAGE, format, device)
            fill(cache)
            parts = [
                Rows([1], context - 1, [1] * (rows - 1), list(range(-1, rows - 2)),
                     list(range(i * blocks, (i + 1) * blocks)), True)
                for i in range(seqs)
            ]  # fmt: skip
            batch = build_batch(parts, PAGE, torch.device(device))
            q = randn(batch.num_rows, config.num_heads, dim, seed=3, device=device)

            def job(cache: KVCache = cache, batch: Any = batch, q: Any = q) -> None:
                for layer in cache.layers:
                    ops.attention(q, layer, batch, dim**-0.5)

            seconds, how = device_time(job, device)
            num_bytes = cache.nbytes / count * (context + rows) / (blocks * PAGE)
            found = {"part": "micro", "op": "attention", "format": format, "context": context, "rows": rows}
            once = kernels(partial(ops.attention, q, cache.layers[0], batch, dim**-0.5), device, True)
            tell({**found, "batch": seqs, **_share(seconds / count, num_bytes, read), "timed_by": how, **once})


def kernels(job: Callable[[], object], device: str, wanted: bool) -> dict[str, Any]:
    """Milliseconds and launches by kernel; empty on the CPU or if not `wanted`, None if the profiler fails."""
    if device == "cpu" or not wanted:
        return {}
    try:
        return {"kernels": busy(job, device).top(6)}
    except RuntimeError as error:
        if is_fault(error):
            raise
        return {"kernels": None}


def _share(seconds: float, num_bytes: float, read: float | None) -> dict[str, float | None]:
    share = None if read is None else num_bytes / read / seconds
    return {"median_us": 1e6 * seconds, "bytes": num_bytes, "read_share": share}
