"""Models with real shapes and random weights, without any file: for measuring speed, where the text does not matter."""

from __future__ import annotations

import zlib
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from sameseed.models.config import ModelConfig, family
from sameseed.models.decoder import Decoder
from sameseed.models.weights import Progress, Shapes, TensorSource, expected_shapes, read_weights
from sameseed.ops import Ops
from sameseed.scheme import QuantScheme

NOISE = 4_194_301  # size of the one noise block that all weights are cut from; prime, so that rows rarely repeat
FEW = NOISE // 16  # fewer values are cut from the noise first and scaled then


@lru_cache(maxsize=2)  # a toy takes two; drawing one takes longer than all else of a toy
def _drawn(seed: int) -> Tensor:
    return torch.randn(NOISE, generator=torch.Generator().manual_seed(seed), device="cpu")


class RandomCheckpoint(TensorSource):
    """A `TensorSource` of random weights: matrices are normal noise of variance 1/K, norms are ones, biases zeros."""

    def __init__(
        self,
        config: ModelConfig,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        shapes: Shapes | None = None,
        device: str = "cpu",
    ) -> None:
        """`shapes`: of all tensors, if they are not those of a whole model (but of a draft head).

        `device`: where matrices are made; their bits are the same on all devices.
        """
        self._shapes = expected_shapes(config) if shapes is None else shapes
        self._seed = seed
        self._dtype = dtype
        self._device = device
        self._scaled: dict[int, Tensor] = {}  # by K

    @cached_property
    def _noise(self) -> Tensor:
        return _drawn(self._seed).to(self._device)

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 2:
            return self.rows(name, 0, shape[0])
        return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=self._dtype)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        width = self._shapes[name][1]
        at = (zlib.crc32(f"{name}:{self._seed}".encode()) + start * width) % NOISE
        out = torch.empty((stop - start) * width, dtype=self._dtype, device=self._device)
        done = 0
        while done < len(out):
            count = min(len(out) - done, NOISE - at)
            out[done : done + count] = self._cut(width, at, count)
            done, at = done + count, (at + count) % NOISE
        return out.view(stop - start, width)

    def _cut(self, width: int, at: int, count: int) -> Tensor:
        """Values of the noise, scaled for rows of `width`."""
        scale: float = width**-0.5
        if count < FEW:
            return (self._noise[at : at + count] * scale).to(self._dtype)
        scaled = self._scaled.get(width)
        if scaled is None:
            scaled = self._scaled[width] = (self._noise * scale).to(self._dtype)
        return scaled[at : at + count]


def random_model(
    config: ModelConfig,
    ops: Ops,
    quant: QuantScheme | None = None,
    max_model_len: int | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Decoder:
    """A model of that shape with random weights, stored by `quant` (default: bf16) as a loaded one would be."""
    source = RandomCheckpoint(config, seed)
    weights = read_weights(config, source, quant or QuantScheme(), ops, device, progress)
    return family(config.architecture)(config, weights, ops, max_model_len)
