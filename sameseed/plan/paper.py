"""Costs on paper: what a pass must read and compute by config.json alone, over what the machine can do.

Reading and computing overlap in part: a pass takes the root of the sum of their squares. Each counts at the share of
the machine's limit that real passes reach. The shares come from committed records of `sameseed profile`; a test derives
them. The interval is how far the records differ from this model.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sameseed import hub, scheme
from sameseed.cost.draft_format import EMBEDDING, cheaper, read_bytes
from sameseed.cost.experts import counted
from sameseed.cost.round import MAX_NUM_ROWS, Gap, RoundCost
from sameseed.engine.memory import block_bytes
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.formats import _losses
from sameseed.measure.limits import Limits
from sameseed.measure.passes import ModelWork
from sameseed.measure.shapes import NAMES, SHAPES, get_shape
from sameseed.models.config import EMBEDDED, ModelConfig, read_json
from sameseed.models.draft_format import few_bits, following
from sameseed.models.head_config import CODEBOOKS, HeadConfig, is_head, read_head_config
from sameseed.models.loader import open_checkpoint, read_config, resolve_model
from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import (
    Shapes,
    TensorSource,
    dense_format,
    expected_shapes,
    matrix_bits,
    resolve_scheme,
    rounds,
    usual,
    weight_bytes,
)
from sameseed.scheme import QuantScheme

HUB_FILE = re.compile(r"[^./~][^/:]*/[^/:]+(:[^/:]+|/[^/]+\.gguf)$", re.IGNORECASE)  # a GGUF file's name on the hub
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Shares of the limits that passes reach: READ and COMPUTE fit RECORDS (commits of benchmarks/results/profile.jsonl)
# best. Attention works on short rows: 0.05 to 0.14 fit, depending on which curve is left out.
RECORDS = ("8a4dfcfcd99e", "d008a7591082")
READ, COMPUTE, ATTENTION = 0.86, 0.49, 0.10
# Standard deviation of the logarithm of a pass's seconds there: 0.074 of one row, 0.078 more of others. It comes from
# four curves, so Student's t with 3 degrees of freedom, over the normal one at 90 %, widens it.
SPREAD = 0.078 * 1.638 / 1.282
GAP = 0.35e-3  # seconds outside the models: the median overhead_ms_per_round in benchmarks/results/bench.jsonl


@dataclass(frozen=True)
class Sheet(ModelWork):
    """A model before it is loaded."""

    name: str  # of its weight format
    kv_format: str
    weights: int  # bytes of all of them
    loss: str = ""  # what rounding to the format is likely to cost in quality, in words

    def seconds(self, limits: Limits, batch: int, new_tokens: int, context: int, prompt: bool = False) -> float:
        """Seconds of a pass (see `work`) on a machine with these limits."""
        work = self.work(batch, new_tokens, context, prompt)
        reading = work.num_bytes / limits.read / READ
        matrices = work.matrix_ops / limits.peak(self.peak) / COMPUTE
        return math.hypot(reading, matrices + work.attention_ops / limits.peak("fp32") / ATTENTION)

    def cost(self, limits: Limits) -> RoundCost:
        """The costs of rounds on a machine with these limits."""

        def prompt(tokens: float) -> float:
            passes = [(min(MAX_NUM_ROWS, round(tokens) - at), at) for at in range(0, round(tokens), MAX_NUM_ROWS)]
            return sum(self.seconds(limits, 1, n, at, prompt=True) for n, at in passes)

        return RoundCost(PaperPasses(self, limits), (), Gap(GAP, GAP), prompt, "paper", SPREAD)


@dataclass(frozen=True)
class PaperPasses:
    """Passes by bytes and operations, at the shares of the machine's limits that real passes reach."""

    sheet: Sheet
    limits: Limits

    def cost(self, rows: float, batch: float = 1.0, context: float = 0.0) -> float:
        return self.sheet.seconds(self.limits, round(batch), max(1, round(rows / batch)), round(context))


def sheet(model: str, format: str = "auto", kv_format: str = "auto", target: Sheet | None = None) -> Sheet:
    """The sheet of a model: a shape's name, a folder, a GGUF file or a hub id, of which config.json alone is fetched.

    `target`: the model for which this one drafts, whose format applies where none is named. Raises ConfigError,
    ModelLoadError or RegistryError.
    """
    quant = QuantScheme.parse(format)
    if model.lower() in SHAPES:
        config = get_shape(model)
        return _sheet(config, RandomCheckpoint(config), quant, kv_format, target)
    path = find(model)
    if path.is_dir() and is_head(path):
        raise ConfigError(f"{model} is a draft head, no model by itself; give it with --draft")
    config = counted(read_config(path), path)
    if path.is_file() or any(path.glob("*.safetensors")):
        with open_checkpoint(path) as checkpoint:
            checkpoint.check(config)
            return _sheet(config, checkpoint, quant, kv_format, target)
    raw = read_json(path / "config.json")
    if "quantization_config" in raw and quant.weights == "auto":
        raise ConfigError(f"{model} is stored quantized, and its weights are not here: name a --format, e.g. w4a16")
    dtype = DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype")), torch.bfloat16)
    return _sheet(config, RandomCheckpoint(config, dtype=dtype), quant, kv_format, target)


def head_sheet(path: Path, format: str, kv_format: str, target: Sheet) -> Sheet:
    """The sheet of a draft head for a target; borrowed tensors (embedding, LM head) are read, but not stored."""
    head, quant = read_head_config(path), QuantScheme.parse(format)
    head.check_target(target.config)
    shapes = _own_tensors(head, path)
    layer = replace(head.layer, vocab_size=head.draft_vocab_size)
    source = RandomCheckpoint(layer, shapes=shapes)
    quant = _beside(target, quant, layer, source, shapes)
    size = weight_bytes(layer, source, quant, shapes)
    tables = ["embed_tokens.weight", "markov_head.markov_w1.weight"]  # of which a pass reads some rows only
    tables += [f"{table}.weight" for table in CODEBOOKS]
    unread = (math.prod(shapes[n]) * matrix_bits(layer, source, quant, n, shapes[n]) / 8 for n in tables if n in shapes)
    read = size - sum(unread)
    if "lm_head.weight" not in shapes:
        c = target.config
        looked_up = 0 if c.tied_embeddings else c.vocab_size * c.hidden_size
        read += target.read * layer.vocab_size * layer.hidden_size / (c.num_parameters - looked_up)
    kv = scheme.cache_format(kv_format, quant.dense_for(torch.bfloat16))
    return Sheet(layer, read, block_bytes(layer, kv, 1), _peak(quant, torch.bfloat16), str(quant), kv, size)


def _own_tensors(head: HeadConfig, path: Path) -> Shapes:
    """Tensors that the head stores; without its files, those that it cannot borrow."""
    own = {n: s for n, s in head.tensors().items() if n != "d2t"}
    borrowed = ["embed_tokens.weight", *(["lm_head.weight"] if head.draft_vocab_size == head.layer.vocab_size else [])]
    stored = set()
    for file in path.glob("*.safetensors"):
        from safetensors import safe_open

        with safe_open(file, "pt") as opened:
            stored |= set(opened.keys())
    return {n: s for n, s in own.items() if n not in borrowed or n in stored}


def find(model: str) -> Path:
    """Path of a model's config: a folder, a GGUF file, or a folder of the hub's cache with config.json alone."""
    path = Path(os.path.expanduser(model))
    if model in (*hub.PACKAGED, *EMBEDDED) or path.exists():
        return resolve_model(model)
    if HUB_FILE.match(model):
        if (file := hub.cached(model)) is None:
            raise ModelLoadError(
                f"{model} is not in the hub's cache, and no weights are downloaded for an estimate; give 'org/name' of "
                "the model with a config.json, and the --format, or take a shape of the same size (--shape)"
            )
        return file
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelLoadError(
            f"no model at {model!r}: give a folder, a hub id like 'org/name', or a shape ({', '.join(NAMES)})"
        )
    from huggingface_hub import try_to_load_from_cache

    if isinstance(cached := try_to_load_from_cache(model, "config.json"), str):
        return Path(cached).parent
    try:
        return hub.fetch(model, "config.json").parent
    except Exception as error:  # besides the hub's own errors, those of the HTTP library under this version
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"no folder {model!r} here, and the hub did not give its config.json ({first}); save that file in a "
            "folder and give the folder, or take a shape of the same size (--shape)"
        ) from None


def _beside(
    target: Sheet | None, quant: QuantScheme, config: ModelConfig, source: TensorSource, shapes: Shapes | None = None
) -> QuantScheme:
    """The scheme of a draft for `target`: `quant` where its weights are named, else the one that the engine chooses."""
    if target is None or quant.weights != "auto":
        return quant
    found = following(few_bits(QuantScheme.parse(target.name).at(usual(config))), config, source, shapes)
    return cheaper(config, source, target.read) if found.weights == "auto" and shapes is None else found


def _sheet(
    config: ModelConfig, source: TensorSource, quant: QuantScheme, kv_format: str, target: Sheet | None = None
) -> Sheet:
    asked = _beside(target, quant, config, source)
    quant = asked.with_head() if target is None else asked
    dtype = source.dtype(EMBEDDING)
    size = weight_bytes(config, source, quant)
    chosen = resolve_scheme(config, source, quant, usual(config))
    kv = scheme.cache_format(kv_format, dense_format(source, quant, expected_shapes(config)))
    name = str(chosen) if quant.weights == "auto" and chosen.weights != "auto" else str(asked)
    name = quant.format_for(dtype) if name == "auto" else name
    loss = _losses.likely(asked) if rounds(config, source, asked) else ""
    read, row = read_bytes(config, source, quant), block_bytes(config, kv, 1)
    return Sheet(config, read, row, _peak(chosen, dtype), name, kv, size, loss)


def _peak(quant: QuantScheme, dtype: torch.dtype) -> str:
    if quant.activations in ("int8", "outliers"):
        return "int8"
    return "bf16" if quant.format_for(dtype) == "bf16" else "fp32"
