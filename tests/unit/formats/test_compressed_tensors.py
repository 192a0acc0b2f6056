"""compressed-tensors, the library with which vLLM reads checkpoints, reads ours (where it is installed)."""

import pytest
from fixtures_ops import randn

from sameseed import scheme
from sameseed.scheme import QuantScheme

WRITTEN = [
    "w4a16", "w4a16-channel", "w4a8-g32-asym", "w8a8", "w8a8-g64", "w8a16", "w8a16-g64", "fp8", "fp8-a8", "fp8-b128",
]  # fmt: skip
WRITTEN += ["fp8-a8-b128", "mxfp4", "mxfp4-mse"]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("shape", [(256, 512), (200, 384)], ids=str)
def test_what_we_write_is_decompressed_to_what_we_decode(name, shape):
    base = pytest.importorskip("compressed_tensors.compressors.base")  # takes seconds
    from compressed_tensors.quantization import QuantizationConfig

    q = QuantScheme.parse(name).encode(randn(*shape, seed=1))
    fmt = scheme.get(q.format)
    config = fmt.config(q)
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    reader = base.BaseCompressor.get_value_from_registry(config["format"])
    tensors = {key.removeprefix("x."): value for key, value in fmt.checkpoint("x", q).items()}
    assert set(reader.compression_param_names(group)) == set(tensors)
    if q.format != "mxfp4":  # float32 scales: products in float32; mxfp4 is exact in bfloat16
        tensors["weight_scale"] = tensors["weight_scale"].float()
    assert reader.decompress(tensors, group)["weight"].float().equal(fmt.decode(q))
