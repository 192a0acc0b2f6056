"""L1: a row's bits do not depend on the rows beside it, on its place, on threads, or on where its keys are stored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sameseed import ops as backends, registry
from sameseed.batch import Rows, build_batch
from sameseed.errors import SameseedError
from sameseed.kvcache.cache import KVCache
from sameseed.laws.check import EFFORTS, Effort, Found, check
from sameseed.laws.subject import Subject
from sameseed.models.decoder import Decoder
from sameseed.ops import Ops, gated_rows, normed_rows, plain_rows
from sameseed.scheme import PRESETS, QuantScheme, QuantTensor

NUM_ROWS = 128
SIZES = (*range(1, 34), 64, 128)  # rows of a pass
STRIDE = 8  # step through SIZES from pass to pass, coprime to their number, so that all have a turn
PASSES = 10  # least passes of a product
THREADS = (1, 2, 3, 4, 8)
WIDTHS = (32, 64, 96, 160, 256, 512, 1024, 2048, 4096, 8192)  # K of random weights
OUTPUTS = (33, 64, 256)  # O of random weights
LAST = 64  # last positions of a sequence, whose attention is compared


@dataclass(frozen=True)
class Product:
    """An op on rows: float32 x [T, K] in, [T, O] out."""

    name: str
    width: int
    call: Callable[[Tensor], Tensor]


def differing(a: Tensor, b: Tensor) -> int:
    """Number of values of two float32 tensors whose bits differ."""
    return int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum())


def randn(*shape: int, seed: int, device: str) -> Tensor:
    """Normal noise, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore the thread counts of PyTorch and of the native kernels afterwards."""
    native, of_torch = backends.num_threads(), torch.get_num_threads()
    try:
        yield
    finally:
        backends.set_num_threads(native)
        torch.set_num_threads(of_torch)


@check(
    "L1", "row invariance of products", "0 differing values", least={"products": 400, "row_counts": 10}, products=20_000
)
def row_invariance(subject: Subject, effort: Effort) -> Found:
    """The bits of a row's product, norm and activation depend on nothing but the row.

    They do not depend on the rows of the pass (1 to 128), the row's place among them, or the number of threads (1 to
    8).
    """
    # From normal effort on, each product with the models' own weights is tried at every pass size.
    wanted = effort.of(20_000, 400)
    # Each weight gets few enough passes that many weights are tried.
    share, every = max(PASSES, wanted // 200), effort.share >= EFFORTS["normal"]
    found = Found({"products": 0, "weights": 0, "rows_alone": 0}, {"differing_values": 0})
    rng = random.Random(subject.seed)
    names: set[str] = set()
    sizes: set[int] = set()
    with threads_kept():
        for own, products in ((True, _own(subject)), (False, _grid(subject, rng))):
            for product in products:
                if found.sizes["products"] >= wanted and not (own and every):
                    break
                passes = max(len(SIZES), share) if own and every else share
                sizes |= _compare(product, passes, rng, found, subject.device)
                found.sizes["weights"] += 1
                names.add(product.name)
    found.sizes["row_counts"] = len(sizes)
    missing = sorted(set(SIZES) - sizes)
    found.notes += [
        f"looked at: {', '.join(sorted(names))}",
        f"rows of a pass: {len(sizes)} of {len(SIZES)} sizes"
        + (f" (not tried: {', '.join(map(str, missing))})" if missing else "")
        + (", each for every product of the models' own" if every else ", in turn: not each for every product"),
    ]
    return found


def _compare(product: Product, passes: int, rng: random.Random, found: Found, device: str) -> set[int]:
    """Compare passes of one op, with sizes in turn and random rows and threads, with each row alone on one thread.

    Returns the sizes that were tried.
    """
    x = randn(NUM_ROWS, product.width, seed=product.width, device=device)
    x[NUM_ROWS // 16] *= 100.0  # an outlier row: shows a scale that is shared by rows
    backends.set_num_threads(1)
    rows = [product.call(x[i : i + 1].clone()) for i in range(NUM_ROWS)]
    alone = torch.cat([row.clone() for row in rows])
    found.sizes["rows_alone"] += NUM_ROWS
    start = found.sizes["products"]  # sizes continue in turn from weight to weight
    tried = set()
    for n in range(passes):
        size = SIZES[STRIDE * (start + n) % len(SIZES)]
        picked = torch.tensor(rng.sample(range(NUM_ROWS), size), device=device)
        threads = rng.choice(THREADS)
        backends.set_num_threads(threads)
        count = differing(product.call(x[picked].clone()), alone[picked])
        tried.add(size)
        found.sizes["products"] += 1
        where = f"{product.name}, {size} rows, {threads} threads"
        found.wrong("differing_values", where, "0 values differ from the rows alone", count, count)
    return tried


def _own(subject: Subject) -> Iterator[Product]:
    """The ops of the loaded models: each weight shape and format in every kind of product, and a norm and a gate."""
    for name, ops, w in own_weights(subject):
        yield from _products(name, ops, w, subject.device)
    ops, c = subject.target.ops, subject.target.config
    norm = torch.linspace(0.5, 1.5, c.hidden_size).to(subject.device)
    yield Product("rms_norm", c.hidden_size, lambda x: ops.rms_norm(x, norm, c.rms_eps))
    yield Product("silu_mul", 2 * c.intermediate_size, ops.silu_mul)


def _products(name: str, ops: Ops, w: QuantTensor, device: str) -> Iterator[Product]:
    width = w.shape[1]
    norm = torch.linspace(0.5, 1.5, width).to(device)
    yield Product(f"{name} linear", width, lambda x: ops.product(plain_rows(x), w))
    yield Product(f"{name} norm_linear", width, lambda x: ops.product(normed_rows(x, norm, 1e-5), w))
    yield Product(f"{name} silu_linear", 2 * width, lambda x: ops.product(gated_rows(x), w))


def own_weights(subject: Subject) -> Iterator[tuple[str, Ops, QuantTensor]]:
    """Yield (name, ops that multiply it, weight) of the loaded models, one weight of each shape and format."""
    models = [m for m in (subject.target, *subject.loaded.drafts) if isinstance(m, Decoder)]
    seen: set[object] = set()
    for model in models:
        ops, weights = model.ops, model.weights
        for name, w in [*(("layer", m) for m in weights.layers[0].matrices), ("lm_head", weights.lm_head)]:
            key = (name, w.shape, w.format, w.activations, ops.name)
            if key in seen:
                continue
            seen.add(key)
            yield f"{name} {w.format}", ops, w


def random_weights(subject: Subject, rng: random.Random, turn: int = 0) -> Iterator[tuple[str, QuantTensor]]:
    """Yield (scheme name, random weight): the configured scheme at every width, then every other scheme.

    Each `turn` has other weights.
    """
    own, ops = subject.config.format, subject.target.ops
    for name in dict.fromkeys((own, *PRESETS, *registry.loaded("formats"))):
        for width in rng.sample(WIDTHS, len(WIDTHS)):
            weight = randn(rng.choice(OUTPUTS), width, seed=width + turn * WIDTHS[-1], device=subject.device)
            try:
                yield name, ops.encode(weight * width**-0.5, QuantScheme.parse(name))
            except SameseedError:  # not a weight format, or its group size does not divide this width
                continue


def _grid(subject: Subject, rng: random.Random) -> Iterator[Product]:
    for name, w in random_weights(subject, rng):
        yield next(_products(f"random {name}", subject.target.ops, w, subject.device))


@check("L1a", "row invariance of attention", "0 differing values", least={"passes": 60}, passes=4_000)
def attention(subject: Subject, effort: Effort) -> Found:
    """A query's attention has the same bits alone and in passes of up to 64 rows, beside other sequences.

    It does not depend on where the cache's blocks lie, or on the number of threads.
    """
    wanted = effort.of(4_000, 60)
    model, rng = subject.target, random.Random(subject.seed)
    c, name = model.config, subject.kv_format
    found = Found({"passes": 0, "rows": 0}, {"differing_values": 0}, notes=[f"cache in {name}"])
    with threads_kept():
        turns = 0
        while found.sizes["passes"] < wanted:
            length = rng.choice((LAST + 1, 100, 257, 600))
            block = rng.choice((4, 16, 32))
            kv = randn(2, length, c.num_kv_heads, c.head_dim, seed=turns, device=subject.device)
            q = randn(length, c.num_heads, c.head_dim, seed=turns + 1, device=subject.device)
            alone = Stored(model, name, block, kv, list(range(-(-length // block))))
            backends.set_num_threads(1)
            truth = torch.cat([alone.attend(q, p, 1) for p in range(length - LAST, length)])
            shuffled = list(range(-(-length // block)))
            rng.shuffle(shuffled)
            moved = Stored(model, name, block, kv, shuffled)
            for _ in range(max(8, wanted // 8)):
                size = rng.randint(1, LAST)
                start = rng.randint(length - LAST, length - size)
                threads = rng.choice(THREADS)
                backends.set_num_threads(threads)
                got = moved.attend(q, start, size, mates=rng.randint(0, 2))
                at = start - (length - LAST)
                count = differing(got, truth[at : at + size])
                found.sizes["passes"] += 1
                found.sizes["rows"] += size
                where = f"{size} rows from position {start}, {threads} threads"
                found.wrong("differing_values", where, "0 values differ", count, count)
            turns += 2
    return found


class Stored:
    """Keys and values [2, S, Hk, D] of one sequence, stored in a cache of one layer."""

    def __init__(self, model: Decoder, name: str, block: int, kv: Tensor, blocks: list[int]) -> None:
        c, device = model.config, model.device
        self.model, self.block, self.blocks = model, block, blocks
        self.cache = KVCache(c.kv_shapes[:1], len(blocks), block, name, str(device))
        slots = [blocks[i // block] * block + i % block for i in range(kv.shape[1])]
        model.ops.store_kv(kv[0], kv[1], self.cache.layers[0], torch.tensor(slots, dtype=torch.int32, device=device))

    def attend(self, q: Tensor, start: int, size: int, mates: int = 0) -> Tensor:
        """Attention of rows start .. start+size-1 in one pass, as [size, H D]; `mates` other queries share the pass."""
        mine = Rows([0] * size, start, [], [], self.blocks, False)
        others = [Rows([0], i, [], [], self.blocks, False) for i in range(mates)]
        batch = build_batch([*others, mine], self.block, self.model.device)
        rows = torch.cat([q[:mates], q[start : start + size]]).contiguous()
        out = self.model.ops.attention(rows, self.cache.layers[0], batch, self.model.config.head_dim**-0.5)
        return out[mates:].reshape(size, -1).clone()
