"""Support for Triton's interpreter, which runs kernels on the CPU if ``TRITON_INTERPRET=1``."""

from __future__ import annotations

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


if interpreted():
    patch_interpreter()
