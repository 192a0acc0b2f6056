"""A graph without a GPU: it records the launches and operations of a pass, and replays them on the same tensors.

No value survives between replays: memory that a pass allocates without a value (`torch.empty`) is filled with NaN, or
with a wrong number if it holds integers. Reading a number from a tensor while recording raises RuntimeError, since a
GPU refuses it too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sameseed.ops.triton import graphs, guard

READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select"}
WRONG = 77


class FakeGraph(TorchDispatchMode):
    """Records the operations that are called in its context."""

    def __init__(self):
        super().__init__()
        self.steps: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name
        if name in READS:
            raise RuntimeError(f"{name} while a graph is recorded")
        out = func(*args, **kwargs)
        if name.startswith(("aten::empty", "aten::new_empty")):
            self.steps.append(lambda: spoil(out))
        elif func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
        else:
            self.steps.append(lambda: again(out, func(*args, **kwargs)))
        return out

    def replay(self):
        with torch.inference_mode():
            for step in self.steps:
                step()


def spoil(x):
    x.fill_(torch.nan if x.is_floating_point() else WRONG)


def again(out, new):
    """Copy the `new` result of an operation into the recorded result `out`; a view already shares its memory."""
    for a, b in zip(out, new, strict=True) if isinstance(out, tuple | list) else [(out, new)]:
        if a.data_ptr() != b.data_ptr():
            a.copy_(b)


def fake_graphs(monkeypatch):
    """Let passes on the CPU be recorded and replayed; returns the list of recorded graphs, which grows."""
    made = []
    run = guard.Launch.run

    def launch(self):
        with _disable_current_modes():
            run(self)
        if recording:
            recording[-1].steps.append(lambda: run(self))

    recording = []

    def refuse(*args):
        raise RuntimeError("a tensor's numbers are read while a graph is recorded")

    def capture(job):
        graph = FakeGraph()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", refuse)
            patch.setattr(torch.Tensor, "item", refuse)
            recording.append(graph)
            try:
                with graph:
                    results = job()
            finally:
                recording.pop()
        made.append(graph)

        def replay():
            for x in results:
                if x is not None and x.numel():
                    spoil(x)
            graph.replay()

        return replay, results

    monkeypatch.setattr(guard.Launch, "run", launch)
    monkeypatch.setattr(graphs, "capture_for", lambda device: capture)
    return made
