"""Laws 1 and 4 on the device: kernels against the reference, rows in company, texts with and without drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from gpu_models import DRAFT, TARGET, forget, head_twin, shape_of, twin
from gpu_parts import Tell, attempted
from gpu_plan import Sizes
from torch import Tensor

from sameseed import registry, scheme
from sameseed.batch import Rows, build_batch
from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.engine.build import assemble
from sameseed.kvcache.cache import KVCache
from sameseed.models.llama import Llama
from sameseed.models.loader import load_tokenizer, resolve_model
from sameseed.ops import Ops, gated_rows, normed_rows, plain_rows, reference
from sameseed.request import FinishReason, SamplingParams
from sameseed.scheme import QuantScheme
from sameseed.study.measure import Job, Run, run_batch
from sameseed.study.workload import DEFAULT_PROMPTS, read_prompts

PAGE = 16
MANY = 33  # rows in company: three tiles of 16, the last with one row


def noise(seed: int, *shape: int, device: str) -> Tensor:
    """Normal noise that is the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def check_kernels(sizes: Sizes, ops: Ops, device: str, tell: Tell) -> None:
    """One record an op and format: the largest error over the tolerance of law 4, and whether rows know no company."""
    forget(device)
    c = shape_of(sizes.shape)
    for format in sizes.formats:
        with attempted(f"products in {format}", tell):
            _check_linear(format, c.hidden_size, c.hidden_size, ops, device, tell)
    with attempted("norms, gates, rotations", tell):
        _check_rows(c.hidden_size, c.num_heads, c.head_dim, ops, device, tell)
    for format in dict.fromkeys((*sizes.kv_formats, "bf16", "fp16", "fp32")):
        with attempted(f"a cache in {format}", tell):
            _check_attention(format, c.num_heads, c.num_kv_heads, c.head_dim, ops, device, tell)


def _told(op: str, format: str | None, got: Tensor, wanted: Tensor, bound: Tensor | float, alone: Tensor) -> Any:
    """A record of one op; `bound`: what an element may differ by; `alone`: the first and the last row, each alone."""
    error = (got - wanted).abs()
    largest = float((error / bound).max())
    same = torch.equal(alone, torch.cat([got[:1], got[-1:]]))
    return {
        "part": "kernels", "op": op, "format": format, "max_error": float(error.max()), "of_tolerance": largest,
        "within": bool(largest <= 1), "rows_alone_equal": same, "finite": bool(got.isfinite().all()),
    }  # fmt: skip


def _check_linear(format: str, height: int, depth: int, ops: Ops, device: str, tell: Tell) -> None:
    plain = QuantScheme.parse(format).encode(noise(1, height, depth, device=device) * depth**-0.5)
    w, x = ops.pack(plain), noise(2, MANY, depth, device=device)
    residual = noise(3, MANY, height, device=device)
    rounding = ops.rounding(w)  # law 4 (docs/guides/gpu.md)
    size = x.abs() @ scheme.get(plain.format).decode(plain).float().abs().T + 4
    norm, wide = 1 + 0.1 * noise(4, depth, device=device), noise(5, MANY, 2 * depth, device=device)
    ends = torch.tensor([0, MANY - 1], device=device)

    def apart(call: Any) -> Tensor:
        return torch.cat([call(slice(0, 1)), call(slice(MANY - 1, MANY))])

    got = ops.product(plain_rows(x), w, residual=residual)
    wanted = reference.product(plain_rows(x), plain, None, residual)
    alone = apart(lambda s: ops.product(plain_rows(x[s]), w, residual=residual[s]))
    tell(_told("linear", format, got, wanted, rounding * size, alone))
    # Of rows that another kernel made, quantized ones may step by a code: bounds are those of the rounding to it.
    step = max(rounding, 2.0**-6 if plain.activations is not None else 0.0)
    rows = reference.rms_norm(x, norm, 1e-5)
    size = rows.abs() @ scheme.get(plain.format).decode(plain).float().abs().T + 4
    got = ops.product(normed_rows(x, norm, 1e-5), w)
    alone = apart(lambda s: ops.product(normed_rows(x[s], norm, 1e-5), w))
    tell(_told("norm_linear", format, got, reference.product(plain_rows(rows), plain), step * size, alone))
    gated = reference.silu_mul(wide)
    size = gated.abs() @ scheme.get(plain.format).decode(plain).float().abs().T + 4
    got = ops.product(gated_rows(wide), w)
    alone = apart(lambda s: ops.product(gated_rows(wide[s]), w))
    tell(_told("silu_linear", format, got, reference.product(plain_rows(gated), plain), step * size, alone))
    picked = ops.product(normed_rows(x, norm, 1e-5, ends.int()), w)
    tell({"part": "kernels", "op": "norm_linear of some rows", "format": format,
          "rows_alone_equal": torch.equal(picked, ops.product(normed_rows(x, norm, 1e-5), w)[ends])})  # fmt: skip


def _check_rows(width: int, heads: int, dim: int, ops: Ops, device: str, tell: Tell) -> None:
    x, norm = noise(6, MANY, width, device=device), 1 + 0.1 * noise(7, width, device=device)
    got = ops.rms_norm(x, norm, 1e-5)
    alone = torch.cat([ops.rms_norm(x[:1], norm, 1e-5), ops.rms_norm(x[-1:], norm, 1e-5)])
    tell(_told("rms_norm", None, got, reference.rms_norm(x, norm, 1e-5), 1e-5, alone))
    wide = noise(8, MANY, 2 * width, device=device)
    got = ops.silu_mul(wide)
    alone = torch.cat([ops.silu_mul(wide[:1]), ops.silu_mul(wide[-1:])])
    tell(_told("silu_mul", None, got, reference.silu_mul(wide), 1e-5, alone))
    turned, table = noise(9, MANY, heads, dim, device=device), noise(10, 64, dim, device=device)
    positions = torch.arange(MANY, dtype=torch.int32, device=device)
    got = ops.rope(turned, positions, table)
    alone = torch.cat([ops.rope(turned[s], positions[s], table) for s in (slice(0, 1), slice(MANY - 1, MANY))])
    tell(_told("rope", None, got, reference.rope(turned, positions, table), 1e-5, alone))


def _check_attention(format: str, heads: int, kv_heads: int, dim: int, ops: Ops, device: str, tell: Tell) -> None:
    """A short sequence, a long one with a tree, and a prompt, in one pass; against the reference, and stored alike."""
    trees = [(3, 1, []), (600, 1, [-1, 0, 0, 2, -1]), (0, 5, [])]
    counts = [-(-(known + pending + len(tree)) // PAGE) for known, pending, tree in trees]
    first = [sum(counts[:i]) for i in range(len(counts))]
    rows = [
        Rows([1] * pending, known, [1] * len(tree), tree, list(range(at, at + count)), True)
        for (known, pending, tree), at, count in zip(trees, first, counts)
    ]
    cache = KVCache(2, sum(counts), PAGE, kv_heads, dim, format, device)
    slots = torch.arange(sum(counts) * PAGE, dtype=torch.int32, device=device)
    k, v = (noise(seed, len(slots), kv_heads, dim, device=device) for seed in (11, 12))
    ops.store_kv(k, v, cache.layers[0], slots)
    reference.store_kv(k, v, cache.layers[1], slots)
    pairs = [(getattr(cache.layers[0], n), getattr(cache.layers[1], n)) for n in ("k", "v", "k_scale", "v_scale")]
    same = all(a is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    tell({"part": "kernels", "op": "store_kv", "format": format, "bits_equal": same, "within": same})
    batch = build_batch(rows, PAGE, torch.device(device))
    q = noise(13, batch.num_rows, heads, dim, device=device)
    got = ops.attention(q, cache.layers[1], batch, dim**-0.5)
    wanted = reference.attention(q, cache.layers[1], batch, dim**-0.5)
    single = [build_batch([rows[i]], PAGE, torch.device(device)) for i in (0, 2)]
    apart = [ops.attention(q[:1], cache.layers[1], single[0], dim**-0.5)]
    apart.append(ops.attention(q[-5:], cache.layers[1], single[1], dim**-0.5)[-1:])
    bound = ops.kv_rounding(format) * float(v.abs().max())
    tell(_told("attention", format, got, wanted, bound, torch.cat(apart)))


# --- texts ---


def settings() -> list[SpecConfig]:
    """Every drafter on the shelf."""
    own = {
        "draft_model": {"model": DRAFT},
        "cascade": {"model": DRAFT, "below": (SpecConfig("ngram", num_draft_tokens=2),)},
        "first": {"below": (SpecConfig("suffix"), SpecConfig("draft_model", DRAFT))},
        "eagle": {"model": "embedded-head"},
    }
    return [SpecConfig(name, num_draft_tokens=3, **own.get(name, {})) for name in registry.names("drafters")]


def check_laws(sizes: Sizes, ops: Ops, device: str, tell: Tell, formats: Seq[str], warm: bool = False) -> None:
    """One record a format, drafter and batch size: are texts those of plain decoding alone? Greedy and sampled."""
    tokenizer = load_tokenizer(resolve_model(TARGET))
    texts = [tuple(p.encode(tokenizer))[-24:] for p in read_prompts(DEFAULT_PROMPTS, 16)]
    few = 2 if warm else 4
    params = [SamplingParams(max_tokens=sizes.law_tokens, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
              for i in range(len(texts))]  # fmt: skip
    jobs: list[Job] = list(zip(texts, params))
    for format in formats:
        quant = QuantScheme.parse(format)
        target, draft = (twin(name, "embedded", quant, ops, device, 256) for name in (TARGET, DRAFT))
        head = head_twin("embedded", target, quant, ops, device)
        low = twin(TARGET, "embedded", QuantScheme.parse("w4a16"), ops, device, 256)
        models: dict[str, tuple[Any, ...]] = {"eagle": (head,), "self_quant": (low,)}
        models |= dict.fromkeys(("draft_model", "cascade", "first"), (draft,))
        plain = _run(jobs[:few], 1, SpecConfig(), (), target, device)
        cases = [(SpecConfig(), few), (SpecConfig(), len(jobs))]
        cases += [(spec, batch) for spec in settings() for batch in ((few,) if warm else (1, few))]
        for spec, batch in cases:
            with attempted(f"{spec.method} at batch {batch} in {format}", tell):
                asked = jobs if batch == len(jobs) else jobs[:few]
                got = _run(asked, batch, spec, models.get(spec.method, ()), target, device)
                if not warm:
                    found = compared(got, plain, sizes.law_tokens)
                    tell({"part": "laws", "format": format, "arm": spec.method, "batch": batch, **found})


def unfinished(run: Run, max_tokens: int) -> list[bool]:
    """Of each completion, whether it ended in an error or before its last token: equal to another it says nothing."""
    return [c.finish_reason is FinishReason.ERROR or len(c.token_ids) < max_tokens for c in run.completions]


def compared(got: Run, plain: Run, max_tokens: int) -> dict[str, Any]:
    """Texts that differ from plain's, which has the first of the prompts; a text that failed, or is not there, differs.

    "failed" counts all of both runs.
    """
    failed, base = unfinished(got, max_tokens), unfinished(plain, max_tokens)
    same = [
        i < len(failed) and not failed[i] and not base[i] and got.texts[i] == text for i, text in enumerate(plain.texts)
    ]
    count = sum(failed) + sum(base)
    return {"texts": len(same), "tokens": sum(map(len, plain.texts)), "differ": same.count(False), "failed": count,
            "equal": all(same) and not count}  # fmt: skip


def _run(jobs: Seq[Job], batch: int, spec: SpecConfig, drafts: Seq[Any], target: Llama, device: str) -> Run:
    """A fresh engine's run, so many prompts at a time."""
    longest = 64 + max(len(prompt) + params.max_tokens for prompt, params in jobs)
    cache = CacheConfig(block_size=PAGE, prefix_cache=False)
    config = EngineConfig(spec=spec, max_num_seqs=batch, max_model_len=longest, device=device, cache=cache)
    tokenizer = load_tokenizer(resolve_model(TARGET))
    engine = assemble(replace(config), tokenizer, batch * -(-longest // PAGE) + 8, target, tuple(drafts))
    run = Run()
    for start in range(0, len(jobs), batch):
        run_batch(engine, jobs[start : start + batch], run)
    return run
