"""Toys: random models so small that the distribution of whole texts can be computed and mutants run in seconds."""

import torch

from sameseed import ops as backends
from sameseed.engine.build import Loaded
from sameseed.models.config import parse_config
from sameseed.models.llama import Llama
from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import read_weights
from sameseed.scheme import QuantScheme


class ToyCheckpoint(RandomCheckpoint):
    """Random weights mixed with a share of another random set; a larger LM head, so that texts have favourites."""

    def __init__(self, config, noise=0.0):
        super().__init__(config, 0, torch.float32)
        self._other = RandomCheckpoint(config, 1000, torch.float32)
        self._noise_share = noise

    def rows(self, name, start, stop):
        own, other = super().rows(name, start, stop), self._other.rows(name, start, stop)
        mixed = (own + self._noise_share * other) / (1 + self._noise_share**2) ** 0.5
        return mixed * 2.0 if name == "lm_head.weight" else mixed


def toy_model(ops, vocab_size, quant="auto", noise=0.0, device="cpu"):
    """A Llama of two narrow layers, stored in the format `quant`."""
    config = parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 0,
            "pard_token": vocab_size - 1,  # mask token of parallel drafts: any token will do
        }
    )
    weights = read_weights(config, ToyCheckpoint(config, noise), QuantScheme.parse(quant), ops, device)
    return Llama(config, weights, ops)


def toy_loaded(tokenizer, vocab_size, config, ops, noise):
    """A toy target, and a draft model that has a share `noise` of other weights."""
    ops = ops or backends.resolve(config.backend, config.device)
    target = toy_model(ops, vocab_size, config.format, device=config.device)
    draft = toy_model(ops, vocab_size, noise=noise, device=config.device)
    return Loaded(config, tokenizer, 0, target, (draft,))
