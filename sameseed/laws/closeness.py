"""B1, law 4: the backend agrees with the textbook, and its fused ops match their parts bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sameseed.laws import textbook
from sameseed.laws.check import Effort, Found, check
from sameseed.laws.kernels import Stored, differing, own_weights, randn, random_weights, threads_kept
from sameseed.laws.subject import Subject
from sameseed.laws.textbook import Floats, array
from sameseed.ops import SUMS, Ops, gated_rows, normed_rows, plain_rows
from sameseed.scheme import QuantTensor

ROWS = 5  # rows of x in a product
LENGTHS = (1, 70, 300)  # tokens of the sequences that attention reads
SMALL = 10  # tolerance of norms, gates and rotations, in units of SUMS


@check(
    "B1",
    "the backend is the reference",
    "0 values outside the tolerance, 0 differing values of fused ops",
    least={"products": 20, "values": 1_000},
    products=2_000,
)
def backend_is_reference(subject: Subject, effort: Effort) -> Found:
    """Products, norms, gates, rotations and attention agree with plain NumPy within the stated tolerance.

    The tolerance is relative to the sum of |x w|. It covers the order of float32 sums and how the backend rounds rows.
    Fused ops have the bits of their parts.
    """
    found = Found(
        {"products": 0, "values": 0}, {"most_of_tolerance": 0.0, "too_far": 0, "differing_values_of_fused_ops": 0}
    )
    model, rng = subject.target, random.Random(subject.seed)
    with threads_kept():
        for name, ops, w in own_weights(subject):
            _product(found, name, ops, w, subject.device)
            _fused(found, name, ops, w, subject.device)
        wanted = effort.of(2_000, 60)
        turns = (weight for turn in range(wanted) for weight in random_weights(subject, rng, turn))
        for name, w in itertools.islice(turns, max(0, wanted - found.sizes["products"])):
            _product(found, f"random {name}", model.ops, w, subject.device)
        ops, c, device, small = model.ops, model.config, subject.device, SMALL * SUMS
        x = randn(ROWS, c.hidden_size, seed=3, device=device)
        gates = randn(ROWS, 2 * c.hidden_size, seed=4, device=device)
        norm = torch.linspace(0.5, 1.5, c.hidden_size).to(device)
        heads = randn(ROWS, c.num_heads, c.head_dim, seed=5, device=device)
        positions = [min(7, model.max_model_len // ROWS) * i for i in range(ROWS)]
        turned = ops.rope(heads, torch.tensor(positions, dtype=torch.int32, device=device), model.rope)
        normed = textbook.rms_norm(array(x), norm, c.rms_eps)
        _judge(found, "rms_norm", ops.rms_norm(x, norm, c.rms_eps), normed, small)
        _judge(found, "silu_mul", ops.silu_mul(gates), textbook.silu_mul(array(gates)), small)
        _judge(found, "rope", turned, textbook.rope(array(heads), positions, model.rope), small)
        for name, got, expected, bound in _attention(subject):
            _judge(found, name, got, expected, bound)
    found.notes.append(f"backend {model.ops.name} on {subject.device}, against the textbook in float64")
    return found


def _judge(found: Found, where: str, got: Tensor, expected: Floats, bound: Floats | float) -> None:
    """Count values further from the textbook's than the tolerance `bound`; NaN counts as too far."""
    share = np.abs(array(got) - expected) / bound
    bad = int((~(share <= 1.0)).sum())
    found.sizes["values"] += share.size
    worst = float(np.nan_to_num(share, nan=np.inf).max()) if share.size else 0.0
    found.statistic["most_of_tolerance"] = max(found.statistic["most_of_tolerance"], round(worst, 4))
    right, seen = "each within its tolerance of the textbook", f"{bad} of {share.size}, {worst:.3g} times it"
    found.wrong("too_far", where, right, seen, bad)


def _product(found: Found, name: str, ops: Ops, w: QuantTensor, device: str) -> None:
    x, plain = randn(ROWS, w.shape[1], seed=w.shape[1], device=device), ops.unpack(w)
    size = textbook.through(np.abs(array(x)), plain, np.abs)  # [T, O]
    found.sizes["products"] += 1
    bound = ops.rounding(w) * (size + 1e-30)
    _judge(found, f"{name} linear", ops.product(plain_rows(x), w), textbook.product(array(x), plain), bound)


def _fused(found: Found, name: str, ops: Ops, w: QuantTensor, device: str) -> None:
    """Compare fused ops with their parts run one after the other: fused ops may add no rounding."""
    width = w.shape[1]
    x, gates = (randn(ROWS, n * width, seed=n, device=device) for n in (1, 2))
    norm = torch.linspace(0.5, 1.5, width).to(device)
    parts = {
        "norm_linear": (
            ops.product(normed_rows(x, norm, 1e-5), w),
            ops.product(plain_rows(ops.rms_norm(x, norm, 1e-5)), w),
        ),
        "silu_linear": (ops.product(gated_rows(gates), w), ops.product(plain_rows(ops.silu_mul(gates)), w)),
    }
    for op, (got, expected) in parts.items():
        count = differing(got, expected)
        right, seen = "the bits of its parts, one after the other", f"{count} values differ"
        found.wrong("differing_values_of_fused_ops", f"{name} {op}", right, seen, count)


def _attention(subject: Subject) -> Iterator[tuple[str, Tensor, Floats, float]]:
    model, name = subject.target, subject.kv_format
    c = model.config
    for length in LENGTHS:
        kv = randn(2, length, c.num_kv_heads, c.head_dim, seed=length, device=subject.device)
        q = randn(length, c.num_heads, c.head_dim, seed=length + 1, device=subject.device)
        cached = Stored(model, name, 16, kv, list(range(-(-length // 16)))[::-1])
        start = max(0, length - ROWS)
        got = cached.attend(q, start, length - start)
        k, v = textbook.stored(array(kv[0]), array(kv[1]), name)
        asked = textbook.queries(array(q[start:]), c.head_dim**-0.5, name)
        expected = textbook.attention(asked, k, v, 1.0, start, far=textbook.distant(k, v, name)).reshape(
            length - start, -1
        )
        bound = model.ops.kv_rounding(name) * float(kv[1].abs().max())
        yield f"attention over {length} keys, cache in {name}", got, expected, bound
