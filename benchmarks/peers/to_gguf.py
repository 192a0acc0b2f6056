"""Converts a bfloat16 Hugging Face folder to GGUF, or quantizes a GGUF file. Runs in llama.cpp's environment.

python to_gguf.py SOURCE bf16|q4_0|q4_k_m|q8_0 OUT

A byte-level BPE tokenizer is included if the folder has one. It splits texts as GPT-2's does, because llama.cpp knows
split expressions only by name. Texts with indented lines may get other tokens than with the folder's own tokenizer.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in OUTSIDE:
        return OUTSIDE[stem] + ".weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def read(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of the folder, memory-mapped: float32, or the bits of bfloat16 (which numpy lacks) as uint16."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        for name, about in header.items():
            if name != "__metadata__":
                start = 8 + length + about["data_offsets"][0]
                kind = {"BF16": np.uint16, "F32": np.float32}[about["dtype"]]
                found[name] = np.memmap(file, kind, "r", start, tuple(about["shape"]))
    return found


def for_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [H*D, C] in GGUF's order: the two rows of each rotary pair are adjacent."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def convert(folder: Path, out: Path) -> None:
    """Write the folder as one bfloat16 GGUF file, with its tokenizer if it has one."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    file = folder / "tokenizer.json"
    if file.exists() and json.loads(file.read_text())["model"].get("merges") != []:  # random weights: no merges
        add_tokenizer(writer, folder, config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    for name, bits in read(folder).items():
        if bits.ndim == 1:
            whole = bits if bits.dtype == np.float32 else (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(whole))
            continue
        for kind, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if kind in name:
                bits = for_rope(np.asarray(bits), config[heads])
        raw = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    """Add tokens, merges, special tokens and the chat template. Unused ids up to `size` get placeholder names.

    Raises ValueError if the tokenizer is no byte-level BPE.
    """
    told, about = (json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    if told["model"]["type"] != "BPE" or told["decoder"]["type"] != "ByteLevel":
        raise ValueError(f"{folder} has no byte-level BPE tokenizer; give another folder")
    special = {token["content"] for token in told["added_tokens"] if token["special"]}
    ids = {**told["model"]["vocab"], **{token["content"]: token["id"] for token in told["added_tokens"]}}
    words = sorted(ids, key=ids.__getitem__)
    free = [f"[UNUSED{i}]" for i in range(len(words), size)]
    types = [gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in words]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*words, *free])
    writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * len(free)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in told["model"]["merges"]])
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        add(ids[about[f"{name}_token"]])
    writer.add_add_bos_token(bool(about.get("add_bos_token")))
    if template := about.get("chat_template"):
        writer.add_chat_template(template)


def quantize(source: Path, kind: str, out: Path) -> None:
    """Quantize as llama-quantize does with its defaults, through the C API. Raises RuntimeError."""
    import llama_cpp as api  # type: ignore[import-not-found]

    api.llama_backend_init()
    params = api.llama_model_quantize_default_params()
    params.nthread = 2
    params.ftype = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15}[kind]  # enum llama_ftype
    status = api.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params))
    if status:
        raise RuntimeError(f"llama.cpp could not quantize to {kind} (status {status})")


if __name__ == "__main__":
    source, kind, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if kind == "bf16":
        convert(source, out)
    else:
        quantize(source, kind, out)
