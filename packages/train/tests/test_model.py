"""The trainer's model is the Llama that `transformers` reads, and its losses equal the plain formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sameseed_train.checkpoint import export_model
from sameseed_train.losses import fused_cross_entropy, fused_soft_cross_entropy
from sameseed_train.model import LlamaForTraining, ModelShape
from sameseed_train.optim import MuonAdamW, OptimSettings, orthogonalise

SHAPE = ModelShape(
    vocab_size=300,
    hidden_size=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_positions=128,
)


def loud_model() -> LlamaForTraining:
    """A model with weights so large that a wrong detail shows."""
    model = LlamaForTraining(SHAPE, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0 if p.ndim == 2 else 1.0).add_(
                0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
            )
            p.copy_(p.bfloat16().float())  # the values that export stores
    return model


def test_logits_equal_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = loud_model()
    export_model(model, tmp_path, 1, (2,), 0)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    ids = torch.randint(0, SHAPE.vocab_size, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, got = oracle(ids).logits, model(ids)
    assert expected.abs().max() > 1
    assert (expected - got).abs().max() < 1e-4


@pytest.mark.parametrize("num_rows", [5, 1500])  # within a chunk, and over a chunk's edge
def test_fused_losses_equal_the_plain_ones(num_rows: int) -> None:
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, 12, generator=g, dtype=torch.float64, requires_grad=True) for n in (num_rows, 30))
    targets = torch.randint(-1, 30, (num_rows,), generator=g)
    targets[0] = 3
    soft, shares = (torch.rand(*size, generator=g, dtype=torch.float64) for size in ((4, 30), (num_rows,)))
    places = torch.randint(0, 4, (num_rows,), generator=g)
    plain_soft = -(shares[:, None] * soft[places] * (h @ w.T).log_softmax(-1)).sum()
    pairs = [
        (fused_cross_entropy(h, w, targets), torch.nn.functional.cross_entropy(h @ w.T, targets, ignore_index=-1)),
        (fused_soft_cross_entropy(h, w, soft, shares, places), plain_soft),
    ]
    for fused, plain in pairs:
        assert torch.allclose(fused, plain)
        for a, b in zip(torch.autograd.grad(3 * fused, (h, w)), torch.autograd.grad(3 * plain, (h, w)), strict=True):
            assert torch.allclose(a, b)


@pytest.mark.parametrize("lower", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 12, 40), (2, 40, 12), (1, 16, 16)])
def test_orthogonalise_pushes_singular_values_to_one(shape: tuple[int, int, int], lower: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        found = orthogonalise(x, steps=6)
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert values.shape[1] == min(shape[1:])
    assert values.min() > 0.5 and values.max() < 1.3


def test_every_weight_is_trained_once() -> None:
    model = LlamaForTraining(SHAPE, seed=1)
    optimizer = MuonAdamW(model, OptimSettings())
    names = [n for n, _ in optimizer.matrices] + [n for n, _ in optimizer.others]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.loss(torch.randint(0, 300, (2, 16)), torch.randint(0, 300, (2, 16))).backward()  # type: ignore[no-untyped-call]
    optimizer.step(1.0)
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
