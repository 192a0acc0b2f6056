"""int8: symmetric, with scale absmax / 127 of the row."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hn

from sameseed import scheme
from sameseed.scheme import QuantScheme

INT8 = scheme.get("int8")
rows = hn.arrays("float32", st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=st.floats(-1e4, 1e4, width=32))


@given(rows)
def test_error_is_at_most_half_a_step(values):
    weight = torch.from_numpy(values)
    q = INT8.encode(weight)
    codes, scales = q.parts["codes"], q.parts["scales"]
    assert codes.dtype == torch.int8 and codes.min() >= -127  # symmetric: -128 is never used
    assert scales.shape == (len(weight), 1) and ((scales > 0) | (weight.abs().amax(1, keepdim=True) < 2**-100)).all()
    half_step = scales.double() / 2
    assert ((INT8.decode(q).double() - weight.double()).abs() <= half_step * (1 + 1e-4) + 2**-100).all()


def test_checkpoint_layout_is_that_of_compressed_tensors():
    """int-quantized: codes as `weight`, scales as a column in `weight_scale`; the LM head stays dense."""
    q = QuantScheme.parse("w8a8").encode(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    tensors = INT8.checkpoint("model.layers.0.mlp.up_proj", q)
    assert set(tensors) == {"model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale"}
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert tensors["model.layers.0.mlp.up_proj.weight_scale"].shape == (6, 1)
    config = INT8.config(q)
    assert config["quant_method"] == "compressed-tensors" and config["ignore"] == ["lm_head"]
    assert config["format"] == "int-quantized"


def test_checkpoints_with_float_activations_are_packed():
    """pack-quantized: four codes per int32, the first in its lowest bits, each with 128 added."""
    q = INT8.encode(torch.randn(6, 10, generator=torch.Generator().manual_seed(0)))
    tensors = INT8.checkpoint("x", q)
    assert set(tensors) == {"x.weight_packed", "x.weight_scale", "x.weight_shape"}
    assert tensors["x.weight_packed"].shape == (6, 3) and tensors["x.weight_shape"].tolist() == [6, 10]
    first = tensors["x.weight_packed"][0, 0].item() & 0xFFFFFFFF
    assert list(first.to_bytes(4, "little")) == [c + 128 for c in q.parts["codes"][0, :4].tolist()]
    assert INT8.config(q)["format"] == "pack-quantized"
