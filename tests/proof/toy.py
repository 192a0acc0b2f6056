"""Toys: random models so small that the distribution of whole texts can be computed and mutants run in seconds."""

from dataclasses import replace

import torch

from sameseed import ops as backends, registry
from sameseed.config import CacheConfig
from sameseed.engine.build import SELF_FORMAT, Loaded
from sameseed.errors import SameseedError
from sameseed.models.config import parse_config
from sameseed.models.llama import Llama
from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import read_weights
from sameseed.scheme import QuantScheme

DRAFT_NOISE = 0.5  # share of other weights in the toy draft, so that it is right often, not always


class ToyCheckpoint(RandomCheckpoint):
    """Random weights mixed with a share of another random set; the LM head is scaled up, so that texts have favourites.

    `twins`: tokens 2 i and 2 i + 1 have equal logits everywhere.
    """

    def __init__(self, config, noise=0.0, twins=False):
        super().__init__(config, 0, torch.float32)
        self._twins = twins
        self._other = RandomCheckpoint(config, 1000, torch.float32)
        self._noise_share = noise

    def rows(self, name, start, stop):
        if self._twins and name == "lm_head.weight":
            return torch.cat([self._mixed(name, i // 2 * 2, i // 2 * 2 + 1) for i in range(start, stop)])
        return self._mixed(name, start, stop)

    def _mixed(self, name, start, stop):
        own, other = super().rows(name, start, stop), self._other.rows(name, start, stop)
        mixed = (own + self._noise_share * other) / (1 + self._noise_share**2) ** 0.5
        return mixed * 2.0 if name == "lm_head.weight" else mixed


def toy_model(ops, vocab_size, quant="auto", noise=0.0, notes=None, device="cpu", twins=False):
    """A Llama of two narrow layers, stored in the format `quant`.

    Where the format allows no model so small, the model is in fp32, and `notes` say so.
    """
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
    source = ToyCheckpoint(config, noise, twins)
    try:
        weights = read_weights(config, source, QuantScheme.parse(quant), ops, device)
    except SameseedError:
        if notes is not None:
            notes.append(f"no toy can be stored as {quant}: one model here is in fp32 instead")
        weights = read_weights(config, source, QuantScheme(), ops, device)
    return Llama(config, weights, ops)


def toy_loaded(tokenizer, vocab_size, config, ops=None, noise=DRAFT_NOISE, notes=None, twins=False):
    """Toy models for the same speculation as in `config`: a target, and the models that the draft levels need.

    `noise`: share of other weights in a draft model; `twins`: the target's tokens have equal logits in pairs. `notes`
    name each format that could not be used.
    """
    ops = ops or backends.resolve(config.backend, config.device)

    def drafts(spec):
        owns = "" if spec.method == "none" else registry.load("drafters", spec.method).DRAFTER.owns
        own = []
        if owns == "target":
            quant = SELF_FORMAT if spec.format == "auto" else spec.format
            own = [toy_model(ops, vocab_size, quant, 0.0, notes, config.device)]
        elif owns:
            own = [toy_model(ops, vocab_size, spec.format, noise, notes, config.device)]
        return own + [m for level in spec.below for m in drafts(level)]

    spec, cache = toy_spec(config.spec), CacheConfig(config.cache.block_size, None, config.cache.format)
    target = toy_model(ops, vocab_size, config.format, 0.0, notes, config.device, twins)
    toy = replace(config, spec=spec, cache=cache, max_model_len=None)
    return Loaded(toy, tokenizer, 0, target, tuple(drafts(spec)))


def toy_spec(spec):
    """The same levels without options (which may name files), and with fixed lengths: policies would measure time."""
    short = {"min_ngram": 1} if spec.method == "ngram" else {}
    return replace(spec, options=short, policy="fixed", below=tuple(toy_spec(b) for b in spec.below))


def needs_head(spec):
    """Does a level draft with a head? There is no toy head."""
    own = spec.method != "none" and registry.load("drafters", spec.method).DRAFTER.owns == "head"
    return own or any(needs_head(b) for b in spec.below)
