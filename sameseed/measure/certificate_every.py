"""Certificates of every drafter in many formats and batch sizes, on one device: laws 1 to 4 by one command."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch

from sameseed.config import CacheConfig, EngineConfig, SpecConfig
from sameseed.errors import SameseedError
from sameseed.laws.check import FAILED, IN_PART, NOT_SHOWN, PASSED, Effort
from sameseed.laws.checks import chosen
from sameseed.measure import certificate as suite
from sameseed.request import SamplingParams

# Drafts for the embedded pair. Other models are checked with MODELLESS, the drafters that need no draft model.
EMBEDDED = (
    "embedded-draft",
    "eagle",
    "ngram",
    "suffix",
    "self_quant",
    "ngram > embedded-draft",
    "suffix + embedded-draft",
    "parallel:embedded-draft",
)
# The padding token is the mask token. The draft was not trained for it, so some draft tokens are right and some wrong.
OPTIONS: Mapping[str, Mapping[str, object]] = {"parallel:embedded-draft": {"mask_token": 0}}
MODELLESS = ("ngram", "suffix", "self_quant")
FORMATS = ("bf16", "w8a16", "w8a8", "w4a16", "w4a8", "fp8", "fp8-a8", "w4a8-qoq")
KV_FORMATS = ("bf16", "int8", "fp8_e4m3")
BATCHES = (1, 4, 16)
# The checks that depend on the draft. The others run only once per format.
OF_DRAFTS = ("C1", "L3", "L6", "L9", "S1", "W1", "P1", "L5", "L10", "A1", "C2")
LEAST = 0.25  # share of the least sizes, for cells that are not whole


@dataclass(frozen=True)
class Combination:
    """One configuration: draft, weight format, KV cache format, batch size. `whole`: all checks run."""

    draft: SpecConfig
    name: str
    format: str
    kv_format: str
    batch: int
    whole: bool


@dataclass(frozen=True)
class Outcome:
    """The result of a cell: its record, or the reason why there is none."""

    cell: Combination
    record: dict[str, Any] | None
    failure: str = ""

    @property
    def verdict(self) -> str:
        """passed (all checks), these checks passed, not shown, failed, or impossible (the cell could not be set up)."""
        return "impossible" if self.record is None else str(self.record["verdict"])


def cells(drafts: Mapping[str, SpecConfig], formats: Seq[str] = FORMATS) -> list[Combination]:
    """Every draft in every weight format. Cache formats and batch sizes rotate, so that drafts and formats meet all."""
    made = []
    for i, weights in enumerate(formats):
        for j, (name, spec) in enumerate(drafts.items()):
            kv, batch = KV_FORMATS[(i + j) % len(KV_FORMATS)], BATCHES[(i + 2 * j) % len(BATCHES)]
            made.append(Combination(spec, name, weights, kv, batch, j == 0))
    return made


def run(
    every: Seq[Combination],
    asked: suite.Asked,
    config: EngineConfig,
    params: SamplingParams,
    tick: suite.Tick = lambda name, done, total: None,
) -> Iterator[Outcome]:
    """The cells' certificates, one after the other. A cell that cannot be set up yields an outcome without a record.

    `config`: backend, device and limits of all cells. `asked.effort`: effort of whole cells; the others use less.
    """
    for i, cell in enumerate(every):
        tick(f"{cell.name}, {cell.format}, {cell.kv_format}, batch {cell.batch}", i, len(every))
        cache = CacheConfig(config.cache.block_size, None, cell.kv_format)
        effort = asked.effort if cell.whole else Effort(asked.effort.share, LEAST)
        own = replace(config, format=cell.format, spec=cell.draft, cache=cache)
        yield _outcome(cell, replace(asked, batch=cell.batch, effort=effort), own, params)
        # Free this cell's models and caches before the next cell loads its own: a GPU has room for only one.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _outcome(cell: Combination, asked: suite.Asked, config: EngineConfig, params: SamplingParams) -> Outcome:
    """One cell's certificate. Only this call holds the subject, so its memory is freed at the end."""
    try:
        try:
            subject = suite.load_subject(asked, config, params)
        except SameseedError as error:
            return Outcome(cell, None, str(error))
        checks = chosen(() if cell.whole else OF_DRAFTS)
        return Outcome(cell, suite.certify(subject, asked, checks).as_dict())
    except torch.OutOfMemoryError as error:
        return Outcome(cell, None, (str(error).splitlines() or ["the device's memory is full"])[0])


def verdict(outcomes: Seq[Outcome]) -> str:
    """The overall verdict: passed if nothing failed, no cell was impossible, and all checks ran in every format."""
    found = [o.verdict for o in outcomes]
    for worse in (FAILED, NOT_SHOWN):
        if worse in found:
            return worse
    whole = all(o.verdict == PASSED for o in outcomes if o.cell.whole)
    return PASSED if whole and "impossible" not in found else IN_PART
