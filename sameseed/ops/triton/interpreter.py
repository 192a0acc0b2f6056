"""Triton's interpreter, which runs kernels on the CPU. Importing this module does not need Triton."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def interpreted() -> bool:
    """Whether Triton's interpreter replaces a GPU, for tests (TRITON_INTERPRET=1 before the first import)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def order_dots() -> None:
    """Make the interpreter's `tl.dot` add in a fixed order.

    By default it calls `np.matmul`, whose order of sums depends on BLAS, processor, shape and memory layout. So the
    bits of a row would depend on other rows.
    """
    from triton.runtime import interpreter

    theirs = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *how: Any) -> Any:
        if a.data.dtype.kind != "f":  # integers are exact in any order
            return theirs(self, a, b, acc, *how)
        return interpreter.TensorHandle(acc.data + dot(a.data, b.data), acc.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_once() -> None:
    """Speed up the interpreter: patch Triton's language once per kernel, and cache its lookups of types.

    Without this, the interpreter patches the whole language at each function call and builds a table of types for each
    number. Does nothing before Triton 3.7, which has no scope that restores patches.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, scope, patched = interpreter._patch_lang, interpreter._LangPatchScope, set[int]()
    restore = scope.restore

    def patch_lang(fn: Any) -> Any:
        names = id(fn.__globals__)
        if names in patched:
            return scope()
        patched.add(names)
        return patch(fn)

    def restore_and_forget(self: Any) -> None:
        patched.clear()
        restore(self)

    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(kind: Any) -> Any:  # some kinds are not hashable, but all have a name
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = find(kind)
        return found

    interpreter._patch_lang, scope.restore = patch_lang, restore_and_forget
    interpreter._get_np_dtype = np_dtype


def dot(a: Any, b: Any) -> Any:
    """a [M, K] times b [K, N] in float32; K is a power of two.

    Adds the two halves of K until one sum is left. Each step is element-wise, which IEEE 754 defines exactly. So the
    bits of an output depend only on its row of a and its column of b.
    """
    sums = a.astype(np.float32)[:, :, None] * b.astype(np.float32)[None]  # [M, K, N]
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]
