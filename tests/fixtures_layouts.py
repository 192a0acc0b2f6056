"""A tiny model in the layouts of other tools, written bit by bit from their documentation, and the values they mean."""

import json
from contextlib import contextmanager

import torch
from fixtures_models import BASE, random_tensors, write_config, write_tensors
from torch import Tensor
from torch.nn.functional import max_pool2d

from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import parse_config
from sameseed.models.loader import read_config

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 96}
RAW = {
    **BASE, **SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def is_linear(name):
    return name.endswith("_proj.weight")


def write_layout(folder, writer, config, which=is_linear, raw=RAW, stored_as=str):
    """Write a checkpoint where `writer` stores the matrices that `which` picks; returns the dense tensors it means.

    `stored_as`: from our name of a tensor to the file's.
    """
    dense = random_tensors(parse_config(raw), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(5)
    stored = {}
    for name, value in dense.items():
        if which(name):
            made, meant = writer(value.float(), name.removesuffix(".weight"), generator)
            stored |= made
            dense[name] = meant
        else:
            stored[name] = value
    write_config(folder, {**raw, **({} if config is None else {"quantization_config": config})})
    write_tensors(folder, {stored_as(name): value for name, value in stored.items()})
    return dense


def write_dense(folder, dense):
    """Write the same model in float32."""
    write_config(folder, RAW)
    write_tensors(folder, {n: t.float() for n, t in dense.items()})
    return folder


@contextmanager
def opened(folder):
    """The checkpoint of such a folder, checked."""
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(read_config(folder))
        yield checkpoint


def unquantized(weight, name, generator):
    """A matrix as it is."""
    return {f"{name}.weight": weight.bfloat16()}, weight


def packed(codes, bits):
    """Codes [N, W] as int32 [N, W bits / 32], the first in the lowest bits, by integer arithmetic."""
    per = 32 // bits
    words = (codes.reshape(codes.shape[0], -1, per).long() * torch.tensor([2 ** (bits * i) for i in range(per)])).sum(
        -1
    )
    return torch.where(words >= 2**31, words - 2**32, words).int()


def integers(weight, bits, group, symmetric, dtype=torch.float16):
    """Codes 0..2^bits - 1 [O, K], scales [O, n] and zero points [O, n] of groups along K."""
    x = weight.view(weight.shape[0], -1, group)
    top = 2**bits - 1
    if symmetric:
        scales = (x.abs().amax(-1) / (top / 2)).to(dtype)
        zeros = torch.full(scales.shape, 2.0 ** (bits - 1))
    else:
        low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, top)
    codes = (x / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.flatten(1).long(), scales, zeros.long()


def meaning(codes, scales, zeros, group):
    """(code - zero) * scale; each column has the zero point and the scale of its group."""
    index = torch.arange(codes.shape[1]) // group if isinstance(group, int) else group.long()
    zero = zeros[:, index].float() if isinstance(zeros, Tensor) else zeros
    return (codes.float() - zero) * scales[:, index].float()


def gptq(bits=4, group=128, symmetric=True, act_order=False, version=1):
    """qweight [K bits / 32, O], qzeros [n, O bits / 32] (minus 1 in version 1), scales [n, O], g_idx [K]."""

    def write(weight, name, generator):
        width = weight.shape[1]
        size = width if group == -1 else group
        order = torch.randperm(width, generator=generator) if act_order else torch.arange(width)
        codes, scales, zeros = integers(weight[:, order], bits, size, symmetric)
        back = torch.argsort(order)
        codes, index = codes[:, back], (torch.arange(width) // size)[back]
        stored = {
            f"{name}.qweight": packed(codes, bits).T,
            f"{name}.qzeros": packed(zeros.T - (1 if version == 1 else 0), bits), f"{name}.scales": scales.T,
            f"{name}.g_idx": index.int(), f"{name}.bias": torch.zeros(weight.shape[0], dtype=torch.float16),
        }  # fmt: skip
        # qweight is packed along K: the columns of [O, K] are packed, then the result is transposed.
        return stored, meaning(codes, scales, zeros, index)

    return write


def awq(group=128):
    """qweight [K, O / 8], qzeros [n, O / 8], scales [n, O]; a word holds outputs 0 2 4 6 1 3 5 7, lowest bits first."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(codes):
        return packed(codes.view(codes.shape[0], -1, 8)[..., order].flatten(1), 4)

    def write(weight, name, generator):
        size = weight.shape[1] if group == -1 else group
        codes, scales, zeros = integers(weight, 4, size, symmetric=False)
        stored = {
            f"{name}.qweight": interleaved(codes.T),
            f"{name}.qzeros": interleaved(zeros.T),
            f"{name}.scales": scales.T,
        }
        return stored, meaning(codes, scales, zeros, size)

    return write


def auto_round(writer):
    """GPTQ's or AWQ's tensors as AutoRound writes them: every second scale below 0, without g_idx."""

    def write(weight, name, generator):
        stored, meant = writer(weight, name, generator)
        signs = torch.tensor([1.0, -1.0]).repeat(weight.shape[0] // 2)
        scales = stored[f"{name}.scales"] * signs.half()
        codes = {n: stored[n] for n in (f"{name}.qweight", f"{name}.qzeros")}
        return codes | {f"{name}.scales": scales}, meant * signs[:, None]

    return write


def tiled(codes, rows, order):
    """Codes [O, K] as Marlin's B int32 [K / 16, 2 O], written one code after the other.

    Tensor cores read a 16 x 16 tile as two halves of 8 columns. Lane i of 32 holds column i / 4 of each half, in the
    rows `rows(i % 4)`. A lane stores its eight codes of a tile in one word, in `order` from the lowest bits. The lane's
    words for four adjacent tiles follow each other, then those of the next lane.
    """
    table, out = codes.T.tolist(), []
    for k in range(0, codes.shape[1], 16):
        line = []
        for n in range(0, codes.shape[0], 64):
            for lane in range(32):
                for tile in range(4):
                    column = n + 16 * tile + lane // 4
                    own = [table[k + r][column + half] for half in (0, 8) for r in rows(lane % 4)]
                    word = sum(own[e] << 4 * place for place, e in enumerate(order))
                    line.append(word - 2**32 if word >= 2**31 else word)
        out.append(line)
    return torch.tensor(out, dtype=torch.int32)


def shuffled(scales, grouped):
    """Scales [n, O] in Marlin's order: by columns of an 8 x 8 square if `grouped`, else in pairs for four lanes."""
    if grouped:
        place = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        place = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    return torch.cat([part[:, place] for part in scales.split(len(place), 1)], 1)


def marlin(group=128):
    """B, s [n, O] and workspace (locks), as AutoGPTQ packs them."""

    def write(weight, name, generator):
        width = weight.shape[1]
        size = width if group == -1 else group
        codes, scales, _ = integers(weight, 4, size, symmetric=True)
        stored = {
            f"{name}.B": tiled(codes, lambda t: [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9], [0, 2, 4, 6, 1, 3, 5, 7]),
            f"{name}.s": shuffled(scales.T, size != width),
            f"{name}.workspace": torch.zeros(weight.shape[0] // 128 * 16, dtype=torch.int32),
            f"{name}.bias": torch.zeros(weight.shape[0], dtype=torch.float16),
        }
        return stored, meaning(codes, scales, 8.0, size)

    return write


def qqq(group=128):
    """B, s_channel float32 [1, O], s_group float16 [n, O]; without groups, signed codes and s_channel = scale / 16."""

    def write(weight, name, generator):
        width = weight.shape[1]
        size = width if group == -1 else group
        codes, scales, _ = integers(weight, 4, size, symmetric=True)
        channel, parts = scales.float().amax(1, keepdim=True) / 8.0, torch.tensor([], dtype=torch.float16)
        if size == width:
            channel, order = scales.float() / 16.0, [4, 0, 5, 1, 6, 2, 7, 3]
            codes, meant = codes.clamp(1, 15), scales.float()
            words = (codes - 8) % 16
        else:
            parts, order, words = (scales.float() / channel).half(), [0, 2, 4, 6, 1, 3, 5, 7], codes
            meant = parts.float() * channel
            parts = shuffled(parts.T, True)
        stored = {
            f"{name}.B": tiled(words, lambda t: [4 * t + r for r in range(4)], order),
            f"{name}.s_channel": shuffled(channel.T, False),
            f"{name}.s_group": parts,
        }
        return stored, meaning(codes, meant, 8.0, size)

    return write


def ct_integers(bits, group, symmetric=True, layout="pack-quantized"):
    """compressed-tensors' pack-quantized and int-quantized layouts; group None: one scale per output channel."""

    def write(weight, name, generator):
        size = group or weight.shape[1]
        codes, scales, zeros = integers(weight, bits, size, symmetric, torch.bfloat16)
        stored = {f"{name}.weight_scale": scales}
        if layout == "pack-quantized":
            stored[f"{name}.weight_packed"] = packed(codes, bits)
            stored[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        else:
            stored[f"{name}.weight"] = (codes - 2 ** (bits - 1)).to(torch.int8)
        if not symmetric:
            packs = layout == "pack-quantized"
            point = packed(zeros.T, bits).T if packs else (zeros - 2 ** (bits - 1)).to(torch.int8)
            stored[f"{name}.weight_zero_point"] = point
        return stored, meaning(codes, scales, zeros, size)

    return write


def fp8(scales, suffix="weight_scale", dtype=torch.float8_e4m3fn):
    """e4m3 codes with scales per "tensor", per row ("rows") or per "block" of 128x128."""

    def write(weight, name, generator):
        height, width = weight.shape
        largest = torch.finfo(dtype).max
        if scales != "block":
            most = weight.abs().amax(1, keepdim=True) if scales == "rows" else weight.abs().amax().view(1)
            scale = most / largest
            wide = scale.expand(height, width)
        else:
            scale = max_pool2d(weight.abs()[None], 128, ceil_mode=True)[0] / largest
            wide = scale.repeat_interleave(128, 0)[:height].repeat_interleave(128, 1)[:, :width]
        codes = (weight / wide).clamp(-largest, largest).to(dtype)
        return {f"{name}.weight": codes, f"{name}.{suffix}": scale}, codes.float() * wide

    return write


def with_input_scale(writer):
    """The tensors of `writer`, and a static scale of activations that is not read."""

    def write(weight, name, generator):
        stored, meant = writer(weight, name, generator)
        return stored | {f"{name}.input_scale": torch.tensor(0.5)}, meant

    return write


# The sixteen values of nf4 as bitsandbytes stores them.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
       1.0]  # fmt: skip


def bnb_nf4(nested=False, block=64, storage=torch.uint8):
    """Two codes per byte, the first in the upper half; absmax per block. `storage`: the type that the bytes are put in.

    With `nested`, absmax is stored as 8-bit codes with a scale per 256 blocks and one offset; a linear map stands in
    for the code values of bitsandbytes.
    """

    def write(weight, name, generator):
        table = torch.tensor(NF4)
        blocks = weight.reshape(-1, block)
        absmax = blocks.abs().amax(1)
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
        stored = {f"{name}.weight.quant_map": table}
        if nested:
            offset = absmax.mean().item()
            map_ = torch.linspace(-1, 1, 256)
            large = torch.stack([b.abs().max() for b in (absmax - offset).split(256)])
            spread = large.repeat_interleave(256)[: len(absmax)]
            short = ((absmax - offset) / spread)[:, None].sub(map_[None, :]).abs().argmin(1).to(torch.uint8)
            absmax = map_[short.long()] * spread + offset
            stored |= {
                f"{name}.weight.absmax": short,
                f"{name}.weight.nested_absmax": large,
                f"{name}.weight.nested_quant_map": map_,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            stored[f"{name}.weight.absmax"] = absmax
        codes = (blocks / absmax[:, None])[..., None].sub(table).abs().argmin(-1).flatten()
        stored[f"{name}.weight"] = (codes[::2] * 16 + codes[1::2]).to(torch.uint8).view(storage)[:, None]
        text = json.dumps(state).encode()
        stored[f"{name}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return stored, (table[codes].view(-1, block) * absmax[:, None]).view(weight.shape)

    return write


def bnb_int8(weight, name, generator):
    """int8 codes and the absmax of each row (SCB)."""
    absmax = weight.abs().amax(1)
    codes = (weight / absmax[:, None] * 127).round().to(torch.int8)
    found = {f"{name}.weight": codes, f"{name}.SCB": absmax, f"{name}.weight_format": torch.zeros(1, dtype=torch.uint8)}
    return found, codes.float() * (absmax / 127.0)[:, None]


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1(x):
    """The nearest e2m1 codes, two per byte (the first in the low half), and their values in the shape of x."""
    near = x.abs()[..., None].sub(E2M1).abs().argmin(-1)
    codes = (near + 8 * (x < 0)).flatten(1)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), E2M1[near] * torch.where(x < 0, -1.0, 1.0)


def mxfp4(weight, name, generator):
    """e2m1 codes, two per byte, and e8m0 scales of blocks of 32."""
    x = weight.view(weight.shape[0], -1, 32)
    exponent = torch.floor(torch.log2(x.abs().amax(-1))) - 2
    codes, values = e2m1(x / torch.exp2(exponent)[..., None])
    stored = {f"{name}.weight_packed": codes, f"{name}.weight_scale": (exponent + 127).to(torch.uint8)}
    return stored, (values * torch.exp2(exponent)[..., None]).flatten(1)


def mlx(bits, group):
    """Codes in words of 32 bits, the lowest first, with a scale and a bias per group, for matrices of any name."""

    def write(weight, name, generator):
        x = weight.view(weight.shape[0], -1, group)
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        bias, scale = low.to(torch.bfloat16), ((high - low) / (2**bits - 1)).to(torch.bfloat16)
        codes = ((x - bias.float()) / scale.float()).round().clamp(0, 2**bits - 1)
        count = 32 // bits
        shifted = codes.long().view(weight.shape[0], -1, count) << torch.arange(0, 32, bits)
        words = shifted.sum(-1).to(torch.uint32)
        stored = {f"{name}.weight": words, f"{name}.scales": scale.squeeze(-1), f"{name}.biases": bias.squeeze(-1)}
        return stored, (codes * scale.float() + bias.float()).view_as(weight)

    return write


def modelopt_nvfp4(weight, name, generator):
    """Like `nvfp4` under other names; the scale of the whole matrix, a scalar, multiplies."""
    stored, _ = nvfp4(weight, name, generator)
    whole = 1 / stored[f"{name}.weight_global_scale"][0]
    codes, scales = stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"]
    nibble = torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()
    values = E2M1[nibble & 7] * torch.where(nibble > 7, -1.0, 1.0)
    meant = (values.view(*scales.shape, 16) * (scales.float() * whole)[..., None]).flatten(1)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales, f"{name}.weight_scale_2": whole}, meant


def nvfp4(weight, name, generator):
    """e2m1 codes, two per byte, and e4m3 scales of blocks of 16, over one float32 scale."""
    x = weight.view(weight.shape[0], -1, 16)
    largest = 448.0 * 6.0 / weight.abs().amax().view(1)
    scales = (x.abs().amax(-1) / 6.0 * largest).to(torch.float8_e4m3fn)
    wide = (scales.float() / largest)[..., None]
    codes, values = e2m1(x / wide)
    stored = {
        f"{name}.weight_packed": codes, f"{name}.weight_scale": scales, f"{name}.weight_global_scale": largest,
    }  # fmt: skip
    return stored, (values * wide).flatten(1)


def ct_config(bits, kind, strategy, layout, group=None, symmetric=True, **more):
    """A compressed-tensors quantization_config with one config group."""
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": False}
    if group is not None:
        weights["group_size"] = group
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    entry = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": layout}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": entry}, "ignore": ["lm_head"], "kv_cache_scheme": None, **more,
    }  # fmt: skip
