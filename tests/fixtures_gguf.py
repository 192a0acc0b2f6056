"""GGUF files of tiny models, written by the gguf package, or byte by byte where a test needs an invalid file."""

import json
import struct
from functools import partial

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer as HFTokenizer, decoders, models, pre_tokenizers, trainers

from sameseed.models.config import family
from sameseed.models.gguf.kquants import TYPES
from sameseed.models.gguf.source import PAIRS_BESIDE, gguf_name
from sameseed.scheme import get


def for_rope(weight, heads):
    """Rows of q or k [H D, ...] in a converter's order: the two rows that RoPE rotates together lie side by side."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def kquant_bytes(weight, kind):
    """Bytes [O, K / 256 * bytes] of a weight in Q4_K, Q5_K or Q6_K, encoded by our format: the gguf package cannot."""
    q = get(kind.lower()).encode(weight)
    n = q.shape[0] * q.shape[1] // 256
    half = {p: q.parts[p].half().reshape(n, 1).numpy().view(np.uint8) for p in get(q.format).scale_parts}
    part = {p: t.reshape(n, -1).numpy() for p, t in q.parts.items() if p not in half}
    codes = part["codes"]
    if kind == "Q6_K":
        by = codes.reshape(n, 2, 4, 32)  # halves, quarters
        low = by[:, :, :2] & 15 | (by[:, :, 2:] & 15) << 4
        high = sum((by[:, :, i] >> 4) << 2 * i for i in range(4))
        blocks = [low.reshape(n, 128), high.reshape(n, 64), part["steps"].view(np.uint8), half["scales"]]
    else:
        steps, minima = part["steps"].view(np.uint8), part["minima"].view(np.uint8)
        first, second = steps[:, :4] | steps[:, 4:] >> 4 << 6, minima[:, :4] | minima[:, 4:] >> 4 << 6
        by = codes.reshape(n, 4, 2, 32)
        fifth = [sum((codes.reshape(n, 8, 32)[:, i] >> 4) << i for i in range(8))] if kind == "Q5_K" else []
        low = (by[:, :, 0] & 15 | (by[:, :, 1] & 15) << 4).reshape(n, 128)
        third = steps[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
        blocks = [half["scales"], half["least"], first, second, third, *fifth, low]
    return np.concatenate(blocks, axis=1).reshape(q.shape[0], -1)


def as_type(weight, kind):
    """The bytes of a weight in a type that the gguf package or `kquant_bytes` can write."""
    if kind in TYPES:
        return kquant_bytes(weight, kind)
    if kind == "BF16":
        return weight.bfloat16().view(torch.uint8).numpy()
    return gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])


def write_gguf(path, raw, tensors, kinds=lambda name: "F32", arch="llama", keys=None, blobs=None, tokenizer=None):
    """Write a model with config.json `raw` as a GGUF file.

    `kinds`: types of matrices; `keys`: more keys of the architecture, or None for one that is left out; `blobs`: bytes
    of some matrices, with their type.
    """
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    dim = raw.get("head_dim", raw["hidden_size"] // heads)
    rope = raw["rope_parameters"]
    usual = {
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "block_count": raw["num_hidden_layers"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), dim),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
    }
    for key, value in {**usual, **(keys or {})}.items():
        if value is not None:
            writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        writer.add_eos_token_id(raw["eos_token_id"])
    else:
        tokenizer(writer)
    names = {**family(raw["architectures"][0]).gguf_names, "mlp.experts.gate_up_proj": "ffn_gate_up_exps"}
    for name, value in tensors.items():
        stored = gguf_name(name, names) if name != "rope_freqs.weight" else name
        if arch == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name and arch in PAIRS_BESIDE:
                value = for_rope(value, count)
        if blobs and stored in blobs:
            data, kind = blobs[stored]
            writer.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        elif value.ndim == 1 or kinds(stored) == "F32":
            writer.add_tensor(stored, value.float().contiguous().numpy())
        else:
            kind = kinds(stored)
            writer.add_tensor(stored, as_type(value.contiguous(), kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def info(name, dims, kind, offset):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(keys, infos, data=b"", version=3, counts=None):
    num_tensors, num_keys = counts or (len(infos), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


TEXTS = [
    "Hello, world! It's 2024, they'LL pay $1234.56 for 3 apples.",
    "  two spaces,\ttabs\n\nand   lines  \n",
    "Zürich, naïve café — “quotes” … 東京タワー 🎉👩‍👩‍👧 नमस्ते",
    "def f(x):\n    return x**2  # comment\n",
    "don't can't WON'T we'Re",
    "",
    " ",
    "a",
]
CORPUS = [*TEXTS, *(f"the quick brown fox {i} jumps over the lazy dog's back, and {i * 7} more" for i in range(60))]


def trained(pattern, size=600):
    """A byte-level BPE trained on CORPUS; `pattern`: the expression by which a well-known model splits words."""
    tokenizer = HFTokenizer(models.BPE())
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated")] if isinstance(pattern, str) else pattern
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def bpe_keys(source, pre, special, **more):
    """A function that writes a byte-level BPE as a converter does; `special`: added tokens, with their types."""
    model = json.loads(source.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]

    def keys(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, *special])
        writer.add_token_types([1] * len(tokens) + list(special.values()))
        writer.add_token_merges(merges)
        for name, value in more.items():
            plain = writer.add_array if isinstance(value, list) else writer.add_uint32
            add = getattr(writer, f"add_{name}", partial(plain, f"tokenizer.ggml.{name}"))
            add(value)

    return keys


# As in the models' own tokenizer.json files.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
