"""Read a model's weights from a source of tensors: expected names and shapes, and encoding in a number format.

A matrix is read, encoded and packed in chunks of rows, straight into its final memory. So neither its float copy nor
its unpacked codes are ever whole in memory. Where a source can be read by several threads, layers are read side by
side, and so are the chunks of the two large matrices outside the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import groupby
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sameseed import scheme
from sameseed.errors import ConfigError, say_once
from sameseed.formats._memory import Arena
from sameseed.models.config import ROUTERS, ModelConfig, family
from sameseed.models.layers import LayerWeights, ModelWeights, rotary_columns, rotary_order
from sameseed.models.layouts.base import round_scheme
from sameseed.ops import BLOCK_OUTPUTS, Ops, limit_threads, num_threads
from sameseed.scheme import BLOCKS, KQUANTS, FileRows, QuantScheme, QuantTensor

Progress = Callable[[int, int], None]
A = TypeVar("A")
B = TypeVar("B")
CHUNK = 1 << 20  # values of a matrix that are floats at one time: few enough to stay in the processor's cache
WIDER = 16  # a GPU's chunks are this many times larger, because there the cost of a call dominates


class TensorSource(Protocol):
    """A source of weights: a checkpoint, or random noise. Tensor names are those of `expected_shapes`.

    Of floats alone, `dtype`, `tensor` and `rows` are enough.
    """

    def scheme(self, name: str) -> QuantScheme | None:
        """The scheme that a matrix is stored in; None: plain floats."""
        return None

    def bits(self, name: str) -> float:
        """Bits per weight of a matrix in the source, before it is read."""
        return self.dtype(name).itemsize * 8.0

    def in_parts(self, name: str) -> bool:
        """Whether some rows of a matrix can be read without the others, by several threads at once."""
        return False

    def stored(self, name: str, start: int = 0, stop: int | None = None) -> QuantTensor:
        """Rows start..stop-1 (None: all) of a matrix that has a scheme, as stored, in its format's plain layout.

        Rows can be chosen only where `in_parts` says so.
        """
        raise LookupError(f"{name} is stored in no scheme")

    def file_rows(self, name: str) -> FileRows | None:
        """Where a matrix lies in a file, if it is there in blocks as ggml has them."""
        return None

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor; for a matrix with a scheme, the type of the values that `rows` returns."""

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, finite."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of a matrix, finite, decoded if it has a scheme, in new memory."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must hold, by Hugging Face name, with its shape."""
    return family(config.architecture).shapes(config)


def resolve_scheme(config: ModelConfig, source: TensorSource, quant: QuantScheme, module: str) -> QuantScheme:
    """The scheme that a module's matrix will be stored in.

    "auto" keeps what the source stores. Naming the source's own format keeps its codes too: `w4a8` on a checkpoint with
    4-bit codes keeps them, whatever their group size.
    """
    tied = config.tied_embeddings and module == "model.embed_tokens"
    asked = quant.at(module, "lm_head") if tied else quant.at(module)
    if module.endswith(ROUTERS) and asked.weights != "fp32" and not any(fnmatchcase(module, g) for g, _ in quant.rules):
        asked = QuantScheme()
    own = source.scheme(f"{module}.weight")
    if own is None:
        return asked if asked.weights != "auto" else QuantScheme(asked.variant or "auto")
    if asked.weights == "auto":
        if asked.variant is not None:
            say_once(f"quantized weights stay as stored, the others become {asked.variant}")
        integer = asked.activations == "int8" and "activations" in scheme.get(own.weights).options
        return replace(own, activations="int8") if integer else own
    kept = asked.weights == own.weights and asked.group in (None, own.group) and asked.variant in (None, own.variant)
    return replace(own, activations=asked.activations) if kept else asked


def usual(config: ModelConfig) -> str:
    """The matrix whose scheme stands for the whole model's."""
    shapes = family(config.architecture).layer_shapes(config, 0)
    return next(n.removesuffix(".weight") for n in shapes if n.endswith(("down_proj.weight", ".w2.weight")))


def rounds(config: ModelConfig, source: TensorSource, quant: QuantScheme) -> bool:
    """Whether `quant` has fewer bits than the source's usual matrix."""
    return quant.weights != "auto" and scheme.get(quant.weights).bits < source.bits(f"{usual(config)}.weight")


Shapes = Mapping[str, tuple[int, ...]]


def dense_format(source: TensorSource, quant: QuantScheme, shapes: Shapes) -> str:
    """The format that "auto" means for the cache and for dense parts: that of the matrices, whatever norms are.

    fp32 only if all matrices are stored as float32; bf16 where none is stored as 16-bit floats.
    """
    names = [name for name, shape in shapes.items() if len(shape) == 2]
    dense = [source.dtype(name) for name in names if source.scheme(name) is None]
    narrow = [dtype for dtype in dense if dtype is not torch.float32]
    return quant.dense_for(narrow[0] if narrow else torch.bfloat16 if len(dense) < len(names) else torch.float32)


def check_rules(config: ModelConfig, quant: QuantScheme, shapes: Shapes | None = None) -> None:
    """Raises ConfigError for a rule that matches none of the model's modules, since it is likely a typing error."""
    modules = [n.removesuffix(".weight") for n, shape in (shapes or expected_shapes(config)).items() if len(shape) == 2]
    modules += ["lm_head"] if config.tied_embeddings or shapes is not None else []  # a head may borrow its target's
    for glob, _ in quant.rules:
        if not any(fnmatchcase(m, glob) for m in modules):
            raise ConfigError(f"no module fits the rule {glob!r}; names are like {', '.join(modules[:2])}, lm_head")


def weight_bytes(
    config: ModelConfig, source: TensorSource, quant: QuantScheme, shapes: Shapes | None = None, device: str = "cpu"
) -> int:
    """Bytes that all weights will take, padded as kernels pad them (slightly more than plain codes take).

    `shapes`: of all tensors, if they are not those of a whole model (but of a draft head). Raises ConfigError naming
    the first tensor whose rows the scheme's group does not divide, or a rule that matches no module; and for recurrent
    layers on a GPU.
    """
    if config.state_shapes and device != "cpu":
        raise ConfigError(f"models with recurrent layers run on the CPU only; leave out --device {device}")
    check_rules(config, quant, shapes)
    total = 0
    for name, shape in (shapes or expected_shapes(config)).items():
        if len(shape) != 2:
            total += torch.Size(shape).numel() * 4
            continue
        bits = matrix_bits(config, source, quant, name, shape, device)
        total += int(-(-shape[0] // BLOCK_OUTPUTS) * BLOCK_OUTPUTS * shape[1] * bits / 8)
    return total


def check_blocks(name: str, shape: Seq[int], chosen: QuantScheme) -> None:
    """Raise ConfigError where llama.cpp's blocks do not divide the rows of a matrix [O, K]."""
    block = 256 if chosen.weights in KQUANTS else 32 if chosen.weights in BLOCKS else 1
    if shape[1] % block:
        raise ConfigError(
            f"tensor {name} {list(shape)} cannot be stored as {chosen}: blocks of {block} do not divide its rows of "
            f"{shape[1]} values; take {'q5_0-a8 or ' if shape[1] % 32 == 0 else ''}w4a8"
        )


def matrix_bits(
    config: ModelConfig, source: TensorSource, quant: QuantScheme, name: str, shape: Seq[int], device: str = "cpu"
) -> float:
    """Bits per weight that one matrix will take. Raises ConfigError where the scheme cannot store its rows."""
    chosen, own = resolve_scheme(config, source, quant, name.removesuffix(".weight")), source.scheme(name)
    kept = own is not None and own.weights == chosen.weights in KQUANTS | BLOCKS
    if kept and (device, chosen.activations) != ("cpu", "int8"):
        chosen = round_scheme(shape[1])  # no kernel supports these K-quants: see WeightReader
    if own is None or own.weights != chosen.weights:
        check_blocks(name, shape, chosen)
    try:
        if chosen.variant == "dq":  # its scales are decoded to float32
            return 4 + 32 / (chosen.args(shape[1]).group or shape[1])
        return chosen.bits_per_weight(shape[1], source.dtype(name))
    except ConfigError as error:
        raise ConfigError(f"tensor {name} {list(shape)} cannot be stored as {chosen}: {error}") from None


def read_weights(
    config: ModelConfig,
    source: TensorSource,
    quant: QuantScheme,
    ops: Ops,
    device: str = "cpu",
    progress: Progress | None = None,
) -> ModelWeights:
    """All weights of a model: matrices stored by `quant` and packed for `ops`, norms and biases float32.

    `progress(done, total)` counts values. Raises ConfigError as `weight_bytes` does, before any weight is read.
    """
    weight_bytes(config, source, quant, device=device)
    reader = WeightReader(config, source, quant, ops, device, progress)
    with reader:
        return family(config.architecture).read(reader, dense_format(source, quant, reader.shapes))


def _alone() -> None:
    """Let calls of this thread compute on it alone: several of them read."""
    torch.set_num_threads(1)
    limit_threads(1)


Spread = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]  # `map`, or a map on several threads


class WeightReader:
    """Reads the tensors of one model, or of a draft head where `shapes` lists its tensors.

    As a context it has threads, for `spread`, if the source can be read by several.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        quant: QuantScheme,
        ops: Ops,
        device: str,
        progress: Progress | None,
        shapes: Shapes | None = None,
    ) -> None:
        self.config: Any = config  # of the family's class
        self.source, self.quant, self.device = source, quant, device
        self.encode, self.pack, self.read, self.has_kernel = ops.encode, ops.pack, ops.read, ops.has_kernel
        self.shapes = expected_shapes(config) if shapes is None else shapes
        self.modules = family(config.architecture).modules
        self.progress = progress
        self.total = sum(torch.Size(s).numel() for s in self.shapes.values())
        self.done = 0
        self._lock = Lock()
        self._arena = Arena()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> None:
        matrices = (name for name, shape in self.shapes.items() if len(shape) == 2)
        if self.device == "cpu" and all(map(self.source.in_parts, matrices)):
            self._threads = ThreadPoolExecutor(num_threads(), initializer=_alone)

    def __exit__(self, *exc: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._arena.close()

    def spread(self, function: Callable[[A], B], items: Iterable[A]) -> Iterable[B]:
        """`map`, on several threads if there are any. `function` must not call this."""
        return map(function, items) if self._threads is None else self._threads.map(function, items)

    def _tick(self, values: int) -> None:
        with self._lock:
            self.done += values
            if self.progress is not None:
                self.progress(self.done, self.total)

    def vector(self, name: str) -> Tensor:
        value = self.source.tensor(name).to(self.device).float()
        self._tick(value.numel())
        return value

    def norm(self, module: str) -> Tensor:
        """The weight of a norm as `rms_norm` takes it."""
        return self.vector(f"{module}.weight") + float(self.config.norm_shift)

    def biases(self, names: Seq[str], present: bool) -> Tensor | None:
        return torch.cat([self.vector(f"{n}.bias") for n in names]) if present else None

    def attention(self, at: str, first_norm: bool = True) -> dict[str, Any]:
        """The fields of LayerWeights that are its attention's and its norms; `first_norm` false: the first is empty."""
        c, output = self.config, self._module(at, "self_attn.o_proj")
        qkv = self._there(self._module(at, f"self_attn.{n}_proj") for n in ("q", "k", "v", "qkv"))
        turns = c.rope.rotary_dim
        order = rotary_order(c.head_dim, turns).to(self.device) if turns else slice(None)  # of heads in `columns`
        norms = [self._module(at, f"self_attn.{n}_norm") for n in "qk"]
        q_norm, k_norm = (self.norm(n)[order] if self._there([n]) else None for n in norms)
        first, sinks = self._module(at, "input_layernorm"), f"{at}.self_attn.sinks"
        return {
            "input_norm": self.norm(first) if first_norm else torch.empty(0, device=self.device),
            "qkv": self.stack(qkv),
            "qkv_bias": self.biases(qkv, c.qkv_bias),
            "q_norm": q_norm,
            "k_norm": k_norm,
            "columns": rotary_columns(c).to(self.device) if turns or c.gated else None,
            "sinks": self.vector(sinks) if sinks in self.shapes else None,
            "o": self.matrix(output),
            "o_bias": self.biases([output], c.o_bias),
            "post_norm": self.norm(self._module(at, "post_attention_layernorm")),
        }

    def layer(self, at: str, first_norm: bool = True) -> LayerWeights:
        """The decoder layer whose module names begin with `at`; `first_norm` false: its input norm is left empty."""
        return LayerWeights(**self.attention(at, first_norm), **self.mlp(at))

    def mlp(self, at: str, module: str = "mlp") -> dict[str, Any]:
        """The fields of LayerWeights that are its MLP's."""
        bias, down = self.config.mlp_bias, self._module(at, f"{module}.down_proj")
        gate_up = self._there(self._module(at, f"{module}.{n}_proj") for n in ("gate", "up", "gate_up"))
        return {
            "gate_up": self.stack(gate_up),
            "gate_up_bias": self.biases(gate_up, bias),
            "down": self.matrix(down),
            "down_bias": self.biases([down], bias),
        }

    def _module(self, layer: str, name: str) -> str:
        """The family's name of a layer's module that Llama calls `name`."""
        return f"{layer}.{self.modules.get(name, name)}"

    def _there(self, modules: Iterable[str]) -> list[str]:
        """Those of some modules that the model has."""
        return [module for module in modules if f"{module}.weight" in self.shapes]

    def matrix(self, module: str, spread: Spread = map) -> QuantTensor:
        return self._alike([module], self._scheme(module), spread)[0]

    def stack(self, modules: Seq[str]) -> QuantTensor | tuple[QuantTensor, ...]:
        """Weights of some modules joined along O; one weight per run of modules with equal scheme and column order."""
        runs = [(key, list(run)) for key, run in groupby(modules, self._scheme)]
        parts = tuple(w for key, run in runs for w in self._alike(run, key))
        return parts[0] if len(parts) == 1 else parts

    def _scheme(self, module: str) -> tuple[QuantScheme, bool]:
        """The scheme that a module's weight gets, and whether the source already stores it in that scheme."""
        chosen = resolve_scheme(self.config, self.source, self.quant, module)
        own = self.source.scheme(f"{module}.weight")
        if chosen.variant == "auto":
            name = f"{module}.weight"
            chosen = chosen.settled(self.source.rows(name, 0, self.shapes[name][0]))
        if own is None:
            return chosen, False
        as_stored = replace(chosen, activations=None) == replace(own, activations=None)
        if as_stored and chosen.weights == "mxfp4" and not self.has_kernel(chosen):
            chosen = replace(chosen, activations=None)
        if as_stored and chosen.weights in KQUANTS | BLOCKS and not self.has_kernel(chosen):
            if module.endswith(ROUTERS):
                return QuantScheme("fp32"), False
            to = round_scheme(self.shapes[f"{module}.weight"][1])
            say_once(f"no kernel here has weights in {chosen}; they are rounded to {to} (--format fp32: not at all)")
            return to, False
        if not as_stored:
            how = "become floats, larger and slower: " if chosen.weights in scheme.DENSE.values() else "are rounded to "
            say_once(f"stored codes {how}{chosen}; format auto keeps a target's, a draft's change where that pays")
        return chosen, as_stored

    def _alike(self, modules: Seq[str], how: tuple[QuantScheme, bool], spread: Spread = map) -> list[QuantTensor]:
        """Weights of modules with one scheme, joined and packed: one weight per run of equal column order."""
        chosen, as_stored = how
        names = [f"{m}.weight" for m in modules]
        together = chosen.rows_together != 1 if not as_stored else not all(map(self.source.in_parts, names))
        if not together and (self.device == "cpu" or not as_stored):
            return [self._in_chunks(names, chosen, as_stored, spread)]
        weights = []
        for name in names:
            if as_stored:
                found = self.source.stored(name)
                parts = {n: part.to(self.device) for n, part in found.parts.items()}
                order = None if found.order is None else found.order.to(self.device)
                weights.append(replace(found, parts=parts, order=order))
            else:  # rows share scales, so the matrix cannot be encoded in chunks
                rows = self.source.rows(name, 0, self.shapes[name][0])
                weights.append(chosen.encode(rows.to(self.device)))
        packed = []
        for _, run in groupby(weights, lambda w: None if w.order is None else w.order.tolist()):
            same = list(run)
            whole = same[0] if len(same) == 1 else scheme.get(chosen.weights).concat(same)
            self._tick(whole.shape[0] * whole.shape[1])
            packed.append(self.pack(replace(whole, activations=chosen.activations)))
        return packed

    def _in_chunks(self, names: Seq[str], chosen: QuantScheme, as_stored: bool, spread: Spread) -> QuantTensor:
        """Matrices joined along O, encoded or as stored, some rows at a time."""
        height, width = sum(self.shapes[n][0] for n in names), self.shapes[names[0]][1]
        where = [self.source.file_rows(n) for n in names] if as_stored and chosen.activations == "int8" else [None]
        if None not in where and (found := self.read(where, chosen.weights, self._arena.take)) is not None:
            self._tick(height * width)
            return found
        dtypes = {self.source.dtype(n) for n in names}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        values = CHUNK * (WIDER if torch.device(self.device).type == "cuda" else 1)
        step = max(BLOCK_OUTPUTS, values // width // BLOCK_OUTPUTS * BLOCK_OUTPUTS)

        def piece(start: int) -> QuantTensor:
            spans = list(self._spans(names, start, min(start + step, height)))
            if as_stored:
                codes = [self.source.stored(*span) for span in spans]
                whole = codes[0] if len(codes) == 1 else scheme.get(chosen.weights).concat(codes)
                found = self.pack(replace(whole, activations=chosen.activations))
            else:
                rows = [self.source.rows(*span).to(self.device, dtype) for span in spans]
                found = self.encode(rows[0] if len(rows) == 1 else torch.cat(rows), chosen)
            self._tick(found.shape[0] * width)
            return found

        first = piece(0)
        if height <= step and (first.layout == "plain" or torch.device(self.device).type != "cpu"):
            return first
        parts = {}  # allocated by the sizes of the first chunk, which is a full one unless it is the only one
        for part, tensor in first.parts.items():  # a part's first dimension is proportional to O
            unit = step // tensor.shape[0]  # weight rows per entry of the part: 1, or the rows of a tile
            entries = len(tensor) if height <= step else -(-height // unit)
            parts[part] = self._arena.take((entries, *tensor.shape[1:]), tensor.dtype, tensor.device)

        def place(start: int) -> None:
            for part, tensor in (piece(start) if start else first).parts.items():
                begin = start // (step // first.parts[part].shape[0])
                parts[part][begin : begin + len(tensor)] = tensor

        for _ in spread(place, range(0, height, step)):
            pass
        return replace(first, shape=(height, width), parts=parts)

    def _spans(self, names: Seq[str], start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """The rows start..stop-1 of joined matrices: name, first row, end."""
        first = 0
        for name in names:
            height = self.shapes[name][0]
            begin, end = max(start - first, 0), min(stop - first, height)
            if begin < end:
                yield name, begin, end
            first += height
