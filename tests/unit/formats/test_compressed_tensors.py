"""compressed-tensors, the library that vLLM reads checkpoints with, understands ours (where it is installed)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.formats import scheme
from foretoken.formats.scheme import QuantArgs, QuantScheme

pytest.importorskip("compressed_tensors")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_codes_are_read_as_the_same_values(symmetric):
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    int4 = scheme.get("int4")
    q = int4.encode(randn(16, 256), QuantArgs(64, symmetric))
    tensors = int4.checkpoint("x", q)
    codes = unpack_from_int32(tensors["x.weight_packed"], 4, torch.Size(q.shape)).float()
    zeros = torch.zeros(16, 4)
    if not symmetric:
        zeros = unpack_from_int32(tensors["x.weight_zero_point"], 4, torch.Size((16, 4)), packed_dim=0).float()
    values = (codes.view(16, 4, 64) - zeros[..., None]) * tensors["x.weight_scale"].float()[..., None]
    assert values.flatten(1).equal(int4.decode(q))


@pytest.mark.parametrize("name", ["w8a8", "w8a16", "w8a8-g64", "w4a16", "w4a8-g32-asym", "fp8"])
def test_configurations_are_valid(name):
    from compressed_tensors.quantization import QuantizationConfig

    chosen = QuantScheme.parse(name)
    q = chosen.encode(randn(8, 256))
    found = QuantizationConfig.model_validate(scheme.get(q.format).config(q))
    group = found.config_groups["group_0"]
    assert (group.input_activations is not None) == (chosen.activations is not None)
    assert group.weights.num_bits == (4 if q.format == "int4" else 8)
    assert group.weights.group_size == (None if q.group == 256 else q.group)
    assert group.weights.symmetric == chosen.symmetric
