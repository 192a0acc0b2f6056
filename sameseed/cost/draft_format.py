"""The number format of a draft model that is stored in few bits already: as stored, or in 4 bits where that pays.

A draft's format cannot change the output, so the choice is free. A pass takes as long as reading its weights, so here
bytes are the cost: a round reads the target once, and the draft model once for each draft token.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from sameseed.cost.curve import Curve
from sameseed.cost.round import ModelSteps, PlaceRates, RoundCost, best
from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig
from sameseed.models.draft_format import draft_scheme
from sameseed.models.head_config import is_head
from sameseed.models.loader import open_checkpoint, read_config
from sameseed.models.weights import TensorSource, matrix_bits, weight_bytes
from sameseed.scheme import QuantScheme

log = logging.getLogger("sameseed")
FEW = QuantScheme.parse("w4a8")
# Share of draft tokens that are right where all before them were, and the most that 4 bits took of it: Qwen2.5-Coder
# 1.5B with its 0.5B draft, docs/log/2026-q4.md, "The draft model's own format".
RIGHT, LOST = 0.9, 0.05
LENGTHS = range(1, 17)
EMBEDDING = "model.embed_tokens.weight"


def chosen_scheme(draft: Path, target: Path, quant: QuantScheme, device: str = "cpu") -> QuantScheme:
    """The scheme of a draft model or head for which none is named; `quant`: the target's. Reads headers only."""
    usual = draft_scheme(draft, target, quant, device)
    if usual.weights != "auto" or device != "cpu" or is_head(draft) or draft.resolve() == target.resolve():
        return usual
    with open_checkpoint(target) as of_target, open_checkpoint(draft) as source:
        config, whole = read_config(draft), read_config(target)
        of_target.check(whole)
        source.check(config)
        target_bytes = read_bytes(whole, of_target, quant)
        found = cheaper(config, source, target_bytes)
    how = f"loaded as {FEW}" if found == FEW else f"as stored, as {FEW} does not pay"
    log.info("draft weights: %s (--draft-format names others)", how)
    return found


def cheaper(config: ModelConfig, source: TensorSource, target_bytes: float) -> QuantScheme:
    """4 bits, or "auto" (as stored) where that promises more tokens a second; `target_bytes`: of a target's pass."""
    stored = QuantScheme()
    with suppress(ConfigError):  # rows that a group of 4-bit weights does not divide
        few, whole = (read_bytes(config, source, quant) for quant in (FEW, stored))
        return FEW if speed(few, target_bytes, RIGHT - LOST) > speed(whole, target_bytes, RIGHT) else stored
    return stored


def speed(draft_bytes: float, target_bytes: float, right: float, at_once: bool = False) -> float:
    """Tokens over plain decoding at the best length, by what passes read; `right`: the chance of a draft token."""
    cost = RoundCost(Curve([(1, target_bytes)]), (ModelSteps(Curve([(1, draft_bytes)]), at_once=at_once),))
    return best(cost, PlaceRates([right]), LENGTHS, 1, least=0.0)[1]


def read_bytes(config: ModelConfig, source: TensorSource, quant: QuantScheme) -> float:
    """Bytes of weights that a pass reads: all but those of an embedding that is not the LM head too."""
    size = float(weight_bytes(config, source, quant))
    if config.tied_embeddings:
        return size
    shape = config.vocab_size, config.hidden_size
    return size - shape[0] * shape[1] * matrix_bits(config, source, quant, EMBEDDING, shape) / 8
