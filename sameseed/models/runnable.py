"""Runnable: base of decoders and draft heads, whose passes the backend runs op by op, or records and replays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from sameseed.batch import Batch, Steps
from sameseed.kvcache.cache import KVCache
from sameseed.ops import Grown, Ops


class Runnable:
    """A model with the ops that run it; `how` is part of a pass that may differ: captured layers, or a head's window.

    `token_ids` int64 [n]: the tokens of the LM head's rows, if it does not have a row for every token. `grow(trees,
    num_rows, logits, features, cache, how, ends)` grows draft trees with one pass per level (`PlanReplay.grow`); it
    returns None where the backend cannot.
    """

    def __init__(self, ops: Ops, device: torch.device, token_ids: Tensor | None = None) -> None:
        self.ops = ops
        self.device = device
        self.token_ids = token_ids
        # A weak reference: a cycle would keep gigabytes of weights alive until the next garbage collection.
        forward = weakref.WeakMethod(self._forward)
        self._run = ops.replayer(lambda *args: cast(Any, forward())(*args))
        self.grow: Callable[..., Grown | None] = getattr(self._run, "grow", lambda *_: None)

    @torch.inference_mode()
    def chain(self, batch: Batch, steps: Steps, cache: KVCache, how: tuple[int, ...], *inputs: Tensor) -> Tensor | None:
        """Run all `steps` of a chain in one call and return its tokens (`Ops.replayer`); None if unsupported."""
        chain = getattr(self._run, "chain", None)
        return None if chain is None else cast("Tensor | None", chain(batch, steps, cache, how, *inputs))

    def _pass(
        self, batch: Batch, cache: KVCache, how: tuple[int, ...], *inputs: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """One pass, and the tokens drawn by `batch.draws`; None where the backend cannot draw."""
        logits, hidden, chosen = self._run(batch, cache, how, *inputs)
        if chosen is None and batch.draws is not None:  # the pass itself did not choose
            chosen = self.ops.choose(logits, batch.draws.on(self.device), self.token_ids)
        return logits, hidden, chosen

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """One pass over (ops, batch, cache, how, ...): logits [R, V], captured states, and tokens that were drawn.

        Everything that reads rows goes through `ops`: a backend may record the calls and replay them.
        """
        raise NotImplementedError
