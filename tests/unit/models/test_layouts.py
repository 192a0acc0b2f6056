"""Quantized checkpoints of other tools: decoded as documented, with their own codes if a kernel supports them."""

import json
import logging
import re

import pytest
import torch
from fixtures_layouts import (
    RAW,
    auto_round,
    awq,
    bnb_int8,
    bnb_nf4,
    ct_config,
    ct_integers,
    fp8,
    gptq,
    marlin,
    mlx,
    modelopt_nvfp4,
    mxfp4,
    nvfp4,
    opened,
    packed,
    qqq,
    unquantized,
    with_input_scale,
    write_dense,
    write_layout,
)
from fixtures_models import all_logits, backends, fails, load, prompt, read_tensors, write_config, write_tensors

from sameseed.errors import ModelLoadError
from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import parse_config
from sameseed.models.layouts import METHODS
from sameseed.models.layouts.patterns import covers, expression, fits
from sameseed.scheme import get

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
GPTQ_V2 = {"bits": 4, "group_size": 128, "sym": False, "format": "gptq_v2"}  # as GPTQModel and transformers write it
QQQ = {"quant_method": "qqq", "wbits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
AUTO |= {"packing_format": "auto_round:auto_gptq", "autoround_version": "0.9.0"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MLX = ((2, 32), (4, 64), (8, 64))  # bits, group size
MODELOPT = {"quant_method": "modelopt", "exclude_modules": ["lm_head"]}
UP = "model.layers.1.mlp.up_proj"  # rows of 128
DOWN = "model.layers.1.mlp.down_proj"  # rows of 256

# name -> writer, quantization_config, scheme of DOWN ("rounded": its values are rounded to w8a16-g32)
LAYOUTS = {
    "gptq": (gptq(), GPTQ, "w4a16-g128"),
    "gptq-asym": (gptq(symmetric=False), GPTQ | {"sym": False}, "w4a16-g128-asym"),
    "gptq-v2": (
        gptq(symmetric=False, version=2), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, "w4a16-g128-asym",
    ),
    "gptq-format": (gptq(symmetric=False, version=2), GPTQ_V2 | {"method": "gptq"}, "w4a16-g128-asym"),
    "gptq-channel": (gptq(group=-1), GPTQ | {"group_size": -1}, "w4a16-channel"),
    "gptq-8": (gptq(8), GPTQ | {"bits": 8}, "w8a16-g128"),
    "gptq-8-asym": (gptq(8, symmetric=False), GPTQ | {"bits": 8, "sym": False}, "rounded"),
    "gptq-act-order": (gptq(act_order=True), GPTQ | {"desc_act": True}, "w4a16-g128"),
    "gptq-act-order-asym": (
        gptq(group=64, symmetric=False, act_order=True), GPTQ | {"group_size": 64, "sym": False}, "w4a16-g64-asym",
    ),
    "gptq-g16": (gptq(group=16), GPTQ | {"group_size": 16}, "rounded"),
    "gptq-marlin": (marlin(), GPTQ | {"checkpoint_format": "marlin"}, "w4a16-g128"),
    "marlin-channel": (marlin(-1), {"quant_method": "marlin", "group_size": -1}, "w4a16-channel"),
    "qqq": (qqq(), QQQ, "w4a8-g128"),
    "qqq-channel": (qqq(-1), QQQ | {"group_size": -1}, "w4a8-channel"),
    "awq": (awq(), AWQ, "w4a16-g128-asym"),
    "auto-round": (auto_round(gptq()), AUTO, "w4a16-g128"),
    "auto-round-asym": (
        auto_round(gptq(symmetric=False, version=2)),
        AUTO | {"sym": False, "packing_format": "auto_round"}, "w4a16-g128-asym",
    ),
    "auto-round-awq": (auto_round(awq()), AUTO | {"packing_format": "auto_round:auto_awq"}, "w4a16-g128-asym"),
    "awq-channel": (awq(-1), AWQ | {"group_size": -1}, "w4a16-channel-asym"),
    "ct-w4a16": (ct_integers(4, 128), ct_config(4, "int", "group", "pack-quantized", 128), "w4a16-g128"),
    "ct-w4a16-asym": (
        ct_integers(4, 64, False), ct_config(4, "int", "group", "pack-quantized", 64, False), "w4a16-g64-asym",
    ),
    "ct-w4a16-channel": (ct_integers(4, None), ct_config(4, "int", "channel", "pack-quantized"), "w4a16-channel"),
    "ct-w8": (ct_integers(8, None, layout="int-quantized"), ct_config(8, "int", "channel", "int-quantized"), "w8a16"),
    "ct-w8-asym": (
        ct_integers(8, None, False, "int-quantized"),
        ct_config(8, "int", "channel", "int-quantized", None, False), "rounded",
    ),
    "ct-w4-int": (
        ct_integers(4, 128, layout="int-quantized"), ct_config(4, "int", "group", "int-quantized", 128), "w4a16-g128",
    ),
    "ct-w4-int-asym": (
        ct_integers(4, 64, False, "int-quantized"),
        ct_config(4, "int", "group", "int-quantized", 64, False), "w4a16-g64-asym",
    ),
    "ct-nvfp4": (nvfp4, ct_config(4, "float", "tensor_group", "nvfp4-pack-quantized", 16), "rounded"),
    "ct-fp8-rows": (fp8("rows"), ct_config(8, "float", "channel", "float-quantized"), "fp8_e4m3"),
    "ct-fp8-tensor": (fp8("tensor"), ct_config(8, "float", "tensor", "float-quantized"), "fp8_e4m3"),
    "ct-mxfp4": (mxfp4, ct_config(4, "float", "group", "mxfp4-pack-quantized", 32), "mxfp4"),
    "bnb-nf4": (bnb_nf4(), BNB, "nf4"),
    "bnb-nf4-nested": (bnb_nf4(nested=True), BNB | {"bnb_4bit_use_double_quant": True}, "nf4"),
    **{
        f"bnb-nf4-in-{dtype}": (bnb_nf4(storage=dtype), BNB | {"bnb_4bit_quant_storage": str(dtype)[6:]}, "nf4")
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8)
    },
    **{f"mlx-{b}-g{g}": (mlx(b, g), {"quant_method": "mlx", "bits": b, "group_size": g}, "rounded") for b, g in MLX},
    "modelopt-fp8": (fp8("tensor"), MODELOPT | {"quant_algo": "FP8"}, "fp8_e4m3"),
    "modelopt-nvfp4": (modelopt_nvfp4, MODELOPT | {"quant_algo": "NVFP4"}, "rounded"),
    "modelopt-w4a16": (modelopt_nvfp4, MODELOPT | {"quant_algo": "W4A16_NVFP4"}, "rounded"),
    "bnb-nf4-b128": (bnb_nf4(block=128), BNB, "nf4"),
    "bnb-int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "w8a16"),
    "fp8": (fp8("tensor"), FP8, "fp8_e4m3"),
    "fbgemm": (fp8("rows"), {"quant_method": "fbgemm_fp8"}, "fp8_e4m3"),
    "ct-fp8-block": (fp8("block"), ct_config(8, "float", "block", "float-quantized"), "fp8_e4m3-b128"),
    "fp8-block": (fp8("block", "weight_scale_inv"), FP8 | {"weight_block_size": [128, 128]}, "fp8_e4m3-b128"),
    "fp8-e5m2": (fp8("rows", dtype=torch.float8_e5m2), FP8, "fp8_e5m2"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_means_what_its_documentation_says(name, tmp_path, caplog):
    """Every decoded matrix equals the formulas bit for bit, as do the kept codes, and chunks of rows."""
    writer, config, stored_as = LAYOUTS[name]
    rounding = stored_as == "rounded"
    dense = write_layout(tmp_path, writer, config)
    with caplog.at_level(logging.WARNING), opened(tmp_path) as checkpoint:
        for key, meant in dense.items():
            assert checkpoint.tensor(key).float().equal(meant.float()), key
            if meant.ndim == 2:
                assert checkpoint.rows(key, 17, 64).float().equal(meant[17:64].float()), key
            if checkpoint.scheme(key) is not None:
                q = checkpoint.stored(key)
                off = (get(q.format).decode(q) - meant).norm() / meant.norm()
                assert (0 < off < 0.007) if rounding else off == 0, key
                scheme = checkpoint.scheme(key)
                like = scheme.encode(meant)  # kept codes must have the layout of that scheme
                assert {p: t.shape for p, t in q.parts.items()} == {p: t.shape for p, t in like.parts.items()}
                assert {p: t.dtype for p, t in q.parts.items() if p != "scales"} == {
                    p: t.dtype for p, t in like.parts.items() if p != "scales"
                }
                assert all(t.is_contiguous() for t in q.parts.values())
        scheme = checkpoint.scheme(f"{DOWN}.weight")
    assert str(scheme) == ("w8a16-g32" if rounding else stored_as)
    said = [r.getMessage() for r in caplog.records]
    told = [text for text in said if "as they come; here rows stay float32" not in text]
    wants_rows = config.get("activation_scheme") == "dynamic" or config.get("quant_method") == "fbgemm_fp8"
    assert len(said) - len(told) == wants_rows
    assert bool(told) == rounding and all(w in t for t in told for w in ("w8a16-g32", "GiB", "0.5 %", "--format fp32"))


@pytest.mark.parametrize("name", ["awq", "gptq-marlin", "ct-w8", "bnb-nf4", "fp8"])
def test_logits_of_a_layout_are_those_of_the_matrices_it_means(name, tmp_path):
    dense = write_layout(tmp_path / "stored", *LAYOUTS[name][:2])
    want = all_logits(load(write_dense(tmp_path / "dense", dense)), prompt(20))
    assert all_logits(load(tmp_path / "stored"), prompt(20)).equal(want)
    for backend in backends():
        got = all_logits(load(tmp_path / "stored", backend), prompt(20))
        assert (got - want).abs().max() < 2e-3, backend


@pytest.mark.parametrize("name", ["ct-nvfp4", "ct-w4-int", "ct-w4-int-asym"])
def test_the_compressed_tensors_package_decodes_the_same_values(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    writer, config, _ = LAYOUTS[name]
    write_layout(tmp_path, writer, config)
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    tensors = read_tensors(tmp_path)
    parts = {n.removeprefix(f"{UP}."): t for n, t in tensors.items() if n.startswith(f"{UP}.")}
    theirs = BaseCompressor.get_value_from_registry(config["format"]).decompress(parts, scheme)["weight"]
    with opened(tmp_path) as checkpoint:
        ours = checkpoint.tensor(f"{UP}.weight")
    assert (theirs.float() - ours).abs().max() <= 2**-7 * ours.abs().max()


@pytest.mark.parametrize("weights", ["auto", "auto-a8"])
@pytest.mark.parametrize("backend", backends())
def test_act_order_is_kept_in_codes(backend, weights, tmp_path):
    """q, k and v have different column orders, so they are three products; a row has the same bits alone."""
    dense = write_layout(tmp_path / "stored", *LAYOUTS["gptq-act-order-asym"][:2])
    model = load(tmp_path / "stored", backend, weights)
    assert {m.format for layer in model.weights.layers for m in layer.matrices} == {"int4"}
    assert len(model.weights.layers[0].qkv) == 3
    got = all_logits(model, prompt(20))
    want = all_logits(load(write_dense(tmp_path / "dense", dense)), prompt(20))
    assert (got - want).norm() < (1e-3 if weights == "auto" else 0.1) * want.norm()
    assert (got - all_logits(load(tmp_path / "stored", weights=weights), prompt(20))).abs().max() < 2e-3
    assert got[:1].equal(all_logits(model, prompt(20)[:1]))


def test_int8_activations_are_kept(tmp_path):
    config = ct_config(8, "int", "channel", "int-quantized")
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config["config_groups"]["group_0"]["input_activations"] = inputs
    write_layout(tmp_path, ct_integers(8, None, layout="int-quantized"), config)
    assert {m.activations for m in load(tmp_path).weights.layers[0].matrices} == {"int8"}


def test_codes_of_bitsandbytes_run_as_there(tmp_path):
    """LLM.int8(): the checkpoint's own codes and scales, with the outliers of rows multiplied separately."""
    write_layout(tmp_path, bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    own, asked = (load(tmp_path, weights=f).weights.layers[0].down for f in ("auto", "w8a8-outliers"))
    assert (own.format, own.activations, asked.format, asked.activations) == ("int8", None, "int8", "outliers")
    assert all(asked.parts[name].equal(part) for name, part in own.parts.items())


def test_static_scales_of_cache_and_activations_are_left_out(tmp_path, caplog):
    """One notice for each kind."""
    config = ct_config(8, "float", "tensor", "float-quantized")
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    config["config_groups"]["group_0"]["input_activations"] = inputs
    config["kv_cache_scheme"] = inputs
    write_layout(tmp_path, fp8("tensor"), config)
    tensors = read_tensors(tmp_path)
    for i in range(2):
        for kind in ("k_scale", "v_scale"):
            tensors[f"model.layers.{i}.self_attn.{kind}"] = torch.ones(1)
        tensors[f"model.layers.{i}.mlp.up_proj.input_scale"] = torch.ones(1)
    write_tensors(tmp_path, tensors)
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    rows, cache = sorted(r.getMessage() for r in caplog.records)
    assert "settings for activations are left out" in rows and "its scales" in cache and "--kv-format" in cache


@pytest.mark.parametrize("tensor", ("self_attn.kv_scale", "self_attn.k_proj.k_scale", "self_attn.attn.v_scale"))
def test_static_scales_of_the_cache_beside_dense_weights_are_left_out(tensor, tmp_path):
    """Also where no quantization_config stands: older tools wrote only these."""
    write_dense(tmp_path, write_layout(tmp_path, gptq(), GPTQ))
    plain = all_logits(load(tmp_path), prompt(5, 32))
    tensors = read_tensors(tmp_path) | {f"model.layers.0.{tensor}": torch.ones(1)}
    write_tensors(tmp_path, tensors)
    assert all_logits(load(tmp_path), prompt(5, 32)).equal(plain)


BESIDE = {
    "quantize_config.json": (gptq(), {k: v for k, v in GPTQ.items() if k != "quant_method"}),
    "quant_config.json": (awq(), {"bits": 4, "group_size": 128, "version": "GEMM", "zero_point": True}),
    "hf_quant_config.json": (
        fp8("tensor"),
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    ),
}


@pytest.mark.parametrize("file", BESIDE)
def test_settings_in_a_file_beside_config_json(file, tmp_path):
    writer, settings = BESIDE[file]
    dense = write_layout(tmp_path, writer, None)
    (tmp_path / file).write_text(json.dumps(settings))
    with opened(tmp_path) as checkpoint:
        assert all(checkpoint.tensor(name).float().equal(value.float()) for name, value in dense.items())


@pytest.mark.parametrize("key", ("quantization", "both"))
def test_settings_of_mlx(key, tmp_path):
    """MLX quantizes embedding and head, too, and writes its settings under one name or two, without a method."""
    dense = write_layout(
        tmp_path, mlx(4, 64), None, which=lambda name: name.endswith((".weight",)) and "norm" not in name
    )
    settings = {"group_size": 64, "bits": 4}
    both = {"quantization_config": settings} if key == "both" else {}
    write_config(tmp_path, {**RAW, "quantization": settings, **both})
    with opened(tmp_path) as checkpoint:
        assert all(checkpoint.tensor(name).float().equal(value.float()) for name, value in dense.items())


SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 96, "num_attention_heads": 4, "head_dim": 32}
GEMMA = SIZES | {"num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 8, "global_head_dim": 64}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0}
GEMMA = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": GEMMA}
EXPERTS = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 64}
EXPERTS = GEMMA | {"text_config": GEMMA["text_config"] | EXPERTS}
WRAPPED, MLX_WRAPPED = "model.language_model.", "language_model.model."
FINE = {
    f"{MLX_WRAPPED}layers.{i}.mlp.{part}_proj": {"bits": 8, "group_size": 32} for i in (0, 3) for part in ("up", "down")
}
BY_NAME = ct_config(4, "int", "group", "pack-quantized", 128)
BY_NAME["ignore"] = ["lm_head", f"{WRAPPED}layers.0.mlp.up_proj", r"re:.*layers\.3\.self_attn.*"]
EIGHT = ct_config(8, "int", "channel", "int-quantized")["config_groups"]["group_0"]
BY_NAME["config_groups"] |= {
    "group_1": EIGHT | {"targets": [f"{WRAPPED}layers.1.mlp.down_proj"]},
    "group_2": EIGHT | {"targets": [r"re:model\.language_model\.layers\.\d+\.self_attn\.q_proj$"]},
}
DYNAMIC = {r"+:model\.language_model\.layers\.\d+\.mlp\.down_proj$": {"bits": 8, "group_size": 64}, "-:.*v_proj": {}}


def by_name(usual, **others):
    """A writer that leaves the choice to the first of `others` whose expression is in the matrix's name."""
    return lambda weight, name, generator: next(
        (writer for text, writer in others.items() if re.search(text, name)), usual
    )(weight, name, generator)


# As published: config.json, quantization_config, writer, the beginning of names, and where experts are.
PUBLISHED = {
    "MLX's bits by module": (
        GEMMA | {"quantization": {"bits": 4, "group_size": 64, "mode": "affine", **FINE}}, None,
        by_name(mlx(4, 64), **{r"[03]\.mlp\.(up|down)": mlx(8, 32)}), MLX_WRAPPED, "",
    ),
    "targets by name": (
        GEMMA, BY_NAME,
        by_name(
            ct_integers(4, 128),
            **dict.fromkeys((r"0\.mlp\.up", r"3\.self_attn"), unquantized),
            **dict.fromkeys((r"1\.mlp\.down", "q_proj"), ct_integers(8, None, layout="int-quantized")),
        ),
        WRAPPED, "",
    ),
    "in text_config": (
        GEMMA | {"text_config": GEMMA["text_config"] | {"quantization_config": GPTQ}}, None, gptq(), WRAPPED, "",
    ),
    "GPTQ's dynamic": (
        GEMMA, GPTQ | {"dynamic": DYNAMIC}, by_name(gptq(), down_proj=gptq(8, 64), v_proj=unquantized), WRAPPED, "",
    ),
    "AutoRound": (
        GEMMA, AUTO | {"extra_config": {
            f"{WRAPPED}layers.1.mlp.down_proj": {"bits": 8, "group_size": 64},
            f"{WRAPPED}layers.1.mlp.up_proj": {"sym": False}, f"{WRAPPED}layers.0.self_attn.q_proj": {"bits": 16},
            r".*layers\.[12]\.mlp.*": {"group_size": 32},
        }},
        by_name(
            gptq(), **{
                r"1\.mlp\.down": gptq(8, 64), r"1\.mlp\.up": gptq(symmetric=False), r"[12]\.mlp": gptq(group=32),
                r"0\.self_attn\.q": unquantized,
            },
        ),
        WRAPPED, "",
    ),
    "NVFP4 beside FP8": (
        GEMMA, MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
            f"{WRAPPED}layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            f"{WRAPPED}layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        }},
        by_name(modelopt_nvfp4, self_attn=with_input_scale(fp8("tensor"))), WRAPPED, "",
    ),
    "experts": (EXPERTS, MODELOPT | {"quant_algo": "NVFP4"}, modelopt_nvfp4, WRAPPED, ".experts."),
    "experts in moe": (
        EXPERTS, ct_config(8, "float", "channel", "float-quantized"), fp8("rows"), WRAPPED, ".moe.experts.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_settings_of_published_folders(name, tmp_path):
    raw, config, writer, begin, experts = PUBLISHED[name]

    def stored_as(name):
        return name.replace("model.", begin, 1).replace(".mlp.experts.", experts or ".mlp.experts.")

    dense = write_layout(tmp_path, writer, config, raw=raw, stored_as=stored_as)
    with opened(tmp_path) as checkpoint:
        wrong = [key for key, meant in dense.items() if not checkpoint.tensor(key).float().equal(meant.float())]
    assert not wrong


@pytest.mark.parametrize("changes", [{"num_kv_shared_layers": 2}, {"attention_k_eq_v": True}])
def test_quantized_keys_and_values_that_no_layer_reads(changes, tmp_path):
    settings = {"quant_method": "mlx", "bits": 4, "group_size": 64}
    dense = write_layout(tmp_path, mlx(4, 64), settings, raw=GEMMA)
    text = GEMMA["text_config"] | changes
    write_config(tmp_path, {**GEMMA, "text_config": text, "quantization_config": settings})
    with opened(tmp_path) as checkpoint:
        assert checkpoint.tensor(f"{DOWN}.weight").equal(dense[f"{DOWN}.weight"])


@pytest.mark.parametrize("name", ("gptq", "ct-w4a16", "fp8", "awq"))
def test_a_quantized_checkpoint_without_settings_is_no_dense_one(name, tmp_path):
    write_layout(tmp_path, LAYOUTS[name][0], None)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelLoadError, match="quantization_config"):
        checkpoint.check(parse_config(RAW))


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 16), (8, 32)])
def test_gptq_adds_to_whole_words_what_its_writers_subtract(bits, group, tmp_path):
    """Writers subtract 1 from whole words, so a zero point of 0 borrows from its neighbour; reading restores both."""
    write_layout(tmp_path, gptq(bits, group, symmetric=False), GPTQ | {"bits": bits, "group_size": group, "sym": False})
    count = 128 // group
    zeros = torch.arange(256 * count).view(count, 256) % 2**bits  # [n, O]
    assert (zeros == 0).any() and (zeros == 2**bits - 1).any()
    words = packed(zeros, bits) - (0x11111111 if bits == 4 else 0x01010101)
    damaged(tmp_path, qzeros=words, scales=torch.ones(count, 256), qweight=torch.zeros(128 * bits // 32, 256).int())
    with opened(tmp_path) as checkpoint:
        assert checkpoint.tensor(f"{UP}.weight").equal(-zeros.T.repeat_interleave(group, 1).float())


PATHS = {
    "kept": (gptq(version=2), GPTQ),
    "8 bits": (gptq(8, version=2), GPTQ | {"bits": 8}),
    "act-order": (gptq(act_order=True, version=2), GPTQ | {"desc_act": True}),
    "g16": (gptq(group=16, version=2), GPTQ | {"group_size": 16}),
}


@pytest.mark.parametrize("name", PATHS)
def test_symmetric_gptq_whose_zero_points_are_of_the_second_version(name, tmp_path, caplog):
    """Some writers keep the first version's name; if all zero points are in the middle, the second is meant."""
    dense = write_layout(tmp_path, *PATHS[name])
    with caplog.at_level(logging.WARNING), opened(tmp_path) as checkpoint:
        for at in (UP, DOWN):
            assert checkpoint.tensor(f"{at}.weight").equal(dense[f"{at}.weight"])
    assert len([r for r in caplog.records if "gptq_v2" in r.getMessage()]) == 1


@pytest.mark.parametrize("name", PATHS)
def test_symmetric_gptq_with_other_zero_points_is_refused_on_every_path(name, tmp_path):
    write_layout(tmp_path, *PATHS[name])
    zeros = read_tensors(tmp_path)[f"{UP}.qzeros"]
    zeros[0, 0] += 1
    damaged(tmp_path, qzeros=zeros)
    told = f'{UP} symmetric.*"sym": false.*"checkpoint_format": "gptq_v2"'
    with opened(tmp_path) as checkpoint, pytest.raises(ModelLoadError, match=told):
        checkpoint.tensor(f"{UP}.weight")


def refused(folder, *words):
    fails(lambda: load(folder), *words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "aqlm"}, ["aqlm", *METHODS, "GGUF"]),
        ({"bits": 4}, ["None", "gptq"]),
        ("gptq", ["must be an object"]),
        (GPTQ | {"bits": 3}, ["bits", "4, 8"]),
        (GPTQ | {"bits": "4"}, ["bits", "whole number"]),
        (GPTQ | {"checkpoint_format": "marlin_24"}, ["marlin_24", "gptq_v2", "--format"]),
        (GPTQ | {"checkpoint_format": "marlin", "desc_act": True}, ["desc_act", "--format"]),
        (GPTQ | {"group_size": 0}, ["group_size 0"]),
        (GPTQ | {"dynamic": {"+:(a+)+b": {}}}, ["(a+)+b", "too involved"]),
        (AUTO | {"packing_format": "auto_round:llm_compressor"}, ["llm_compressor", "auto_gptq"]),
        (AUTO | {"data_type": "mx_fp"}, ["mx_fp", "--format"]),
        (AUTO | {"extra_config": {UP: 8}}, ["extra_config", "by name"]),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, ["MIXED_PRECISION", "FP8, NVFP4"]),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {UP: {"quant_algo": "W4A8_AWQ"}}},
         ["W4A8_AWQ", "FP8, NVFP4"]),
        (AWQ | {"bits": 0}, ["bits", "whole number"]),
        (GPTQ | {"checkpoint_format": "marlin", "bits": 0}, ["bits", "whole number"]),
        (AWQ | {"version": "gemv"}, ["gemv", "gemm"]),
        (AWQ | {"zero_point": False}, ["zero_point"]),
        (FP8 | {"weight_block_size": [0, 128]}, ["weight_block_size"]),
        ({"quant_method": "compressed-tensors"}, ["config_groups"]),
        (ct_config(4, "int", "group", "marlin-24", 128), ["marlin-24", "pack-quantized"]),
        (ct_config(4, "int", "group", "pack-quantized", 128, sparsity_config={"format": "24"}), ["sparsity"]),
        (ct_config(4, "int", "group", "pack-quantized", 128) | {"ignore": ["re:(.*)*x"]}, ["too involved"]),
        (ct_config(4, "int", "group", "pack-quantized", 128) | {"ignore": [3]}, ["list of names"]),
        (ct_config(4, "int", "group", "pack-quantized", 128)
         | {"transform_config": {"config_groups": {"R3": {"apply": [{"location": "input"}]}}}},
         ["transform_config", "--format"]),
        ({"quant_method": "sameseed", "version": 2, "modules": {}}, ["version 1"]),
        ({"quant_method": "sameseed", "version": 1, "modules": {UP: "w3a3"}}, [UP, "w3a3"]),
    ],
    ids=lambda v: str(v)[:60],
)  # fmt: skip
def test_settings_that_cannot_be_read(config, words, tmp_path):
    write_layout(tmp_path, gptq(), GPTQ)
    write_config(tmp_path, {**RAW, "quantization_config": config})
    refused(tmp_path, *words)


def damaged(folder, **changes):
    """Replaces or removes tensors of UP."""
    tensors = read_tensors(folder)
    for kind, value in changes.items():
        name = f"{UP}.{kind}"
        assert name in tensors
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    write_tensors(folder, tensors)


@pytest.mark.parametrize(
    ("name", "kind", "value", "words"),
    [
        ("gptq", "qzeros", None, ["qzeros", "missing"]),
        ("gptq", "qweight", torch.zeros(15, 256, dtype=torch.int32), ["qweight", "[15, 256]", "[16, 256]"]),
        ("gptq", "qzeros", torch.zeros(1, 32, dtype=torch.int32), ["not all 8", '"sym": false']),
        ("gptq", "scales", torch.full((1, 256), torch.nan, dtype=torch.float16), ["scales", "NaN"]),
        ("gptq", "g_idx", torch.full((128,), -1, dtype=torch.int32), ["g_idx", "outside"]),
        ("gptq", "bias", torch.ones(256, dtype=torch.float16), ["unexpected", "bias"]),
        ("ct-w4a16", "weight_packed", torch.zeros(256, 15, dtype=torch.int32), ["[256, 16]"]),
        ("ct-w4a16", "weight_shape", torch.tensor([256, 10**9]), ["1000000000", "[256, 128]", "damaged"]),
        ("ct-w4-int", "weight", torch.full((256, 128), 8, dtype=torch.int8), ["more than 4 bits"]),
        ("ct-nvfp4", "weight_scale", torch.ones(256, 4).to(torch.float8_e4m3fn), ["[256, 8]"]),
        ("ct-nvfp4", "weight_global_scale", torch.zeros(1), ["NaN or infinity"]),
        ("ct-mxfp4", "weight_scale", torch.full((256, 4), 255, dtype=torch.uint8), ["NaN"]),
        ("awq", "qzeros", torch.zeros(2, 32, dtype=torch.int32), ["[2, 32]"]),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8), ["no state"]),
        ("bnb-int8", "SCB", torch.ones(3), ["[3]"]),
        ("bnb-int8", "weight_format", torch.ones(1, dtype=torch.uint8), ["row layout"]),
    ],
)
def test_damaged_tensors(name, kind, value, words, tmp_path):
    write_layout(tmp_path, *LAYOUTS[name][:2])
    damaged(tmp_path, **{kind: value})
    refused(tmp_path, UP, *words)


def damaged_codes(folder, kind, code):
    """Sets the last byte of a tensor of UP to `code`."""
    tensor = read_tensors(folder)[f"{UP}.{kind}"]
    tensor.view(torch.uint8).view(-1)[-1] = code
    damaged(folder, **{kind: tensor})


def not_finite(folder):
    """Every way to read a matrix refuses it."""
    for read in (lambda c, n: c.rows(n, 0, 2), Checkpoint.tensor, Checkpoint.stored):
        with opened(folder) as checkpoint, pytest.raises(ModelLoadError, match=f"{UP}.* NaN"):
            read(checkpoint, f"{UP}.weight")


HUGE = torch.full((1, 256), 3e38)
# Layout, and tensors of UP or their last bytes, with which a value of the matrix is no number.
NOT_FINITE = [
    *(("ct-fp8-rows", {"weight": code}) for code in (0x7F, 0xFF)),
    *((name, {"weight": 0x7F}) for name in ("fp8-block", "ct-fp8-block", "other-blocks")),
    *(("fp8-e5m2", {"weight": code}) for code in (0x7C, 0x7D, 0x7F, 0xFC, 0xFF)),
    ("ct-mxfp4", {"weight_scale": 254, "weight_packed": 0x77}),  # 2^127 times 6
    ("ct-mxfp4", {"weight_scale": 255, "weight_packed": 0x77}),
    ("ct-fp8-rows", {"weight_scale": torch.full((256, 1), 1e38)}),
    ("gptq", {"scales": HUGE}),
    ("bnb-nf4-nested", {"weight.nested_absmax": HUGE[0, :2], "weight.nested_quant_map": torch.ones(256) * 2}),
]


@pytest.mark.parametrize(("name", "changes"), NOT_FINITE)
def test_values_that_are_no_numbers(name, changes, tmp_path):
    write_layout(tmp_path, *LAYOUTS["fp8-block" if name == "other-blocks" else name][:2])
    if name == "other-blocks":  # a layout that is decoded
        write_config(tmp_path, {**RAW, "quantization_config": FP8 | {"weight_block_size": [256, 128]}})
        tensors = read_tensors(tmp_path)
        tensors |= {n: t[:1] for n, t in tensors.items() if n.endswith("_inv")}
        write_tensors(tmp_path, tensors)
    for kind, value in changes.items():
        if isinstance(value, int):
            damaged_codes(tmp_path, kind, value)
        else:
            damaged(tmp_path, **{kind: value})
    not_finite(tmp_path)


@pytest.mark.parametrize("code", [0x7E, 0xFE])
def test_the_largest_code_is_a_number(code, tmp_path):
    write_layout(tmp_path, *LAYOUTS["ct-fp8-rows"][:2])
    damaged_codes(tmp_path, "weight", code)
    with opened(tmp_path) as checkpoint:
        assert checkpoint.tensor(f"{UP}.weight").isfinite().all()


def test_scales_that_are_powers_of_two_and_no_numbers(tmp_path):
    write_layout(tmp_path, *LAYOUTS["fp8-block"][:2])
    ones = torch.full((2, 1), 127, dtype=torch.uint8)
    damaged(tmp_path, weight_scale_inv=ones.view(torch.float8_e8m0fnu))
    with opened(tmp_path) as checkpoint:
        assert checkpoint.tensor(f"{UP}.weight").isfinite().all()
    damaged_codes(tmp_path, "weight_scale_inv", 255)
    not_finite(tmp_path)


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("offset", ["1" + "0" * 400, "1e999", "NaN", "-Infinity", '"1"', "null", "1" * 5000])
def test_offsets_of_nf4_that_are_no_numbers(offset, tmp_path):
    write_layout(tmp_path, bnb_nf4(nested=True), BNB)
    state = json.loads(bytes(read_tensors(tmp_path)[f"{UP}.{STATE}"].tolist()))
    text = json.dumps({k: v for k, v in state.items() if k != "nested_offset"})
    text = f'{text[:-1]}, "nested_offset": {offset}}}'
    damaged(tmp_path, **{STATE: torch.tensor(list(text.encode()), dtype=torch.uint8)})
    with pytest.raises(ModelLoadError) as caught, Checkpoint(tmp_path) as checkpoint:
        checkpoint.check(parse_config(RAW))
    assert f"{UP}.{STATE}" in str(caught.value) and len(str(caught.value)) < 400


NAME = "model.layers.10.self_attn.q_proj"

SLOW = [
    r"((.+)x?)+!", r"((\w+)\.?)+!", r"(a+)+$", r"(a|aa)*b", r"(x{1,50}){1,50}y", r"(?:(?:a|aa){9}){9}b", r"(a?b?){20}c",
    r"(?P<x>(?:[a-z]+)\.?)*!", r"(?=((\w+)\.?)+!)x", r"(?!(.|..)+!)x", r"((.*?)x)*?!", r"(.|..){30}!", r".?" * 60 + "!",
    r"(.|..)" * 40 + "!", r".*.*.*.*.*.*.*x", r"(.*)\1", r"(a)?(?(1)b|c)", r"a{1000}", r"a{,1000}",
    "(" * 30 + ")" + "{9})" * 29 + "x",
]  # fmt: skip


@pytest.mark.parametrize("text", SLOW, ids=lambda t: t[:40])
def test_expressions_that_could_take_for_ever_are_refused(text):
    with pytest.raises(ModelLoadError, match="too involved"):
        expression(text)


@pytest.mark.parametrize("text", ["[a", "(" * 200, "a**", "(?P<1>a)"], ids=lambda t: t[:40])
def test_what_is_no_expression(text):
    with pytest.raises(ModelLoadError, match="no regular expression"):
        expression(text)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (r".*self_attn\.(q|k|v)_proj", "model.layers.10.self_attn.o_proj"),
        (r"model\.layers\.\d+\.self_attn.*", "model.layers.10.mlp.up_proj"),
        (r".*\.(gate|up|q)_proj$", "model.layers.10.mlp.down_proj"),
        (r"^model\.layers\.(?:[0-9]|1[0-5])\..*", "model.layers.16.mlp.up_proj"),
        (r".*\.layers\.\d+\..*attn\.(q|k|v)(_proj)?", "model.layers.1.mlp.up_proj"),
        (r"^((?!mlp).)*$", "model.layers.1.mlp.up_proj"),
        (r"^(?!.*mlp).*", "model.layers.1.mlp.up_proj"),
        (r"(?:\w\w{3}l.)?model.*q_proj|(?:[a-z]{2}_)+head", "model.layers.10.self_attn.k_proj"),
        (r"model\.layers\.(0|1|2|3|4|5|6|7|8|9|10)\.(self_attn|mlp)\.[qkvo]_proj", "model.layers.11.mlp.up_proj"),
        (r".*layers\.\d+\..*attn.*\.?(q|k)_proj.*", "model.layers.0.mlp.experts.7.down_proj"),
    ],
)
def test_expressions_of_real_checkpoints_are_matched(text, other):
    assert fits(f"re:{text}", NAME) and covers(f"re:{text}", NAME)
    assert not fits(f"re:{text}", other)
