"""Shared code of the quantizers: statistics of a product's inputs, the interface of a method, the parser of names.

A method of this registry is a file that defines `METHOD`, a subclass of `Quantizer`. Shape letters as in `_decoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sameseed import fields, registry, scheme as formats
from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig
from sameseed.models.weights import check_blocks
from sameseed.quantize._decoder import CPU, Block
from sameseed.scheme import DENSE, QuantScheme, QuantTensor

DOUBLE = 4096  # Hessians of at most this width are summed and factored in float64


@dataclass(frozen=True)
class Stats:
    """Calibration statistics of a product's inputs x: `hessian` [K, K], mean of x x^T; max, mean of |x| by channel."""

    hessian: Tensor
    absmax: Tensor
    mean_abs: Tensor
    _kept: dict[object, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, inputs: Iterable[Tensor], width: int, device: torch.device = CPU) -> Stats:
        """Statistics over tensors [..., K] on `device`, summed in float64 (wide ones in float32)."""
        exact = torch.float64
        hessian = torch.zeros(width, width, dtype=exact if width <= DOUBLE else torch.float32, device=device)
        absmax = torch.zeros(width, device=device)
        total, count = torch.zeros(width, dtype=exact, device=device), 0
        for x in inputs:
            rows = x.reshape(-1, width)
            hessian += rows.T @ rows
            size = rows.abs()
            absmax = torch.maximum(absmax, size.amax(0))
            total += size.sum(0).double()
            count += len(rows)
        if not hessian.isfinite().all():
            raise ConfigError("the model produced NaN or infinity on the calibration text; check the weights")
        return cls((hessian / max(count, 1)).float(), absmax, (total / max(count, 1)).float())

    def kept(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """The result of `make()`, computed once per key, so that weights with the same inputs share it."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def error(self, weight: Tensor, stored: Tensor) -> Tensor:
        """Mean squared difference between the outputs of `weight` [O, K] and of `stored`, by output [O]."""
        delta = stored - weight
        return ((delta @ self.hessian) * delta).sum(1).clamp_(min=0)


SchemeOf = Callable[[str], QuantScheme]  # name of a linear layer within its block -> its scheme


class Quantizer:
    """A quantization method. `prepare` may rewrite a layer without changing what it computes; `quantize` chooses codes.

    `needs`: contains "hessian" if the method requires calibration. `rounds`: whether the method has a `quantize` of its
    own. `rotates`: whether it rotates the residual stream of the whole model. Such a method comes before all others,
    and embedding and LM head become separate matrices.
    """

    needs: frozenset[str] = frozenset()
    rounds = False
    rotates = False

    @dataclass(frozen=True)
    class Options:
        """The method has no options; those of others are checked against their ranges."""

        def __post_init__(self) -> None:
            fields.check(self)

    def __init__(self, options: Any = None, seed: int = 0) -> None:
        self.options: Any = self.Options() if options is None else options
        self.seed = seed

    def prepare(self, block: Block, stats: Mapping[str, Stats], config: ModelConfig, scheme_of: SchemeOf) -> None:
        """Rewrite a layer in place; `stats`: by stage, of the layer before (empty if the method does not need them)."""

    def quantize(self, weight: Tensor, scheme: QuantScheme, stats: Stats | None) -> QuantTensor:
        """Store weight [O, K] in `scheme`, which has codes; `stats`: of its inputs (None: the method needs none)."""
        return scheme.encode(weight)

    def embedding(self, rows: Tensor) -> Tensor:
        """Transform rows [n, C] of the embedding to match the rewritten layers."""
        return rows

    def head(self, rows: Tensor, norm: Tensor) -> Tensor:
        """Transform rows [n, C] of the LM head, which reads the output of the last norm [C]."""
        return rows

    def last_norm(self, norm: Tensor) -> Tensor:
        """Transform the norm [C] before the LM head."""
        return norm


class Pipeline:
    """Several methods as one: all prepare in turn, and the last one with `rounds` quantizes (if none: to nearest)."""

    def __init__(self, methods: list[Quantizer], text: str) -> None:
        self.methods = methods
        self.text = text
        self.needs = frozenset[str]().union(*(m.needs for m in methods))
        self.rotates = any(m.rotates for m in methods)

    def quantize(self, weight: Tensor, scheme: QuantScheme, stats: Stats | None) -> QuantTensor:
        """Store weight [O, K] in `scheme`; `stats`: of its inputs (None: the methods need none)."""
        rounding = next((m for m in reversed(self.methods) if m.rounds), None)
        if rounding is None or is_dense(scheme):
            return scheme.encode(weight)
        return rounding.quantize(weight, scheme, stats)

    def embedding(self, rows: Tensor) -> Tensor:
        for method in self.methods:
            rows = method.embedding(rows)
        return rows

    def head(self, rows: Tensor, norm: Tensor) -> Tensor:
        for method in self.methods:
            rows = method.head(rows, norm)
            norm = method.last_norm(norm)
        return rows

    def last_norm(self, norm: Tensor) -> Tensor:
        for method in self.methods:
            norm = method.last_norm(norm)
        return norm


def parse_method(text: str, options: Mapping[str, object] | None = None, seed: int = 0) -> Pipeline:
    """The methods named in `text`, joined with + (e.g. "rotate+gptq"); each option goes to the methods that have it.

    Raises RegistryError with the nearest name; ConfigError for an impossible order, a method named twice, or an unknown
    option.
    """
    names = [n.strip().lower() for n in text.split("+")]
    classes: list[type[Quantizer]] = [registry.load("quantize", n).METHOD for n in names]
    for i, (name, cls) in enumerate(zip(names, classes, strict=True)):
        if cls.rotates and i:
            raise ConfigError(f"method {text!r}: {name} undoes what stands before it; write {name} first")
        if name in names[:i]:
            raise ConfigError(f"method {text!r} names {name} twice; leave one out")
    wrong = [n for n, cls in zip(names[:-1], classes, strict=False) if cls.prepare is Quantizer.prepare]
    if wrong:
        raise ConfigError(f"method {text!r}: {wrong[0]} rounds, so it comes last, e.g. {names[-1]}+{wrong[0]}")
    given = dict(options or {})
    fields.check_keys(given, [key for cls in classes for key in fields.hints(cls.Options)], f"method {text!r}")
    made = []
    for cls in classes:
        own = {key: value for key, value in given.items() if key in fields.hints(cls.Options)}
        made.append(cls(fields.parse(cls.Options, own), seed))
    return Pipeline(made, "+".join(names))


def is_dense(scheme: QuantScheme) -> bool:
    """Whether a scheme stores plain floats ("auto": of the checkpoint's type), so that no codes are chosen."""
    return scheme.weights == "auto" or scheme.weights in DENSE.values()


def check_stored(name: str, shape: tuple[int, int], scheme: QuantScheme) -> None:
    """Raise ConfigError where a matrix [O, K] cannot be stored in a scheme."""
    check_blocks(name, shape, scheme)
    try:
        scheme.args(shape[1])
    except ConfigError as error:
        raise ConfigError(f"{name} {list(shape)} cannot be stored as {scheme}: {error}") from None


def decoded(q: QuantTensor) -> Tensor:
    """The values that a weight stores, float32 [O, K]."""
    return formats.get(q.format).decode(q)
