"""What a checkpoint predicts, in float32 on its decoded values: to compare methods, apart from any kernel."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import read_config
from sameseed.quantize._decoder import DecoderLayers, Linear, advance, read_block
from sameseed.scheme import QuantScheme


@torch.inference_mode()
def token_losses(folder: Path, ids: Tensor) -> Tensor:
    """Negative log-likelihoods in nats of every token of ids [B, S] but each row's first, float64 [B (S - 1)].

    Rows of x are rounded as `quantization.json` says that the weights were stored.
    """
    config = read_config(folder)
    decoder = DecoderLayers(config, ids.shape[1])
    about = folder / "quantization.json"
    modules = json.loads(about.read_text(encoding="utf-8"))["modules"] if about.exists() else []
    schemes = {m["module"]: QuantScheme.parse(m["scheme"]) for m in modules}
    with Checkpoint(folder) as source:
        source.check(config)

        def matrix(name: str, linear: Linear) -> Linear:
            if source.scheme(f"{name}.weight") is not None:
                linear.store(replace(source.stored(f"{name}.weight"), activations=schemes[name].activations))
            return linear

        h = source.tensor("model.embed_tokens.weight").float()[ids]
        for index in range(config.num_layers):
            block = read_block(config, source, index)
            for name, linear in block.linears.items():
                matrix(block.prefix + name, linear)
            advance(h, partial(decoder.layer, block))
        head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        last = matrix(head, Linear(source.tensor(f"{head}.weight").float()))
        norm = source.tensor("model.norm.weight").float()
        losses = [
            F.cross_entropy(decoder.logits(row, norm, last)[:-1], target[1:], reduction="none")
            for row, target in zip(h, ids)
        ]
    return torch.cat(losses).double()
