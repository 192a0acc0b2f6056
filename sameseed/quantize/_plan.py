"""QuantizePlan: the settings of a quantization run, and the check for settings that exclude each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sameseed import devices
from sameseed.errors import ConfigError
from sameseed.quantize import Pipeline, _budget as bits, is_dense
from sameseed.scheme import QuantScheme


@dataclass(frozen=True)
class QuantizePlan:
    """The settings of a run: the model, the scheme and the method to store it with, and where the result goes.

    `budget`: average bits per weight over the linear layers of the decoder. With a budget, `candidates` are the schemes
    to choose from, and `scheme` applies only to modules that its rules name (they count in the average).
    """

    model: str
    out: Path
    scheme: str = "w4a16"
    method: str = "rtn"
    calibration: Path | None = None
    samples: int = 128
    length: int = 512
    seed: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    budget: float | None = None
    candidates: tuple[str, ...] = bits.CANDIDATES
    overwrite: bool = False
    resume: bool = False
    device: str = "cpu"  # where layers are computed and rounded


def check(plan: QuantizePlan, scheme: QuantScheme, pipeline: Pipeline) -> None:
    """Raise ConfigError, before any file is read, for settings that exclude each other or do not work here."""
    devices.check(plan.device)
    if scheme.weights == "auto" and not scheme.rules and plan.budget is None:
        raise ConfigError("scheme 'auto' changes nothing; name one, e.g. --scheme w4a16")
    if plan.out.exists() and not plan.overwrite:
        raise ConfigError(f"{plan.out} exists; choose another -o, or replace it with --overwrite")
    if pipeline.needs and plan.calibration is None:
        raise ConfigError(
            f"method {pipeline.text!r} learns from text; give --calibration FILE (.jsonl or .txt), or take --method rtn"
        )
    if plan.budget is not None:
        candidates = [QuantScheme.parse(c) for c in plan.candidates]
        if all(is_dense(c) for c in candidates):
            raise ConfigError("a budget needs candidates of fewer bits, e.g. --candidates w4a16 w8a16 bf16")
        if plan.calibration is None:
            raise ConfigError("a budget is spent by measured loss; give --calibration FILE")
        if not 0 < plan.budget < math.inf:
            raise ConfigError(f"a budget is a number of bits a weight, e.g. 4.5; got {plan.budget:g}")
    if not 0 <= plan.seed < 2**63:
        raise ConfigError(f"the seed is a number from 0 to 2^63 - 1; got {plan.seed}")
