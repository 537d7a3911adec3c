"""Support for Triton's interpreter, which runs kernels on the CPU if ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton

_INTERPRETED = bool(triton.knobs.runtime.interpret)


def interpreted() -> bool:
    """Return whether kernels run in the interpreter; fixed when this module is imported."""
    return _INTERPRETED


def patch_interpreter() -> None:
    """Patch the interpreter to accept loop bounds that are tensors, and to round to bfloat16.

    Triton 3.6 converts such a bound, an array of one element, with ``int(array)``, which numpy 2.4
    rejects, and it truncates float32 to bfloat16 where a GPU rounds to nearest. It also replaces
    the functions of ``triton.language`` again in each call of a function from a kernel, which takes
    a third of the time; here it does so once per launch.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    cast, patch_language = builder.cast_impl, interpreter._patch_lang

    def round_to_nearest(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            nearest = torch.as_tensor(source.data).to(torch.bfloat16).view(torch.uint16)
            return interpreter.TensorHandle(nearest.numpy(), tl.bfloat16)
        return cast(self, source, kind)

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_once(function: Any) -> Any:
        visible = [x for x in (tl, tl.core) if x in function.__globals__.values()]
        if any(tl.core.is_builtin(module.load) for module in visible):
            return patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    interpreter._patch_lang_tensor = patch_with_index
    builder.cast_impl = round_to_nearest


def speed_up_interpreter() -> None:
    """Patch the interpreter to spend less time on the types of tensors: most of its time.

    Triton 3.6 builds the name and the shape of a type for every value, and tests every integer sum
    for overflow, also where it drops the result (without ``debug``). Here names are built when they
    are read, shapes are kept, and only needed tests run.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    semantics = semantic.TritonSemantic
    broadcast, sanitize = semantics.broadcast_impl_value, semantics.binary_op_sanitize_overflow_impl
    numpy_dtype = interpreter._get_np_dtype
    scalar_numpy_dtype = cache(numpy_dtype)

    @cache
    def block_shape(*sizes: int) -> tuple[Any, int]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        return core.tuple(sizes), core.validate_block_shape(sizes)

    @cache
    def tensor_shape(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(x) for x in sizes]), core.constexpr(math.prod(sizes))

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = block_shape(*(core._unwrap_if_constexpr(x) for x in shape))

    def init_tuple_type(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensor_shape(*(type.shape if type.is_block() else ()))

    def tuple_name(self: Any) -> str:
        return f"[{','.join(f'{k}:{v}' for k, v in zip(self.fields, self.types, strict=True))}]"

    def broadcast_other_shapes(self: Any, lhs: Any, rhs: Any) -> Any:
        same = lhs.type.is_block() == rhs.type.is_block() and lhs.shape is rhs.shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    def check_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:  # else the original drops the result
            sanitize(self, lhs, rhs, operation)

    def numpy_dtype_of(kind: Any) -> Any:
        return scalar_numpy_dtype(kind) if type(kind) is core.dtype else numpy_dtype(kind)

    core.block_type.__init__, core.tuple_type.__init__ = init_block_type, init_tuple_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tuple_type.name = property(tuple_name)
    core.tensor.__init__ = init_tensor
    semantics.broadcast_impl_value = broadcast_other_shapes
    semantics.binary_op_sanitize_overflow_impl = check_overflow
    interpreter._get_np_dtype = numpy_dtype_of


if interpreted():
    patch_interpreter()
    speed_up_interpreter()
