"""Shared code of the quantizer tests: tiny sources in memory, hidden states, inputs with structure."""

import json

import torch
from fixtures_models import VARIANTS, Stored, random_tensors
from fixtures_ops import randn

from sameseed.models.config import parse_config
from sameseed.quantize import Stats, parse_method
from sameseed.quantize._walk import Walk
from sameseed.scheme import QuantScheme

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}  # groups of 32 divide all rows


def stats_of(x):
    return Stats.of([x], x.shape[-1])


def correlated(rows, width, seed=0):
    """Inputs [rows, width] whose channels differ in size and depend on each other, like real inputs."""
    mix = randn(width, width // 2, seed=seed)
    size = torch.exp(randn(width, seed=seed + 1))
    return (
        randn(rows, width // 2, seed=seed + 2) @ mix.T / width**0.5 + 0.3 * randn(rows, width, seed=seed + 3)
    ) * size


def source_of(name="llama3.2", **settings):
    """A random model of the family, in memory."""
    config = parse_config({**VARIANTS[name].raw, **settings})
    return config, Stored(random_tensors(config))


def tokens(config, rows=4, length=16, seed=5):
    return torch.randint(3, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def walk_of(config, source, method, scheme, ids, options=None):
    """A walk at the first layer, with the hidden states of `ids` [B, S]."""
    pipeline = parse_method(method, options or {}, seed=3)
    rows = pipeline.embedding(source.tensor("model.embed_tokens.weight").float())
    return Walk(config, source, pipeline, QuantScheme.parse(scheme), rows[ids])


def logits_of(walk, source, ids, blocks):
    """Logits [B, S, V] of blocks from a walk, with the embedding, last norm and head that its methods ask for."""
    tied = walk.config.tied_embeddings
    embedding = source.tensor("model.embed_tokens.weight").float()
    head = embedding if tied else source.tensor("lm_head.weight").float()
    norm = source.tensor("model.norm.weight").float() / walk.config.logit_divisor
    h = walk.pipeline.embedding(embedding)[ids] * walk.config.embedding_factor
    for block in blocks:
        h = walk.decoder.layer(block, h)
    return walk.decoder.norm(h, walk.pipeline.last_norm(norm)) @ walk.pipeline.head(head, norm).T


def write_text(path, documents=12):
    """Write a calibration file of made-up text."""
    words = "the sum of all parts is a whole loop ends when list empty def add".split()  # noqa: SIM905
    order = torch.randint(0, len(words), (documents, 60), generator=torch.Generator().manual_seed(7)).tolist()
    lines = [json.dumps({"text": " ".join(words[i] for i in row)}) for row in order]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
