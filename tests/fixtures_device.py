"""A pretended device: tensors that keep their numbers in CPU memory but behave as if they were on another device.

Combining such a tensor with a CPU tensor, asking for its address, or reading it with NumPy fails as on a GPU. So code
can run whole, with real numbers, to find tensors that it forgets to move.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")  # the only device type that PyTorch accepts without a driver
_COPIES = ("aten::_to_copy", "aten::copy_")
_LEAVES = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")  # these return Python numbers


class Elsewhere(torch.Tensor):
    """A tensor of the pretended device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        shape, strides, offset = inner.shape, inner.stride(), inner.storage_offset()
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written to through a wrapper
            made = torch.Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, storage_offset=offset, dtype=inner.dtype, device=DEVICE
            )
        made.inner = inner
        return made

    def data_ptr(self):
        raise RuntimeError("the address of a tensor on the device was asked for by code of the CPU")

    def tolist(self):
        return self.cpu().tolist()

    def __getitem__(self, index):
        return super().__getitem__(_placed(index))

    def __setitem__(self, index, value):
        super().__setitem__(_placed(index), value)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


waits = None  # how often (kind of wait, function) waited; see `counted_waits`


def _call(func, args, kwargs):
    tensors = [t for t in _flat((args, kwargs)) if isinstance(t, torch.Tensor)]
    here = [t for t in tensors if isinstance(t, Elsewhere)]
    name = func._schema.name
    asked = kwargs.get("device")
    goes = torch.device(asked).type == DEVICE.type if asked is not None else bool(here)
    if waits is not None and (kind := _wait_of(name, tensors, here, goes, args)):
        waits[kind, _asker()] += 1
    if here and name not in _COPIES:
        strangers = [t for t in tensors if not isinstance(t, Elsewhere) and t.dim() > 0]
        if strangers:
            shapes = [(str(t.device), tuple(t.shape), t.dtype) for t in tensors]
            raise RuntimeError(f"{name} of tensors on two devices: {shapes}")
    if name == "aten::copy_":
        goes = isinstance(args[0], Elsewhere)
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = func(*_mapped(_inner, args), **_mapped(_inner, kwargs))
    if func._schema.is_mutable and name.endswith("_") and args and isinstance(args[0], Elsewhere):
        return args[0]
    return _mapped(lambda r: Elsewhere(r) if isinstance(r, torch.Tensor) else r, result) if goes else result


def _wait_of(name, tensors, here, goes, args):
    """The kind of wait, if a CUDA device would make the host wait in this call; else None."""
    if name in _LEAVES and here:
        return "number"
    if name == "aten::copy_":
        there = [isinstance(t, Elsewhere) for t in args[:2]]
        return None if all(there) or not any(there) else "copy to the device" if there[0] else "copy to the host"
    if name in _COPIES:
        return "copy to the host" if here and not goes else "copy to the device" if not here and goes else None
    by_mask = name.startswith("aten::index") and any(t.dtype == torch.bool for t in here[1:])
    return "size" if by_mask or (here and name in ("aten::nonzero", "aten::masked_select")) else None


def _asker():
    """The innermost function of the package on the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("sameseed.") and not frame.f_code.co_name.startswith("<"):
            return f"{name.removeprefix('sameseed.')}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def counted_waits():
    """Count how often code in this context makes the host wait for the device, by kind of wait and by function.

    A copy to the device counts, because PyTorch waits for it if the memory is not pinned.
    """
    global waits
    waits = Counter()
    try:
        yield waits
    finally:
        waits = None


def _placed(index):
    """The index with its lists of numbers moved to the device; PyTorch would create them there without numbers."""
    if isinstance(index, tuple):
        return tuple(_placed(i) for i in index)
    return torch.tensor(index, dtype=None if index else torch.int64, device=DEVICE) if type(index) is list else index


def _inner(x):
    return x.inner if isinstance(x, Elsewhere) else x


def _mapped(change, x):
    """`tree_map` without its registry of types, which takes longer than most operations."""
    kind = type(x)
    if kind is list or kind is tuple:
        return kind([_mapped(change, y) for y in x])
    if kind is dict:
        return {name: _mapped(change, y) for name, y in x.items()}
    return tree_map(change, x) if isinstance(x, list | tuple | dict) else change(x)


def _flat(x):
    found = []
    for y in x.values() if isinstance(x, dict) else x:
        found += _flat(y) if isinstance(y, list | tuple | dict) else [y]
    return found


class _Pretend(TorchDispatchMode):
    """Runs every call through `_call`, so that tensors created on the device or moved to it are `Elsewhere`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


@contextmanager
def pretended_device():
    """In this context, tensors on the device of the yielded name hold numbers."""
    real = torch.tensor
    with torch.device("cpu"):  # PyTorch caches its constructors at the first use, which must be the real ones
        torch.empty(0)

    def tensor(data, *, device=None, **more):
        """PyTorch's own function would bypass the mode. Without `device`, the tensor is made on the default device."""
        made = real(data, device="cpu", **more)
        return made.to(torch.empty(0).device if device is None else device)

    torch.tensor = tensor
    try:
        with _Pretend():
            yield str(DEVICE)
    finally:
        torch.tensor = real


def interpreted_there(monkeypatch):
    """Let Triton's interpreter compute on the pretended device: kernels get the CPU tensors, their callers do not."""
    from sameseed.ops.triton import guard

    run = guard.Launch.run

    def launch(self):
        run(replace(self, arguments={name: _inner(x) for name, x in self.arguments.items()}))

    monkeypatch.setattr(guard.Launch, "run", launch)
    monkeypatch.setattr(Elsewhere, "data_ptr", lambda self: self.inner.data_ptr())
