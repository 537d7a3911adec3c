"""When the C++ kernel can compute linear attention, and the call of it: the forward pass on CPUs.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.kernels import cpp
from attnzoo.ops.room import in_lanes, room

CPP_CHUNK = 32  # tokens, at most
NAMES = {torch.float32: "linear_float", torch.float64: "linear_double"}


class _Task(ctypes.Structure):
    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads batch heads groups tokens key_size value_size normalize chunk decays",
        ),
        *cpp.fields(ctypes.c_int64 * 3, "q_steps k_steps v_steps decay_steps out_steps"),
        *cpp.fields(ctypes.c_double, "scale eps"),
        *cpp.fields(ctypes.c_void_p, "q k v log_decay kv z out last_kv last_z ids"),
    ]


def cpp_reasons(
    q: Tensor, *, form: str = "chunk", causal: bool = True, chunk_size: int | None = None
) -> list[str]:
    """Say why the C++ kernel cannot run a call, all reasons at once; empty if it can.

    Args:
        q: Queries, ``[B, H, T, D]``.
        form: As in ``linear_attention``.
        causal: Whether a token sees only itself and the tokens before it.
        chunk_size: C, if one is asked for.
    """
    reasons = []
    if q.device.type != "cpu":
        reasons.append(f"the tensors are on {q.device.type}")
    if form == "parallel":
        reasons.append("the parallel form is there to compare with (form='chunk' runs)")
    if not causal:
        reasons.append("all keys are seen (it is causal)")
    if chunk_size is not None and chunk_size > CPP_CHUNK:
        reasons.append(f"chunks of {chunk_size} are asked for (up to {CPP_CHUNK})")
    return reasons or list(_no_kernel())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _no_kernel() -> tuple[str, ...]:
    reason = cpp.why_not("linear")
    return (reason,) if reason else ()


def linear_walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    scale: float,
    eps: float | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the sums after the last token.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: ``[Hkv]``, ``[B, Hkv, T]`` or ``[B, Hkv, T, D]``.
        kv: The sums before the first token, ``[B, Hkv, D, E]``.
        z: Those of the keys alone, ``[B, Hkv, D]``.
        segment_ids: ``[B, T]``, sequences packed into a row.
        scale: Multiplies q.
        eps: Added to what the output is divided by; ``None`` divides by nothing.
        chunk_size: C, in tokens; more than :data:`CPP_CHUNK` are as many.
    """
    (size, keys), kind, dtype = (v.shape[3], k.shape[3]), v.dtype, kv.dtype
    q, k, v, kv = (in_lanes(x.to(dtype)) for x in (q, k, v, kv))
    kv, z = F.pad(kv, (0, 0, 0, k.shape[3] - kv.shape[2])).contiguous(), in_lanes(z).contiguous()
    batch, heads, tokens, wide = k.shape
    out = room(v, (*q.shape[:3], v.shape[3]))
    last_kv, last_z = torch.empty_like(kv), torch.empty_like(z)
    gates, ids = _per_token(log_decay, k), segment_ids
    if ids is not None:
        ids = ids.to(torch.int64).contiguous()
    steps = [(ctypes.c_int64 * 3)(*x.stride()[:3]) for x in (q, k, v, gates, out)]
    task = _Task(
        *(torch.get_num_threads(), batch, heads, q.shape[1] // heads, tokens, wide, v.shape[3]),
        *(eps is not None, min(chunk_size, CPP_CHUNK), gates.shape[3], *steps, scale, eps or 0.0),
        *(x.data_ptr() for x in (q, k, v, gates, kv, z, out, last_kv, last_z)),
        None if ids is None else ids.data_ptr(),
    )
    getattr(cpp.load("linear"), NAMES[dtype])(ctypes.byref(task))
    return (
        _cut(out, size).to(kind),
        _cut(last_kv, size)[:, :, :keys].contiguous(),
        _cut(last_z, keys),
    )


def _cut(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else room(x, (*x.shape[:-1], size)).copy_(x[..., :size])


def _per_token(log_decay: Tensor | None, k: Tensor) -> Tensor:
    """Return what is left at every token, ``[B, Hkv, T, 0]``, 1 or D of them, in the type of k."""
    shape = k.shape[:3]
    if log_decay is None:
        return k.new_empty(*shape, 0)
    if log_decay.dim() == 4:
        return in_lanes(log_decay.to(k.dtype))
    if log_decay.dim() == 1:
        log_decay = log_decay[:, None].expand(shape)
    return log_decay.to(k.dtype).unsqueeze(3)
