"""When the C++ kernel can compute linear attention, and the call of it: the forward pass on CPUs.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from attnzoo.kernels import cpp
from attnzoo.ops.room import room

LANES = 16  # sizes are multiples of it
CPP_CHUNK = 32  # tokens
NAMES = {torch.float32: "linear_float", torch.float64: "linear_double"}


class _Task(ctypes.Structure):
    _fields_ = [
        *cpp.fields(
            ctypes.c_int64, "threads batch heads groups tokens key_size value_size normalize"
        ),
        *cpp.fields(ctypes.c_int64 * 3, "q_steps k_steps v_steps out_steps"),
        *cpp.fields(ctypes.c_double, "scale eps"),
        *cpp.fields(ctypes.c_void_p, "q k v kv z out last_kv last_z"),
    ]


def cpp_reasons(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str = "chunk",
    causal: bool = True,
    plain: bool = True,
    key_size: int | None = None,
) -> list[str]:
    """Say why the C++ kernel cannot run a call, all reasons at once; empty if it can.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        form: As in ``linear_attention``.
        causal: Whether a token sees only itself and the tokens before it.
        plain: Whether there is neither a decay nor a border between packed sequences.
        key_size: D, where the feature map is still to come.
    """
    reasons, kinds = [], {q.dtype, k.dtype, v.dtype}
    if q.device.type != "cpu":
        reasons.append(f"the tensors are on {q.device.type}")
    if form != "chunk":
        reasons.append(f"form={form!r} is asked for (it has the chunk form)")
    if not causal:
        reasons.append("all keys are seen (it is causal)")
    if not plain:
        reasons.append("there is a decay, or rows are packed (impl='torch' takes both)")
    if len(kinds) > 1 or not kinds <= NAMES.keys():
        names = sorted(str(kind).removeprefix("torch.") for kind in kinds)
        reasons.append(f"{', '.join(names)} is given (it takes float32, or float64)")
    sizes = (key_size or k.shape[3], v.shape[3])
    if any(size % LANES for size in sizes):
        reasons.append(
            f"keys of {sizes[0]} and values of {sizes[1]} are given (it takes multiples of {LANES})"
        )
    return reasons or list(_no_kernel())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _no_kernel() -> tuple[str, ...]:
    reason = cpp.why_not("linear")
    return (reason,) if reason else ()


def linear_walk(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, scale: float, eps: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the sums after the last token.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        kv: The sums before the first token, ``[B, Hkv, D, E]``.
        z: Those of the keys alone, ``[B, Hkv, D]``.
        scale: Multiplies q.
        eps: Added to what the output is divided by; ``None`` divides by nothing.
    """
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    kv, z = kv.contiguous(), z.contiguous()
    batch, heads, tokens, size = k.shape
    out = room(v, (*q.shape[:3], v.shape[3]))
    last_kv, last_z = torch.empty_like(kv), torch.empty_like(z)
    steps = [(ctypes.c_int64 * 3)(*x.stride()[:3]) for x in (q, k, v, out)]
    task = _Task(
        *(torch.get_num_threads(), batch, heads, q.shape[1] // heads, tokens, size, v.shape[3]),
        *(eps is not None, *steps, scale, eps or 0.0),
        *(x.data_ptr() for x in (q, k, v, kv, z, out, last_kv, last_z)),
    )
    getattr(cpp.load("linear"), NAMES[v.dtype])(ctypes.byref(task))
    return out, last_kv, last_z
