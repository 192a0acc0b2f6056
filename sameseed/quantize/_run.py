"""Write a quantized checkpoint of a model: layer by layer, resumable, and with the same bits every time."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sameseed import __version__, devices, fields, scheme as formats
from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig, llama_only, read_json
from sameseed.models.loader import load_tokenizer, open_checkpoint, read_config, resolve_model
from sameseed.models.save import check_destination, method_for, save_quantized
from sameseed.models.weights import TensorSource, check_rules, expected_shapes, resolve_scheme
from sameseed.quantize import Pipeline, Stats, _budget as bits, check_stored, is_dense, parse_method
from sameseed.quantize._calibrate import Calibration, read_calibration
from sameseed.quantize._decoder import CPU, Linear, chunks, moved
from sameseed.quantize._walk import ModuleError, Walk, module_error
from sameseed.quantize._work import WorkFolder, digest
from sameseed.scheme import DENSE, QuantScheme, QuantTensor
from sameseed.store import weights_key

log = logging.getLogger("sameseed")

SCHEMA = "sameseed.quantization/1"
FILE = "quantization.json"  # beside the weights: the settings of the run, and the error of each module
HELD_OUT = 8  # rows that sensitivities are measured on
HEAD_ROWS = 1 << 14  # rows of embedding or LM head that are float32 at one time
MAPPED = 2**30  # bytes; hidden states of this size or more are kept in a file
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


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


# What is counted, how many are done, how many there are, and the errors of the layer just finished.
Report = Callable[[str, int, int, Seq[ModuleError]], None]


@dataclass(frozen=True)
class QuantizeResult:
    """The folder of the finished checkpoint and the content of its `quantization.json`."""

    folder: Path
    quantization: dict[str, Any]


def quantize(plan: QuantizePlan, report: Report = lambda *_: None) -> QuantizeResult:
    """Quantize by `plan`. Raises ConfigError or RegistryError, before anything is written, for an impossible plan.

    The checkpoint is saved from CPU memory. On another device, rounding to nearest gives the same file as on the CPU.
    Methods with calibration may compute other last bits there, and so choose some other codes.
    """
    scheme = QuantScheme.parse(plan.scheme)
    pipeline = parse_method(plan.method, plan.options, plan.seed)
    check(plan, scheme, pipeline)
    folder = resolve_model(plan.model)
    check_destination(Path(os.path.abspath(plan.out)), plan.overwrite, folder)  # fail now, not at the end
    config = llama_only(read_config(folder), "quantize")
    check_rules(config, scheme)
    record = folder / "twin.json"
    # In a twin, a constant dimension keeps padding tokens unlikely.
    if pipeline.rotates and record.exists() and read_json(record).get("constant") is not None:
        raise ConfigError(
            f"{plan.model} is a twin with padding tokens, which method {pipeline.text!r} would let win; take another "
            "method, or a twin of a shape with the source's own vocabulary"
        )
    calibration = None
    if plan.calibration is not None:
        tokenizer = load_tokenizer(folder)
        apart = HELD_OUT if plan.budget is not None else 0
        length = min(plan.length, config.max_model_len)
        calibration = read_calibration(plan.calibration, tokenizer, plan.samples, length, plan.seed, apart)
        # Statistics of fewer tokens than a row has columns have no full rank: some codes then fit nothing but chance.
        if (count := calibration.rows.numel()) < config.intermediate_size:
            log.warning(
                "%s gives %d tokens of calibration text, but rows have up to %d columns: give at least as many tokens, "
                "better %d (--samples x --length)",
                *(plan.calibration.name, count, config.intermediate_size, plan.samples * length),
            )
        if (largest := int(calibration.rows.max())) >= config.vocab_size:
            raise ConfigError(
                f"the tokenizer gives token {largest} for {plan.calibration}, the model knows {config.vocab_size}; "
                "is tokenizer.json the model's own?"
            )
    with torch.inference_mode(), open_checkpoint(folder) as source:
        source.check(config)
        return _Run(plan, folder, config, source, pipeline, scheme, calibration, report).finish()


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


@dataclass
class _Run:
    """One run: the source, the work folder, the walk through the layers."""

    plan: QuantizePlan
    folder: Path
    config: ModelConfig
    source: TensorSource
    pipeline: Pipeline
    scheme: QuantScheme
    calibration: Calibration | None
    report: Report

    def __post_init__(self) -> None:
        self.device = torch.device(self.plan.device)
        rules = QuantScheme(rules=self.scheme.rules)
        # transformers has no quantized embedding: a quantized head is a separate matrix beside a dense embedding.
        head_apart = not is_dense(rules.at(HEAD)) and rules.at(HEAD) != rules.at(EMBEDDING)
        self.tied = self.config.tied_embeddings and not (self.pipeline.rotates or head_apart)
        self.ends = (EMBEDDING,) if self.tied else (EMBEDDING, HEAD)
        shapes = {n.removesuffix(".weight"): (s[0], s[1]) for n, s in expected_shapes(self.config).items() if s[1:]}
        self.layers = {name: shape for name, shape in shapes.items() if name not in (EMBEDDING, HEAD)}
        self._check_source(shapes)
        self.work = WorkFolder.open(self.plan.out, self._manifest(), self.plan.resume, self.plan.overwrite)
        self.sensitivities: list[bits.Sensitivity] = []
        self.predicted_loss: float | None = None

    def _check_source(self, matrices: Mapping[str, tuple[int, int]]) -> None:
        """Raise ConfigError, before anything is computed, for a matrix that does not fit its scheme."""
        few = min(self.source.bits(f"{name}.weight") for name in matrices)
        if few < 8:
            log.warning(
                "%s is quantized already (%.3g bits a weight): what is not kept as stored is rounded twice; the "
                "original, or a file of 8 bits or more (GGUF: Q8_0, BF16, F16), loses less",
                *(self.plan.model, few),
            )
        stored = {name: (matrices[EMBEDDING], self._end_scheme(name)) for name in self.ends}
        if self.plan.budget is not None:
            bits.check_budget(self.layers, self.scheme, self.plan.candidates, self.plan.budget)
        else:
            stored |= {name: (shape, self.scheme.at(name)) for name, shape in self.layers.items()}
        for name, (shape, scheme) in stored.items():
            if not is_dense(scheme):
                check_stored(name, shape, scheme)

    def _manifest(self) -> dict[str, Any]:
        """The settings that must be equal for a run to be resumed."""
        p, text, none = self.plan, self.calibration, torch.empty(0)
        rows, held_out = (none, none) if text is None else (text.rows, text.held_out)
        return {
            "schema": SCHEMA,
            "version": __version__,  # another version may choose other codes
            "model": weights_key(self.folder),
            "scheme": str(self.scheme),
            "method": self.pipeline.text,
            "options": dict(sorted(p.options.items())),
            "calibration": digest(rows),
            "held_out": digest(held_out),
            "samples": p.samples,
            "length": p.length,
            "seed": p.seed,
            "budget": p.budget,
            "candidates": list(p.candidates) if p.budget is not None else [],
            "device": self.device.type,  # last bits may differ between devices
        }

    def finish(self) -> QuantizeResult:
        """Run all stages: bit budget, layers, embedding and head; then save the checkpoint under its final name."""
        scheme = self._spend() if self.plan.budget is not None else self.scheme
        self.ends_keep = self._ends_keep(scheme)
        embedding = self._end_matrix(EMBEDDING, None)
        hidden = None
        if self.calibration is not None:
            hidden = self._hidden(self.calibration.rows)
            self._embed(self.calibration.rows, embedding, hidden)
        walk = self._walk(self.pipeline, scheme, hidden)
        errors: list[ModuleError] = []
        total = self.config.num_layers
        for index in range(total):
            if self.work.has_layer(index):
                block, own = self.work.read_layer(index)
                walk.skip(block)
            else:
                block, own = walk.layer(index)
                self.work.write_layer(block, own)
            errors += own
            self.report("layers", index + 1, total, own)
        ends = {name: embedding if name == EMBEDDING else self._end_matrix(name, hidden) for name in self.ends}
        errors += [error for _, error in ends.values() if error is not None]
        found = self._about(errors)
        schemes = {e.module: QuantScheme.parse(e.scheme) for e in errors}
        save_quantized(
            self.plan.out,
            self.folder,
            self._stream({name: matrix for name, (matrix, _) in ends.items()}),
            {module: scheme for module, scheme in schemes.items() if not is_dense(scheme)},
            config={"tie_word_embeddings": self.tied},
            files={FILE: json.dumps(found, indent=1) + "\n"},
            card=f"Method {self.pipeline.text}, {found['bits_per_weight']:.2f} bits a weight; {FILE} has the errors.",
            overwrite=self.plan.overwrite,
        )
        self.work.remove()
        return QuantizeResult(self.plan.out, found)

    # --- stages ---

    def _spend(self) -> QuantScheme:
        """The scheme that fits the bit budget best: a rule for every linear layer of the decoder."""
        assert self.plan.budget is not None and self.calibration is not None
        if self.work.has("sensitivity.json"):  # of an interrupted run
            self.sensitivities = [fields.parse(bits.Sensitivity, s) for s in self.work.read_json("sensitivity.json")]
        else:
            held_out = self.calibration.held_out
            rows = held_out if len(held_out) else self.calibration.rows[:HELD_OUT]
            hidden = self._hidden(rows, "held-out")
            self._embed(rows, self._end_matrix(EMBEDDING, None, dense=True), hidden)
            walk = self._walk(Pipeline([m for m in self.pipeline.methods if m.rotates], ""), QuantScheme(), hidden)
            norm = self._last_norm()
            head = Linear(self._dense(HEAD, QuantScheme()).to(self.device).float())
            self.sensitivities = bits.measure(
                walk,
                (self.pipeline.last_norm(norm) / self.config.logit_divisor, head),
                lambda modules: bits.offered(modules, self.scheme, self.plan.candidates),
                lambda done, total: self.report("sensitivity of layers", done, total, ()),
            )
            self.work.write_json("sensitivity.json", [asdict(s) for s in self.sensitivities])
        chosen = bits.assign(self.sensitivities, self.plan.budget)
        self.predicted_loss = chosen.predicted_loss
        return replace(self.scheme, rules=(*self.scheme.rules, *chosen.rules))

    def _walk(self, pipeline: Pipeline, scheme: QuantScheme, hidden: Tensor | None) -> Walk:
        return Walk(self.config, self.source, pipeline, scheme, hidden, self.device)

    def _last_norm(self) -> Tensor:
        """Weights of the norm before the head, float32 [C], on the device."""
        return self.source.tensor("model.norm.weight").to(self.device).float()

    def _hidden(self, rows: Tensor, name: str = "hidden") -> Tensor:
        """A buffer for hidden states [B, S, C] of rows [B, S]: in memory, or if it is large, in a file."""
        shape = (*rows.shape, self.config.hidden_size)
        count = rows.numel() * self.config.hidden_size
        if count * 4 < MAPPED:
            return torch.empty(shape)
        return torch.from_file(str(self.work.folder / f"{name}.f32"), shared=True, size=count).view(shape)

    def _embed(self, rows: Tensor, embedding: tuple[Tensor | QuantTensor, ModuleError | None], out: Tensor) -> None:
        stored = embedding[0]
        for part, ids in zip(chunks(out), torch.split(rows, max(1, len(next(chunks(out))))), strict=True):
            flat = ids.flatten()
            of = stored[flat] if isinstance(stored, Tensor) else formats.get(stored.format).decode_rows(stored, flat)
            part.copy_(of.view_as(part)).mul_(self.config.embedding_factor)

    # --- embedding and head ---

    def _end_scheme(self, name: str) -> QuantScheme:
        """The scheme of embedding or head: that of a rule, else "auto", the stored type."""
        return QuantScheme(rules=self.scheme.rules).at(*((EMBEDDING, HEAD) if self.tied else (name,)))

    def _ends_keep(self, scheme: QuantScheme) -> bool:
        """Whether embedding and head keep the source's codes, which only sameseed's own layout can hold.

        `scheme`: of the layers. Where it is "auto", everything is kept.
        """
        layers = [resolve_scheme(self.config, self.source, scheme, module) for module in self.layers]
        coded = (s for s in [*layers, *map(self._end_scheme, self.ends)] if not is_dense(s))
        return scheme.weights == "auto" or method_for(coded) == "sameseed"

    def _tensor(self, name: str) -> str:
        return f"{EMBEDDING if self.config.tied_embeddings else name}.weight"

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of embedding or LM head, float32 on the device, transformed by the methods."""
        rows = self.source.rows(self._tensor(name), start, stop).to(self.device).float()
        if name == EMBEDDING:
            return self.pipeline.embedding(rows)
        return self.pipeline.head(rows, self._last_norm())

    def _dense(self, name: str, scheme: QuantScheme) -> Tensor:
        """Embedding or head [V, C] in a dense scheme ("auto": the checkpoint's type)."""
        coded = self.source.scheme(self._tensor(name)) is not None  # decoded to float32, more than its codes need
        stored = scheme.format_for(torch.bfloat16 if coded else self.source.dtype(self._tensor(name)))
        dtype = next(dtype for dtype, format in DENSE.items() if format == stored)
        out = torch.empty(self.config.vocab_size, self.config.hidden_size, dtype=dtype)
        for start in range(0, len(out), HEAD_ROWS):
            rows = self._rows(name, start, min(start + HEAD_ROWS, len(out)))
            out[start : start + HEAD_ROWS] = formats.get(stored).encode(rows).parts["weight"]  # raises for a misfit
        return out

    def _end_matrix(
        self, name: str, hidden: Tensor | None, dense: bool = False
    ) -> tuple[Tensor | QuantTensor, ModuleError | None]:
        """Embedding or head as stored, encoded in chunks of rows, and its error; `hidden` [B, S, C]: last norm's input.

        An embedding (also a tied one) is rounded to nearest, because a lookup has no inputs to weight errors with. A
        dense matrix has no error (None).
        """
        scheme = QuantScheme() if dense else self._end_scheme(name)
        tensor = self._tensor(name)
        own = None if dense or self.pipeline.rotates or not self.ends_keep else self.source.scheme(tensor)
        kept = own is not None and scheme.weights == "auto"
        scheme = own if own is not None and kept else scheme
        if is_dense(scheme):
            return self._dense(name, scheme), None
        height, width = self.config.vocab_size, self.config.hidden_size
        stats = None
        if hidden is not None and name == HEAD:
            walk = self._walk(self.pipeline, scheme, hidden)
            norm = self.pipeline.last_norm(self._last_norm()).to(walk.dtype).float()
            stats = Stats.of((walk.decoder.norm(part, norm) for part in walk.parts(hidden)), width, self.device)
        step = HEAD_ROWS if scheme.rows_together else height  # 0: all rows are encoded together
        pieces: list[QuantTensor] = []
        errors: list[ModuleError] = []
        for start in range(0, height, step):
            rows = self._rows(name, start, min(start + step, height))
            scheme = scheme.settled(rows)  # fp8-auto chooses one format for all rows
            if kept:
                q = moved(self.source.stored(tensor, start, min(start + step, height)), self.device)
            else:
                q = scheme.encode(rows) if stats is None else self.pipeline.quantize(rows, scheme, stats)
            pieces.append(moved(q, CPU))
            errors.append(module_error(name, scheme, rows, formats.get(q.format).decode(q), stats))
        whole = pieces[0] if len(pieces) == 1 else formats.get(pieces[0].format).concat(pieces)
        # The mean of the chunks' errors, weighted by size: exact enough for a table.
        share = [e.num_weights / (height * width) for e in errors]
        mean = replace(
            errors[0],
            num_weights=height * width,
            relative=sum(s * e.relative**2 for s, e in zip(share, errors, strict=True)) ** 0.5,
            output=sum(s * e.output for s, e in zip(share, errors, strict=True)),
        )
        return whole, mean

    # --- output ---

    def _stream(self, ends: Mapping[str, Tensor | QuantTensor]) -> Iterator[tuple[str, Tensor | QuantTensor]]:
        """Yield every tensor of the new model with its name, one layer at a time."""
        dtype = self.source.dtype("model.norm.weight")
        norm = self.pipeline.last_norm(self._last_norm()).cpu()
        yield "model.norm.weight", norm.to(dtype)
        for name, matrix in ends.items():
            yield f"{name}.weight", matrix
        for index in range(self.config.num_layers):
            block, _ = self.work.read_layer(index)
            for name, linear in block.linears.items():
                assert linear.q is not None
                yield f"{block.prefix}{name}.weight", linear.q.parts.get("weight", linear.q)
                if linear.bias is not None:
                    yield f"{block.prefix}{name}.bias", linear.bias.to(dtype)
            for name, norm in block.norms.items():
                yield f"{block.prefix}{name}.weight", norm.to(dtype)

    def _about(self, errors: list[ModuleError]) -> dict[str, Any]:
        """The content of `quantization.json`."""
        weights = sum(e.num_weights for e in errors)
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "model": self.plan.model if not Path(self.plan.model).is_dir() else self.folder.resolve().name,
            "scheme": str(self.scheme),
            "method": self.pipeline.text,
            "options": dict(self.plan.options),
            "seed": self.plan.seed,
            "device": self.device.type,
            "calibration": None if self.calibration is None else self.calibration.source,
            "budget": self.plan.budget,
            "bits_per_weight": sum(e.bits * e.num_weights for e in errors) / weights,
            "modules": [asdict(e) for e in errors],
            "sensitivity": [asdict(s) for s in self.sensitivities] or None,
            "predicted_loss": self.predicted_loss,
        }
        found["recommendation"] = [asdict(a) for a in bits.recommend(found)]
        return found
