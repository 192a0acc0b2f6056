"""The parts of `make bench-gpu` that run in its own process: passes per format, and speculation on the twins."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_plan import Sizes, passes

from foretoken.config import EngineConfig, SpecConfig
from foretoken.engine.build import assemble
from foretoken.formats.scheme import QuantScheme, QuantTensor
from foretoken.models.config import ModelConfig
from foretoken.models.eagle_loader import load_head
from foretoken.models.layers import LayerWeights, ModelWeights
from foretoken.models.llama import Llama
from foretoken.models.loader import load_tokenizer, open_checkpoint, read_config, resolve_model
from foretoken.models.save import source_config
from foretoken.models.synthetic import RandomCheckpoint
from foretoken.models.weights import Source, WeightReader
from foretoken.ops import Ops
from foretoken.request import SamplingParams
from foretoken.study import memory
from foretoken.study.limits import Limits
from foretoken.study.measure import Run, run_batch
from foretoken.study.passes import Subject
from foretoken.study.shapes import get_shape
from foretoken.study.twin import make_head_twin
from foretoken.study.twin.layout import make_layout
from foretoken.study.twin.source import TwinSource
from foretoken.study.workload import DEFAULT_PROMPTS, read_prompts

Tell = Callable[[Mapping[str, Any]], None]  # writes one record
REPEATS = 7
BLOCK = 16


def peak_bytes(device: str) -> int:
    """The most that this process has held since `forget`: on the GPU, or resident on the CPU."""
    return int(torch.cuda.max_memory_allocated(device)) if device != "cpu" else memory.peak()


def forget(device: str) -> None:
    """Give memory back, and count its peak anew."""
    gc.collect()
    if device == "cpu":
        memory.reset_peak()
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def copied(x: Any) -> Any:
    """Weights once more, in memory of their own."""
    if isinstance(x, torch.Tensor):
        return x.clone()
    if isinstance(x, QuantTensor):
        return replace(x, parts={name: part.clone() for name, part in x.parts.items()})
    if isinstance(x, LayerWeights):
        return replace(x, **{name: copied(getattr(x, name)) for name in x.__dataclass_fields__})
    return tuple(copied(y) for y in x) if isinstance(x, tuple) else x


def assembled(
    config: ModelConfig, source: Source, quant: QuantScheme, ops: Ops, device: str, longest: int, own: Seq[int] = ()
) -> Llama:
    """A model of which only the layers `own`, and one other, are read: the rest are copies of that one.

    So it takes as many bytes in as many places as any, and is made in a fraction of the time.
    """
    reader = WeightReader(config, source, quant, ops, device, None)
    embedding, other = reader.matrix("model.embed_tokens"), None
    layers = []
    for i in range(config.num_layers):
        if i in own or other is None:
            layers.append(reader.layer(f"model.layers.{i}"))
            other = other if i in own else layers[-1]
        else:
            layers.append(copied(other))
    head = embedding if config.tied_embeddings else reader.matrix("lm_head")
    dense = quant.dense_for(source.dtype("model.embed_tokens.weight"))
    weights = ModelWeights(embedding, tuple(layers), reader.vector("model.norm.weight"), head, dense)
    return Llama(config, weights, ops, longest)


def random_model(config: ModelConfig, ops: Ops, quant: QuantScheme, longest: int, device: str) -> Llama:
    """A random model of that shape."""
    return assembled(config, RandomCheckpoint(config), quant, ops, device, longest)


def warm_up(sizes: Sizes, config: ModelConfig, ops: Ops, device: str, kv: str = "auto") -> None:
    """Every pass of every format once, through one layer: so that kernels are compiled before anything is timed."""
    one, jobs = replace(config, num_layers=1, windows=config.windows[:1]), passes(sizes)
    for format in sizes.formats:
        forget(device)
        longest = max(p.context + p.new_tokens for p in jobs)
        subject = Subject(random_model(one, ops, QuantScheme.parse(format), longest, device), kv, jobs)
        for job in jobs:
            subject.seconds(job)


def measure_costs(
    sizes: Sizes, config: ModelConfig, format: str, ops: Ops, device: str, limits: Limits, tell: Tell, kv: str = "auto"
) -> None:
    """One record a pass of one format: milliseconds, c(M), and shares of what the machine's limits allow.

    "read_share": least seconds at the measured bandwidth (a copy counts reading and writing) over the median's;
    "compute_share": the same of PyTorch's matrix products. TTFT is what a "prefill" pass takes.
    """
    forget(device)
    jobs = passes(sizes)
    longest = max(p.context + p.new_tokens for p in jobs)
    begin = time.perf_counter()
    model = random_model(config, ops, QuantScheme.parse(format), longest, device)
    subject = Subject(model, kv, jobs)
    loaded = time.perf_counter() - begin
    subject.seconds(jobs[0])
    base: dict[int, float] = {}
    for job in jobs:
        subject.seconds(job)  # warms up
        taken = [1e3 * subject.seconds(job) for _ in range(REPEATS if job.kind != "prefill" else 3)]
        ms, work = statistics.median(taken), subject.work(job)
        if job.kind == "chain":
            base.setdefault(job.context, ms)  # of one row: rows ascend
        tell(
            {
                "part": "costs", "shape": sizes.shape, "format": format, "kv_format": subject.kv_format,
                "kind": job.kind, "context": job.context, "rows": job.rows, "ms": taken, "median_ms": ms,
                "c": ms / base[job.context] if job.kind == "chain" else None,
                "tokens_per_s": 1e3 * job.rows / ms,
                "read_share": 1e3 * work.memory_s(limits) / ms,
                "compute_share": 1e3 * work.compute_s(limits, "bf16") / ms,
                "weight_bytes": subject.weight_bytes, "peak_bytes": peak_bytes(device), "load_s": loaded,
            }
        )  # fmt: skip


def twin(of: str, shape: str, quant: QuantScheme, ops: Ops, device: str, longest: int) -> Llama:
    """The twin of an embedded model in a shape, made straight into the device's memory."""
    folder = resolve_model(of)
    small = read_config(folder)
    with open_checkpoint(folder) as checkpoint:
        if shape == "embedded":  # a dry run: the small model itself
            return assembled(small, checkpoint, quant, ops, device, longest, range(small.num_layers))
        layout = make_layout(small, get_shape(shape), source_config(folder), shape)
        # Layers without a part of the small model add nothing: one serves for all.
        return assembled(layout.config, TwinSource(layout, checkpoint), quant, ops, device, longest, layout.layers)


@dataclass(frozen=True)
class Arm:
    """A way to decode: its drafter, and the models that it needs beside the target."""

    name: str
    spec: SpecConfig
    drafts: tuple[Any, ...] = ()


def speculate(
    sizes: Sizes, shape: str, target: Llama, arms: list[Arm], format: str, device: str, batch: int, tell: Tell
) -> None:
    """One record an arm, plain decoding first: tokens a second, acceptance, host's share, equality with plain."""
    tokenizer = load_tokenizer(resolve_model("embedded-target"))
    prompts = [tuple(p.encode(tokenizer))[-128:] for p in read_prompts(DEFAULT_PROMPTS, sizes.num_prompts * batch)]
    longest = max(map(len, prompts)) + sizes.max_tokens + 64
    blocks = batch * -(-longest // BLOCK) + 8
    params = SamplingParams(max_tokens=sizes.max_tokens, ignore_eos=True)
    plain: Run | None = None
    for arm in arms:
        shared: dict[str, Any] = {"max_num_seqs": batch, "max_model_len": longest, "device": device}
        engine = assemble(EngineConfig(spec=arm.spec, **shared), tokenizer, blocks, target, arm.drafts)
        run_batch(engine, [(p, replace(params, max_tokens=8)) for p in prompts[:batch]], Run())  # warms up
        run = Run()
        for start in range(0, len(prompts) // batch * batch, batch):
            run_batch(engine, [(p, params) for p in prompts[start : start + batch]], run)
        plain = plain or run
        drafted, accepted = run.metrics.num_draft_tokens, run.metrics.num_accepted_tokens
        tell(
            {
                "part": "speculation", "shape": shape, "format": format, "arm": arm.name, "batch": batch,
                "k": arm.spec.num_draft_tokens if arm.drafts or arm.spec.method != "none" else 0,
                "num_prompts": len(run.completions), "seconds": run.seconds, "tokens_per_s": run.tokens_per_s,
                "speedup": plain.seconds / run.seconds, "equals_plain": run.texts == plain.texts,
                "acceptance_rate": accepted / drafted if drafted else None,
                "host_share": run.overhead / run.seconds,
                "ttft_s": [c.metrics.time_to_first_token for c in run.completions],
                "peak_bytes": peak_bytes(device),
            }
        )  # fmt: skip
        del engine


def measure_speculation(sizes: Sizes, ops: Ops, device: str, tell: Tell, omit: Callable[[str, str], None]) -> None:
    """Twins of the embedded pair: plain, a draft model, a head, in bf16 and in 4 bits, at batch 1 and 4."""
    longest = 512
    for format in ("bf16", "w4a16"):
        forget(device)
        quant = QuantScheme.parse(format)
        target = twin("embedded-target", sizes.shape, quant, ops, device, longest)
        draft = twin("embedded-draft", sizes.draft_shape, quant, ops, device, longest)
        arms = [
            Arm("plain", SpecConfig()),
            Arm("draft_model", SpecConfig("draft_model", "embedded-draft", num_draft_tokens=5), (draft,)),
        ]
        with tempfile.TemporaryDirectory() as temporary:
            try:
                folder = resolve_model("embedded-head")
                if sizes.shape != "embedded":
                    folder = Path(temporary) / "head"
                    shape = get_shape(sizes.shape)
                    make_head_twin(shape, "embedded-head", "embedded-target", folder, name=sizes.shape)
                head = load_head(folder, target, ops, quant, device)
                arms.append(Arm("eagle", SpecConfig("eagle", "embedded-head", num_draft_tokens=5), (head,)))
            except Exception as error:
                omit(f"draft head in {format}", str(error)[:200])
            for batch in (b for b in (1, 4) if b in sizes.batches):
                speculate(sizes, sizes.shape, target, arms, format, device, batch, tell)
        del target, draft, arms


def measure_large(sizes: Sizes, ops: Ops, device: str, tell: Tell) -> None:
    """The large target in 4 bits: plain, with a draft model, and with a cascade of an n-gram drafter and the model."""
    forget(device)
    quant = QuantScheme.parse("w4a16")
    target = twin("embedded-target", sizes.large_shape, quant, ops, device, 512)
    draft = twin("embedded-draft", sizes.draft_shape, quant, ops, device, 512)
    below = (SpecConfig("ngram", num_draft_tokens=3),)
    arms = [
        Arm("plain", SpecConfig()),
        Arm("draft_model", SpecConfig("draft_model", "embedded-draft", num_draft_tokens=8), (draft,)),
        Arm("cascade", SpecConfig("cascade", "embedded-draft", num_draft_tokens=8, below=below), (draft,)),
    ]
    speculate(sizes, sizes.large_shape, target, arms, "w4a16", device, 1, tell)


def shape_of(name: str) -> ModelConfig:
    """A shape by its name. Raises ConfigError."""
    return get_shape(name)
