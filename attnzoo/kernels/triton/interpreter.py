"""Triton's interpreter, which runs kernels on the CPU where ``TRITON_INTERPRET=1`` is set."""

from __future__ import annotations

from typing import Any

import torch
import triton

_INTERPRETED = bool(triton.knobs.runtime.interpret)


def interpreted() -> bool:
    """Whether kernels of this process run in the interpreter; settled when they are imported."""
    return _INTERPRETED


def mend_interpreter() -> None:
    """Let loops run to a bound that is no constant, and round to bfloat16 as a GPU does.

    Triton 3.6 reads such a bound, an array of one element, by ``int(array)``, which numpy 2.4 no
    longer takes; and it cuts off what does not fit a bfloat16.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    cast = builder.cast_impl

    def rounding(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            nearest = torch.as_tensor(source.data).to(torch.bfloat16).view(torch.uint16)
            return interpreter.TensorHandle(nearest.numpy(), tl.bfloat16)
        return cast(self, source, kind)

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
    builder.cast_impl = rounding


if interpreted():
    mend_interpreter()
