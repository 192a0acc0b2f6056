"""stories260K (a 260,000-parameter story writer in llama2.c's layout) as a Hugging Face folder, and its tokenizer.

Layout and check values: README.md beside the file. Its rotary embedding rotates neighbouring pairs (0, 1), (2, 3) of a
head. Hugging Face's rotates halves (0, D/2), (1, D/2 + 1), so the rows of wq and wk are reordered.
"""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor


def pairs_to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head's [D, C] block from (pair 0, pair 1, ...) to (all firsts, then all seconds)."""
    rows, width = weight.shape
    dim = rows // num_heads
    return weight.view(num_heads, dim // 2, 2, width).transpose(1, 2).reshape(rows, width)


def convert(source: Path, folder: Path) -> Path:
    """Write config.json and model.safetensors of `stories260K.bin`."""
    data = source.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", data[:28])
    values = torch.from_numpy(np.frombuffer(data, dtype="<f4", offset=28).copy())
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return values[at - size : at].view(shape)

    head_dim = dim // heads
    kv_dim = head_dim * kv_heads
    tensors = {"model.embed_tokens.weight": take(vocab, dim)}
    stacks = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": take(layers, dim, dim),
        "self_attn.k_proj": take(layers, kv_dim, dim),
        "self_attn.v_proj": take(layers, kv_dim, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    tensors["model.norm.weight"] = take(dim)
    assert at + 2 * context * head_dim // 2 == len(values), "the two rotary tables are all that is left"
    for name, stack in stacks.items():
        for i in range(layers):
            weight = stack[i]
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = pairs_to_halves(weight, heads if name == "self_attn.q_proj" else kv_heads)
            tensors[f"model.layers.{i}.{name}.weight"] = weight
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,  # a positive vocabulary size means tied embeddings
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


class StoryTokenizer:
    """Byte-pair merging by score, as in `tok512.bin`: of all neighbours that can merge, the best score is first."""

    def __init__(self, source: Path) -> None:
        data = source.read_bytes()
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        at = 4
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            self.pieces.append(data[at + 8 : at + 8 + length])
            self.scores.append(score)
            at += 8 + length
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for character in " " + text:
            raw = character.encode()
            tokens += [self.ids[raw]] if raw in self.ids else [byte + 3 for byte in raw]
        while True:
            joined = [self.ids.get(self.pieces[a] + self.pieces[b]) for a, b in itertools.pairwise(tokens)]
            places = [i for i, token in enumerate(joined) if token is not None]
            if not places:
                return [1, *tokens]
            best = max(places, key=lambda i: self.scores[joined[i]])  # type: ignore[index]
            tokens[best : best + 2] = [joined[best]]  # type: ignore[list-item]

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens; single bytes are stored as `<0x41>`."""
        raw = b"".join(bytes([t - 3]) if 3 <= t < 259 else self.pieces[t] for t in tokens if t > 2)
        return raw.decode(errors="replace").removeprefix(" ")
