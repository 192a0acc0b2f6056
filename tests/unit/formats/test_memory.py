"""Memory for weights: tensors of an arena are aligned, do not overlap, and outlive it."""

import torch

from sameseed.formats._memory import LINE, SHARED, Arena


def test_tensors_of_an_arena_are_apart() -> None:
    arena, cpu = Arena(), torch.device("cpu")
    shapes = [(3,), (5, 7), (SHARED // 8,), (SHARED // 8,), (SHARED // 5, 2), (1,)]  # one is too large to share
    taken = [arena.take(shape, torch.float32 if i % 2 else torch.uint8, cpu) for i, shape in enumerate(shapes)]
    del arena
    for i, x in enumerate(taken):
        x.fill_(i)
    assert [tuple(x.shape) for x in taken] == shapes
    assert all(bool((x == i).all()) for i, x in enumerate(taken))
    assert all(x.data_ptr() % LINE == 0 for x in taken)
