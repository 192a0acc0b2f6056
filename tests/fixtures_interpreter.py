"""Triton's interpreter, which runs kernels on the CPU: sums in a fixed order, in less time."""

from dataclasses import replace
from typing import Any

import numpy as np


def order_dots():
    """Make the interpreter's `tl.dot` add in a fixed order.

    By default it calls `np.matmul`, whose order of sums depends on BLAS, processor, shape and memory layout. So the
    bits of a row would depend on other rows.
    """
    from triton.runtime import interpreter

    theirs = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, acc, *how):
        if a.data.dtype.kind != "f":  # integers are exact in any order
            return theirs(self, a, b, acc, *how)
        return interpreter.TensorHandle(acc.data + dot(a.data, b.data), acc.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def hasten():
    """Speed up the interpreter: most of its time goes into types, shapes and checks, not into numbers.

    - It patches Triton's language for each call of a function. Here this is done once per module, and stays.
    - For each sum and product of integers it computes whether it overflows, for an assertion that only debugging makes.
    - It makes and compares the types and shapes of all values. Here equal shapes are one object.

    Does nothing before Triton 3.7, whose interpreter has other parts.
    """
    from triton.language import core
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    options, semantic = interpreter.interpreter_builder.options, interpreter.TritonSemantic
    patch, nothing, patched = interpreter._patch_lang, interpreter._LangPatchScope(), set[int]()
    np_dtype, np_dtypes = interpreter._get_np_dtype, dict[str, Any]()
    block, shapes = core.block_type.__init__, dict[tuple[int, ...], Any]()
    tensor, of_tensors = core.tensor.__init__, dict[int, Any]()
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def patch_once(fn):
        names = id(fn.__globals__)
        if names not in patched:
            patched.add(names)
            patch(fn)
        return nothing

    def patch_attr(obj, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    def known_np_dtype(kind):  # some kinds are not hashable, but all have a name
        found = np_dtypes.get(kind.name)
        if found is None:
            found = np_dtypes[kind.name] = np_dtype(kind)
        return found

    def init_block(self, element_ty, shape):
        sizes = tuple(shape.values if type(shape) is core.tuple else map(core._unwrap_if_constexpr, shape))
        found = shapes.get(sizes)
        if found is None:
            block(self, element_ty, shape)
            found = shapes[sizes] = self.shape, self.numel
        self.element_ty, self.name = element_ty, f"<{sizes}, {element_ty.name}>"
        self.shape, self.numel = found

    def init_tensor(self, handle, kind):
        key = id(kind.shape) if kind.is_block() else 0
        found = of_tensors.get(key)
        if found is None:
            tensor(self, handle, kind)
            of_tensors[key] = self.shape, self.numel, kind  # kind keeps its shape, whose identity is the key
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel, _ = found

    def same_shape(a, b):
        return a.shape is b.shape if a.is_block() and b.is_block() else not (a.is_block() or b.is_block())

    def same(a, b):
        numbers = isinstance(a, core.tensor) and isinstance(b, core.tensor) and a.dtype is b.dtype
        return numbers and not a.dtype.is_ptr() and same_shape(a.type, b.type)

    def converted(self, a, b, *how, **more):
        divides = len(how) > 3 or more  # converts halves
        return (a, b) if not divides and same(a, b) else check(self, a, b, *how, **more)

    def broadcasted(self, a, b):
        return (a, b) if same_shape(a.type, b.type) else broadcast(self, a, b)

    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attr
    interpreter._get_np_dtype = known_np_dtype
    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = converted, broadcasted


def dot(a, b):
    """a [M, K] times b [K, N] in float32; K is a power of two.

    Adds the two halves of K until one sum is left. Each step is element-wise, which IEEE 754 defines exactly. So the
    bits of an output depend only on its row of a and its column of b.
    """
    sums = a.astype(np.float32)[:, :, None] * b.astype(np.float32)[None]  # [M, K, N]
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]
