"""Registry of backends, and the table of ops that a model calls.

Letters: T rows of a pass, B sequences, N draft nodes, R rows whose logits are wanted, C hidden size, H heads, Hk KV
heads, D head dimension, V vocabulary, O x K weight, G group, P positions.

A backend is a module that defines any subset of the ops in `reference.py`, which is their specification. Missing ops
fall back to the reference. A backend declares `row_invariant`, `LINEAR_FORMATS`, `KV_FORMATS` and `unavailable()`, and
`DEVICES` if it runs only on some kinds of device. The following attributes are optional:

- `pack`, `unpack`, `serves`: for kernels that need weights in their own layout; `encode` quantizes and packs at once;
- `replayer`: records a forward pass and replays it;
- `choose`: chooses tokens on the device of their logits;
- `move_stacked`: moves cache rows of all layers at once;
- `looks_ahead`: if true, `product` is told what its result is used for next (`Then`).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence as Seq
from functools import cache, partial
from types import ModuleType

import torch
from torch import Tensor

from sameseed import devices, registry
from sameseed.batch import Batch, Draws
from sameseed.errors import ConfigError, say_once
from sameseed.ops import reference
from sameseed.ops._rows import (
    BLOCK_OUTPUTS as BLOCK_OUTPUTS,
    DeltaWeights as DeltaWeights,
    ExpertWeights as ExpertWeights,
    RowSource as RowSource,
    StateLayer as StateLayer,
    Then as Then,
    gated_rows as gated_rows,
    normed_rows as normed_rows,
    parted as parted,
    plain_rows as plain_rows,
)
from sameseed.scheme import KVLayer, QuantScheme, QuantTensor

SUMS = 2e-6  # rounding error of float32 sums in another order, relative to the magnitude of what is summed
Results = tuple[Tensor, Tensor | None, Tensor | None]  # of a pass: logits, hidden states, chosen tokens
Forward = Callable[..., Results]  # (ops, batch, cache, captures, ...)
Replayed = Callable[..., Results]  # (batch, cache, captures, ...)
Ends = Callable[[Seq[Seq[float]]], bool]  # whether all chains end now, from the path probabilities of unfinished chains
Grown = list[tuple[list[int], list[int], list[float]]]  # for each tree: tokens, parents, path probabilities


def by_part(w: Seq[QuantTensor], bias: Tensor | None) -> list[tuple[QuantTensor, Tensor | None]]:
    """Pair each of several weights, stacked along O, with its part of the bias."""
    outputs = [p.shape[0] for p in w]
    return list(zip(w, [None] * len(w) if bias is None else torch.split(bias, outputs)))


class Ops:
    """The ops of one backend, with the reference as fallback. Signatures and shapes are those of `ops/reference.py`.

    `rope_store` is a composition of other ops. A backend may provide it as one call with the same bits.
    """

    def __init__(self, backend: ModuleType) -> None:
        self.backend = backend
        self.name = backend.__name__.rsplit(".", 1)[-1]
        self.row_invariant: bool = backend.row_invariant and reference.row_invariant
        self.rms_norm: Callable[[Tensor, Tensor, float], Tensor] = self._pick("rms_norm")
        self.rope: Callable[[Tensor, Tensor, Tensor], Tensor] = self._pick("rope")
        self.silu_mul: Callable[..., Tensor] = self._pick("silu_mul")
        self.gelu_mul: Callable[[Tensor], Tensor] = self._pick("gelu_mul")
        # cap * tanh(x / cap), of the logits of a pass
        self.softcap: Callable[[Tensor, float], Tensor] = getattr(backend, "softcap", reference.softcap)
        # For gated attention, Gated DeltaNet and short convolutions
        self.take: Callable[[Tensor, Tensor], Tensor] = getattr(backend, "take", reference.take)
        self.gate: Callable[[Tensor, Tensor, int], Tensor] = getattr(backend, "gate", reference.gate)
        self.delta: Callable[..., Tensor] = getattr(backend, "delta", reference.delta)
        self.conv: Callable[..., Tensor] = getattr(backend, "conv", reference.conv)
        self._serves: Callable[[QuantTensor], bool] = getattr(
            backend, "serves", lambda w: w.format in backend.LINEAR_FORMATS
        )
        # `w` in the layout of the backend's kernels; `w` itself if they read it unchanged, or not at all.
        self.pack: Callable[[QuantTensor], QuantTensor] = getattr(backend, "pack", lambda w: w)
        # Weights read from a file straight into that layout, in memory from a function; None: not supported.
        self.read: Callable[..., QuantTensor | None] = getattr(backend, "read", lambda *_: None)
        self._encode: Callable[[Tensor, QuantScheme], QuantTensor | None] = getattr(backend, "encode", lambda *_: None)
        self._product_rounding: Callable[[QuantTensor], float] = getattr(backend, "product_rounding", lambda w: 0.0)
        self._attention_rounding: Callable[[str], float] = getattr(backend, "attention_rounding", lambda name: 0.0)
        self._product: Callable[..., Tensor] | None = getattr(backend, "product", None)
        self._looks_ahead: bool = getattr(backend, "looks_ahead", False)
        self._embedding: Callable[..., Tensor] = getattr(backend, "embedding", reference.embedding)
        self._rope_store: Callable[..., Tensor] | None = getattr(backend, "rope_store", None)
        self._experts: Callable[..., Tensor | None] = getattr(backend, "experts", lambda *_, **__: None)
        self._choose: Callable[[Tensor, Draws, Tensor | None], Tensor | None] | None = getattr(backend, "choose", None)

    def _pick(self, op: str) -> Callable[..., Tensor]:
        chosen = getattr(self.backend, op, None)
        if chosen is None:
            say_once(f"backend {self.name!r} has no {op}; using the reference (slow; see `sameseed info`)")
            chosen = getattr(reference, op)
        picked: Callable[..., Tensor] = chosen
        return picked

    def replayer(self, forward: Forward) -> Replayed:
        """`forward(ops, batch, cache, captures)` in this backend's fastest way: op by op, or recorded and replayed.

        The result may have two methods. `chain(batch, steps, cache, captures, ...)` runs the passes of `Steps` at once.
        `grow(trees, ...)` grows draft trees with one pass per level (`PlanReplay.grow`).
        """
        replay: Callable[[Forward, Ops], Replayed] | None = getattr(self.backend, "replayer", None)
        return partial(forward, self) if replay is None else replay(forward, self)

    @property
    def chooses(self) -> bool:
        """Whether the backend chooses tokens (`choose`). If not, `spec/sampling.py` does, from whole rows of logits."""
        return self._choose is not None

    def choose(self, logits: Tensor, draws: Draws, token_ids: Tensor | None = None) -> Tensor | None:
        """The token chosen from each row of logits float32 [R, V], as int32 [R]; -1 if the largest logit is not finite.

        Each row is chosen independently, as defined in `spec/sampling.py`; only ties in the last bits may differ.
        `token_ids` int64 [V]: the tokens that the columns stand for. With `draws.sure` the result is int32 [2, R]; its
        second row has the bits of float32 confidences. Returns None if the backend cannot choose.
        """
        return None if self._choose is None else self._choose(logits, draws, token_ids)

    def capture(self, hidden: Seq[Tensor]) -> Tensor:
        """Concatenate hidden states [T, C] of several layers: [T, len(hidden) * C]."""
        return self.beside(hidden)

    def beside(self, parts: Seq[Tensor]) -> Tensor:
        """Concatenate several x [T, K] along their columns."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)

    # --- weights ---

    def has_kernel(self, quant: QuantScheme) -> bool:
        """Whether some kernel supports weights of this format with its activations. Group sizes are not checked."""
        known: Callable[[str, str | None], bool] | None = getattr(self.backend, "has_kernel", None)
        return (
            quant.weights in self.backend.LINEAR_FORMATS if known is None else known(quant.weights, quant.activations)
        )

    def encode(self, weight: Tensor, quant: QuantScheme) -> QuantTensor:
        """Quantize a dense weight [O, K] by `quant` and pack it. A backend may do both at once with the same bits."""
        done = self._encode(weight, quant)
        return self.pack(quant.encode(weight)) if done is None else done

    def unpack(self, w: QuantTensor) -> QuantTensor:
        """The inverse of pack: returns the format's own layout."""
        if w.layout == "plain":
            return w
        unpacked: QuantTensor = self.backend.unpack(w)
        return unpacked

    def rounding(self, w: QuantTensor) -> float:
        """Law 4: how much a product with `w` may differ from the reference's, relative to the sum of |x w|.

        This is the rounding of the input rows (`product_rounding(w)` of a backend) plus that of float32 sums in another
        order.
        """
        sums = 2 * SUMS * max(1.0, math.sqrt(w.shape[1] / 1024))  # errors of long sums grow like a random walk
        return sums + (self._product_rounding(w) if self._serves(w) else 0.0)

    def kv_rounding(self, name: str) -> float:
        """Law 4: how much attention over a cache in format `name` may differ from the reference's.

        Relative to the largest value. This is `attention_rounding(name)` of a backend plus the rounding of float32 sums
        in another order.
        """
        return 2 * SUMS + (self._attention_rounding(name) if name in self.backend.KV_FORMATS else 0.0)

    def embedding(self, token_ids: Tensor, w: QuantTensor, scale: float = 1.0) -> Tensor:
        """Rows token_ids [T] of an embedding [V, C], times `scale`, as float32 [T, C]."""
        serves = self._serves(w)
        rows = self._embedding(token_ids, w) if serves else reference.embedding(token_ids, self.unpack(w))
        return rows if scale == 1.0 else rows * scale

    def norm_add(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor, factor: float = 1.0) -> Tensor:
        """(residual + rms_norm(x)) * factor, of x [T, C] and residual [T, C]."""
        return (residual + self.rms_norm(x, weight, eps)) * factor

    def product(
        self,
        rows: RowSource,
        w: QuantTensor | tuple[QuantTensor, ...],
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        then: Then | None = None,
    ) -> Tensor:
        """Rows [T, K] times w [O, K] transposed, plus bias [O], plus residual [T, O]; returns [T, O].

        Normed or gated rows give the same bits as `rms_norm` or `silu_mul` followed by a product. With several w, their
        products are concatenated, and there can be no residual. then: what the result is used for next.
        """
        if isinstance(w, tuple):
            assert residual is None
            return self.beside([self.product(rows, p, b) for p, b in by_part(w, bias)])
        if w.order is not None:  # backends expect columns of rows in the order of the codes
            rows = plain_rows(rows.prepared(self.rms_norm, self.silu_mul, self.gelu_mul).index_select(1, w.order))
        if self._product is not None and self._serves(w):
            of = None if then is None else then.w
            if self._looks_ahead and isinstance(of, QuantTensor) and of.order is None and self._serves(of):
                return self._product(rows, w, bias, residual, then)
            return self._product(rows, w, bias, residual)
        say_once(
            f"no {self.name!r} kernel for weights in {w.format!r} (group {w.group}); using the reference "
            "(slow; see `sameseed info`)"
        )
        x = rows.prepared(self.rms_norm, self.silu_mul, self.gelu_mul)
        return reference.product(plain_rows(x), self.unpack(w), bias, residual)

    def experts(
        self, rows: RowSource, w: ExpertWeights, residual: Tensor | None = None, logits: Tensor | None = None
    ) -> Tensor:
        """A mixture of experts of rows [T, C], plus residual [T, C]; returns [T, C]. `logits`: see the reference."""
        done = None if self.backend is reference else self._experts(rows, w, residual, logits=logits)
        return reference.experts(rows, w, residual, self.product, self.rms_norm, logits) if done is None else done

    # --- cache ---

    def _kv(self, op: str, layer: KVLayer) -> Callable[..., Tensor]:
        if layer.format in self.backend.KV_FORMATS:
            return self._pick(op)
        say_once(f"no {self.name!r} kernel for a KV cache in {layer.format!r}; using the reference (slow)")
        picked: Callable[..., Tensor] = getattr(reference, op)
        return picked

    def rope_store(
        self,
        qkv: Tensor,
        heads: int,
        layer: KVLayer,
        batch: Batch,
        table: Tensor,
        norms: tuple[Tensor, ...] | None = None,
        eps: float = 0.0,
        stores: bool = True,
    ) -> Tensor:
        """Rotate q and k of qkv [T, (H + 2 Hk) D], store k and v in the cache, return q [T, H, D].

        With `norms` (weights [D] for q, for k and perhaps for v), these are normed per head first. `stores` false: the
        rows are q alone [T, H D], and the cache holds keys and values already.
        """
        if stores and self._rope_store is not None and layer.format in self.backend.KV_FORMATS:
            return self._rope_store(qkv, heads, layer, batch, table, norms, eps)
        q, k, v = reference.split_heads(qkv, heads, layer.k.shape[2] * stores, norms, eps, self.rms_norm)
        if not stores:
            return self.rope(q, batch.positions, table)
        self.store_kv(self.rope(k, batch.positions, table), v, layer, batch.slots)
        return self.rope(q, batch.positions, table)

    def store_kv(self, k: Tensor, v: Tensor, layer: KVLayer, slots: Tensor) -> None:
        self._kv("store_kv", layer)(k, v, layer, slots)

    def move_kv(self, layer: KVLayer, src: Tensor, dst: Tensor) -> None:
        self._kv("move_kv", layer)(layer, src, dst)

    def move_all(self, stacks: Seq[tuple[KVLayer, Seq[KVLayer]]], src: Tensor, dst: Tensor) -> None:
        """`move_kv` in every layer of a cache (`KVCache.stacks`). A backend may move a stack's layers in one call."""
        at_once: Callable[[KVLayer, Tensor, Tensor], bool] | None = getattr(self.backend, "move_stacked", None)
        for stacked, layers in stacks:
            known = stacked.format in self.backend.KV_FORMATS
            if at_once is None or not known or not at_once(stacked, src, dst):
                for layer in layers:
                    self.move_kv(layer, src, dst)

    def attention(
        self,
        q: Tensor,
        layer: KVLayer,
        batch: Batch,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._kv("attention", layer)(q, layer, batch, scale, window, sinks)


_FASTEST = {"cpu": "cpu", "cuda": "triton"}  # by kind of device: the backend that `auto` tries before the reference


@cache
def resolve(name: str = "auto", device: str = "cpu") -> Ops:
    """The ops of a backend by name; `auto`: the fastest one for the device. Raises ConfigError or RegistryError."""
    asked = None if name == "auto" else registry.load("ops", name)
    devices.check(device)
    kind = device.partition(":")[0]
    module = registry.load("ops", _FASTEST[kind]) if asked is None else asked
    runs_on: frozenset[str] = getattr(module, "DEVICES", frozenset(_FASTEST))
    # A backend that runs only on GPUs is asked about this device, because GPUs may differ.
    reason = module.unavailable(device) if runs_on == {kind} == {"cuda"} else module.unavailable()
    if asked is None:
        if reason is not None:
            say_once(f"the {_FASTEST[kind]} backend cannot run ({reason}); using the reference, which is slow")
        return Ops(module if reason is None else reference)
    if reason is not None:
        raise ConfigError(f"backend {name!r} cannot run here: {reason}")
    if kind not in runs_on:
        raise ConfigError(
            f"backend {name!r} does not compute on device {device!r} but on {' or '.join(sorted(runs_on))}; "
            "leave out --backend, or change --device"
        )
    return Ops(module)


def set_num_threads(threads: int) -> None:
    """Set the number of threads of PyTorch and of the native kernels, which refuse what would crash PyTorch.

    Raises ConfigError for a number below 1 or above 1024.
    """
    _ask_native("set_num_threads", threads)
    torch.set_num_threads(threads)


def num_threads() -> int:
    """Number of threads that a call may use: of the native kernels if they run here, else of PyTorch."""
    module = _native()
    return torch.get_num_threads() if module is None else int(module.num_threads())


def available_cores() -> int:
    """Number of physical cores that this process may use, as far as known."""
    module = _native()
    return (os.cpu_count() or 1) if module is None else int(module.available_cores())


def limit_threads(threads: int) -> None:
    """Limit the native kernels' threads for calls from this thread, which gets its own workers; 0: no limit.

    Raises ConfigError for a negative limit.
    """
    _ask_native("limit_threads", threads)


def _ask_native(setting: str, threads: int) -> None:
    if (module := _native()) is not None:
        try:
            getattr(module, setting)(threads)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def num_launches() -> int:
    """Kernel launches of this process so far: parallel sections of native kernels, and Triton's kernels."""
    guard, module = sys.modules.get("sameseed.ops.triton.guard"), _native()
    return (0 if guard is None else int(guard.num_launches)) + (0 if module is None else int(module.num_launches()))


def _native() -> ModuleType | None:
    module = registry.load("ops", "cpu")
    return module if module.unavailable() is None else None
