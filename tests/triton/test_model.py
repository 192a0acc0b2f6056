"""A whole model on the GPU kernels in Triton's interpreter: loading in chunks, drafting, one text."""

from __future__ import annotations

import pytest
import torch
from fixtures_models import all_logits, prompt, tiny_model

from sameseed.models import weights
from sameseed.ops.triton import guard

pytestmark = pytest.mark.skipif(not guard.interpreted(), reason="its models are made on the CPU")


@pytest.mark.parametrize("name", ["w4a8", "fp32"])
def test_logits_are_the_reference_s(name, monkeypatch):
    """Includes matrices whose width no group size divides, stacked matrices, and the LM head."""
    monkeypatch.setattr(weights, "CHUNK", 48 * 32)  # many chunks, each packed by itself
    text = prompt(5)
    got, wanted = (all_logits(tiny_model.__wrapped__(b, "llama3.2", name), text) for b in ("triton", "reference"))
    # Quantized rows: an error in the last bit may change a code in the next layer by one step.
    torch.testing.assert_close(got, wanted, rtol=0, atol=(0.05 if name == "w4a8" else 1e-4) * float(wanted.abs().max()))
