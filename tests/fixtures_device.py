"""A pretended device: tensors whose numbers lie in the CPU's memory, and which behave as if they were elsewhere.

What meets a tensor of the CPU, asks for its address, or wants NumPy to read it, fails as it would on a GPU. So code can
be run whole, with real numbers, to find what it forgets to move.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")  # the one name of a device that PyTorch takes without its driver
_COPIES = ("aten::_to_copy", "aten::copy_")
_LEAVES = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")  # they give numbers of Python


class Elsewhere(torch.Tensor):
    """A tensor of the pretended device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        shape, strides, offset = inner.shape, inner.stride(), inner.storage_offset()
        with torch.inference_mode(False):  # tensors made under it cannot be written to from a wrapper
            made = torch.Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, storage_offset=offset, dtype=inner.dtype, device=DEVICE
            )
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        raise RuntimeError("the address of a tensor on the device was asked for by code of the CPU")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in _flat((args, kwargs)) if isinstance(t, torch.Tensor)]
    here = [t for t in tensors if isinstance(t, Elsewhere)]
    name = func._schema.name
    asked = kwargs.get("device")
    goes = torch.device(asked).type == DEVICE.type if asked is not None else bool(here)
    if here and name not in _COPIES:
        strangers = [t for t in tensors if not isinstance(t, Elsewhere) and t.dim() > 0]
        if strangers:
            shapes = [(str(t.device), tuple(t.shape), t.dtype) for t in tensors]
            raise RuntimeError(f"{name} of tensors on two devices: {shapes}")
    if name == "aten::copy_":
        goes = isinstance(args[0], Elsewhere)
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain_args, plain_kwargs = tree_map(_inner, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if func._schema.is_mutable and name.endswith("_") and args and isinstance(args[0], Elsewhere):
        return args[0]
    return tree_map(lambda r: Elsewhere(r) if isinstance(r, torch.Tensor) else r, result) if goes else result


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, Elsewhere) else x


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list | tuple):
        yield from itertools.chain.from_iterable(map(_flat, x))
    else:
        yield x


class _Pretend(TorchDispatchMode):
    """Takes what is made `on` the device, or moved to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


@contextmanager
def pretended_device() -> Iterator[str]:
    """Within it, the device of that name holds numbers."""
    real = torch.tensor

    def tensor(data: Any, *, device: Any = None, **more: Any) -> torch.Tensor:
        """PyTorch's own makes it on the device behind the mode's back."""
        return real(data, device="cpu", **more).to(device or torch.empty(0).device)

    torch.tensor = tensor
    try:
        with _Pretend():
            yield str(DEVICE)
    finally:
        torch.tensor = real
