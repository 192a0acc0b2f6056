"""compressed-tensors, the library with which vLLM reads checkpoints, reads ours (where it is installed)."""

from __future__ import annotations

import pytest
import torch
from fixtures_formats import read_weight, write_weight
from torch import Tensor

from sameseed import scheme
from sameseed.scheme import QuantScheme

pytest.importorskip("compressed_tensors")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


WRITTEN = [
    "w4a16",
    "w4a16-channel",
    "w4a8-g32-asym",
    "w8a8",
    "w8a8-g64",
    "w8a16",
    "w8a16-g64",
    "fp8",
    "fp8-a8",
    "fp8-b128",
]
WRITTEN += ["fp8-a8-b128", "mxfp4", "mxfp4-mse"]
every_written = pytest.mark.parametrize("name", WRITTEN)


@every_written
@pytest.mark.parametrize("shape", [(256, 512), (200, 384)], ids=str)
def test_what_we_write_is_decompressed_to_what_we_decode(name, shape):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    q = QuantScheme.parse(name).encode(randn(*shape))
    fmt = scheme.get(q.format)
    config = fmt.config(q)
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    reader = BaseCompressor.get_value_from_registry(config["format"])
    tensors = {key.removeprefix("x."): value for key, value in fmt.checkpoint("x", q).items()}
    assert set(reader.compression_param_names(group)) == set(tensors)
    if q.format != "mxfp4":  # float32 scales: products in float32; mxfp4 is exact in bfloat16
        tensors["weight_scale"] = tensors["weight_scale"].float()
    assert reader.decompress(tensors, group)["weight"].float().equal(fmt.decode(q))


@pytest.mark.parametrize("name", ["w4a16-g64", "w4a16-g64-asym", "w8a8", "w8a16-g64", "fp8-a8", "fp8-b128", "mxfp4"])
def test_what_it_writes_is_read_as_what_it_decodes(name, tmp_path):
    """Our decoded weights and scales, compressed by the library, are read back as the same values."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    q = QuantScheme.parse(name).encode(randn(256, 512))
    fmt = scheme.get(q.format)
    config = fmt.config(q)
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    codec = BaseCompressor.get_value_from_registry(config["format"])
    tensors = {key.removeprefix("x."): value for key, value in fmt.checkpoint("x", q).items()}
    scales = q.parts["scales"].float() if q.format == "mxfp4" else tensors["weight_scale"].float()
    given = {"weight": fmt.decode(q), "weight_scale": scales}
    if "zeros" in q.parts:
        given["weight_zero_point"] = q.parts["zeros"].to(torch.int8) - 8
    written = {f"x.{key}": value for key, value in codec.compress(given, group).items()}
    write_weight(tmp_path, written, config)
    assert fmt.decode(read_weight(tmp_path, q.shape)).equal(fmt.decode(q))


@every_written
def test_configurations_are_valid(name):
    from compressed_tensors.quantization import QuantizationConfig

    chosen = QuantScheme.parse(name)
    q = chosen.encode(randn(8, 384))
    found = QuantizationConfig.model_validate(scheme.get(q.format).config(q))
    group = found.config_groups["group_0"]
    assert (group.input_activations is not None) == (chosen.activations is not None)
    assert group.weights.num_bits == (4 if q.format in ("int4", "mxfp4") else 8)
    if chosen.variant == "b128":
        assert group.weights.strategy == "block" and group.weights.block_structure == [128, 128]
    else:
        assert group.weights.group_size == (None if q.group == 384 else q.group)
    assert group.weights.symmetric == chosen.symmetric
