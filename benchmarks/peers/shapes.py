"""Shapes of the random checkpoints, as their public configurations give them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama model's sizes: C, layers, feed-forward width, heads, KV heads, head dim, V, tied head."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each tensor, as a Hugging Face checkpoint has them; vectors are norm weights."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            yield layer + "self_attn.q_proj.weight", (q, self.hidden)
            yield layer + "self_attn.k_proj.weight", (kv, self.hidden)
            yield layer + "self_attn.v_proj.weight", (kv, self.hidden)
            yield layer + "self_attn.o_proj.weight", (self.hidden, q)
            yield layer + "mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield layer + "mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield layer + "mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield layer + "input_layernorm.weight", (self.hidden,)
            yield layer + "post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def config(self) -> dict[str, object]:
        """The config.json of such a model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "max_position_embeddings": 8192,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "mlp_bias": False,
        }


SHAPES = {
    "llama-3.2-1b": Shape(2048, 16, 8192, 32, 8, 64, 128256, True),
    "llama-3.1-8b": Shape(4096, 32, 14336, 32, 8, 128, 128256, False),
    "tiny": Shape(256, 2, 512, 4, 2, 64, 2048, True),  # to try the machinery; its times mean nothing
}
