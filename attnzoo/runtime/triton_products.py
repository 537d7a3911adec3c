"""Products of tiles in Triton kernels, and block sizes, precision and devices of launches.

The interpreter and the compiler get the same operands: rounded to bfloat16, or float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.runtime.triton_interpreter import interpreted

INTERPRETED: tl.constexpr = tl.constexpr(interpreted())


# -- launches --------------------------------------------------------------------------------------


def operand_precision(*inputs: Tensor) -> tuple[bool, str]:
    """Return whether operands are float32, and the input precision of their products.

    bfloat16 inputs stay bfloat16. float16 inputs use tf32, which has as many mantissa bits. float32
    inputs follow ``torch.set_float32_matmul_precision``.
    """
    dtypes = {x.dtype for x in inputs}
    full_precision = torch.float32 in dtypes and torch.get_float32_matmul_precision() == "highest"
    return dtypes != {torch.bfloat16}, "tf32x3" if full_precision else "tf32"


def contiguous_rows(x: Tensor) -> Tensor:
    """Return ``x`` with stride 1 in the last dimension; copies if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def block_size(size: int) -> int:
    """Return the block size for ``size`` columns: a power of two, at least 16 for ``tl.dot``."""
    return max(16, int(triton.next_power_of_2(size)))


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# -- products --------------------------------------------------------------------------------------
#
# OPERAND is the dtype of both factors: bfloat16 for bfloat16 inputs, float32 for all others.
# PRECISION is the input precision of float32 products: tf32 for float16 inputs (tf32 has as many
# mantissa bits as float16, and the range of float32, which features and sums need). Products
# accumulate in float32.
# EXACT is the factor, "left", "right" or "both", that is not rounded to bfloat16: a second product
# adds its rounding error, which leaves a relative error of 2**-17. Gradients of a normalised output
# need this if the values have a mean: they are small differences of large sums.


@triton.jit
def round_operand(x, OPERAND: tl.constexpr):
    """Return ``x`` in the dtype of an operand."""
    x = x.to(OPERAND)
    if INTERPRETED:  # its tl.dot reads bfloat16 as integers
        x = x.to(tl.float32)
    return x


@triton.jit
def split_operand(x, OPERAND: tl.constexpr):
    """Return ``x`` in bfloat16, and its rounding error, also rounded.

    The instructions convert two numbers at once; the compiler converts one at a time where it
    needs the rounding error, which takes twice as many instructions.
    """
    if INTERPRETED or x.dtype.primitive_bitwidth == 16:
        high = round_operand(x, OPERAND)
        return high, round_operand(x - high.to(tl.float32), OPERAND)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b; .reg .f32 c, d;
        cvt.rn.bf16x2.f32 $0, $3, $2;
        shl.b32 a, $0, 16;
        and.b32 b, $0, 0xffff0000;
        sub.f32 c, $2, a;
        sub.f32 d, $3, b;
        cvt.rn.bf16x2.f32 $1, d, c; }""",
        "=&r,=r,r,r",
        [x],
        (tl.bfloat16, tl.bfloat16),
        True,
        2,
    )


@triton.jit
def dot_add(a, b, acc, OPERAND: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """Return ``acc + a @ b``; the constants are described above."""
    if tl.float32 == OPERAND:
        precision: tl.constexpr = PRECISION if EXACT == "" else "tf32x3"
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=precision)
    else:  # Triton compiles statements after a return, too
        if EXACT == "left" or EXACT == "both":
            left, left_error = split_operand(a, OPERAND)
        else:
            left = round_operand(a, OPERAND)
        if EXACT == "right" or EXACT == "both":
            right, right_error = split_operand(b, OPERAND)
        else:
            right = round_operand(b, OPERAND)
        acc = tl.dot(left, right, acc)
        if EXACT == "left" or EXACT == "both":
            acc = tl.dot(left_error, right, acc)
        if EXACT == "right" or EXACT == "both":
            acc = tl.dot(left, right_error, acc)
    return acc
