"""Linear attention in C++: the forward pass on CPUs; the backward pass is the chunk form's.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.backends.linear.impl.chunk import chunk_autograd, chunk_fake
from attnzoo.backends.linear.impl.common import CHUNK_SIZE, LinearInputs, Result
from attnzoo.backends.linear.impl.step import step
from attnzoo.kernels import cpp
from attnzoo.kernels.derivatives import check_reverse_mode
from attnzoo.kernels.memory import empty_huge_pages, pad_to_simd, unpad
from attnzoo.state import LinearState

CPP_CHUNK = 32  # the largest chunk size, in tokens
FUNCTIONS = {torch.float32: "linear_float", torch.float64: "linear_double"}
LINEAR = cpp.Source(Path(__file__).parents[1] / "kernels" / "linear.cpp", tuple(FUNCTIONS.values()))


class _Task(ctypes.Structure):
    """The arguments of the C++ function; ``linear.cpp`` has the same struct."""

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
    """Return every reason why the C++ kernel does not support a call.

    Args:
        q: Queries, ``[B, H, T, D]``.
        form: As in ``linear_attention``.
        causal: Whether a token sees only itself and earlier tokens.
        chunk_size: C, or ``None``.
    """
    reasons = []
    if q.device.type != "cpu":
        reasons.append(f"the tensors are on {q.device.type}")
    if form == "parallel":
        reasons.append("the parallel form is for comparison (use form='chunk')")
    if not causal:
        reasons.append("attention is bidirectional (the kernel is causal)")
    if chunk_size is not None and chunk_size > CPP_CHUNK:
        reasons.append(f"chunk_size is {chunk_size} (at most {CPP_CHUNK})")
    return reasons or list(_unavailable())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unavailable() -> tuple[str, ...]:
    reason = cpp.unavailable_reason(LINEAR)
    return (reason,) if reason else ()


def run_cpp(x: LinearInputs) -> Result:
    """Run the kernel; one token takes the step in torch."""
    if x.k.shape[2] == 1:
        return step(x)
    check_reverse_mode("linear_attention", x.q, x.k, x.v, x.log_decay, *x.state)
    out, kv, z = linear_cpp(
        *(x.q, x.k, x.v, x.log_decay, x.state.kv, x.state.k, x.segment_ids),
        *(x.scale, x.normalize, x.eps, x.chunk_size or CHUNK_SIZE),
    )
    return out, LinearState(kv, z)


@torch.library.custom_op("attnzoo::linear_cpp", mutates_args=())
def linear_cpp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    segment_ids: Tensor | None,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the two sums of the state after the last token.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: ``[Hkv]``, ``[B, Hkv, T]`` or ``[B, Hkv, T, D]``.
        kv: The state before the first token, ``[B, Hkv, D, E]``.
        z: Its sum of keys, ``[B, Hkv, D]``.
        segment_ids: ``[B, T]``, of sequences packed into one row.
        scale: Multiplies q.
        normalize: Whether to divide by the sum of weights.
        eps: Added to that sum.
        chunk_size: C, in tokens; the kernel takes at most :data:`CPP_CHUNK`.
    """
    dtype, out_dtype, keys, size = kv.dtype, v.dtype, k.shape[3], v.shape[3]
    q, k, v, kv = [pad_to_simd(x.to(dtype)) for x in (q, k, v, kv)]
    batch, heads, tokens, padded_keys = k.shape
    z = pad_to_simd(z)
    if padded_keys != keys:
        kv = F.pad(kv, (0, 0, 0, padded_keys - keys))
    kv, z = kv.contiguous(), z.contiguous()
    out = empty_huge_pages(v, (*q.shape[:3], v.shape[3]))
    last_kv, last_z = torch.empty_like(kv), torch.empty_like(z)
    decays = log_decays(log_decay, k)
    if segment_ids is not None:
        segment_ids = segment_ids.to(torch.int64).contiguous()
    steps = [(ctypes.c_int64 * 3)(*x.stride()[:3]) for x in (q, k, v, decays, out)]
    pointers = [x.data_ptr() for x in (q, k, v, decays, kv, z, out, last_kv, last_z)]
    task = _Task(
        *(torch.get_num_threads(), batch, heads, q.shape[1] // heads, tokens),
        *(padded_keys, v.shape[3], normalize, min(chunk_size, CPP_CHUNK), decays.shape[3]),
        *steps,
        *(scale, eps if normalize else 0.0),
        *pointers,
        None if segment_ids is None else segment_ids.data_ptr(),
    )
    getattr(cpp.load(LINEAR), FUNCTIONS[dtype])(ctypes.byref(task))
    if out.shape[3] != size:
        out, last_kv = unpad(out, size), last_kv[..., :size].contiguous()
    if padded_keys != keys:
        last_kv, last_z = last_kv[:, :, :keys].contiguous(), last_z[..., :keys].contiguous()
    return out.to(out_dtype), last_kv, last_z


def log_decays(log_decay: Tensor | None, k: Tensor) -> Tensor:
    """Return the log decays, ``[B, Hkv, T, X]`` in the dtype of k, with X of 0, 1 or D."""
    shape = k.shape[:3]
    if log_decay is None:
        return k.new_empty(*shape, 0)
    if log_decay.dim() == 4:
        return pad_to_simd(log_decay.to(k.dtype))
    if log_decay.dim() == 1:
        log_decay = log_decay[:, None].expand(shape)
    return log_decay.to(k.dtype).unsqueeze(3)


linear_cpp.register_fake(chunk_fake)
chunk_autograd(linear_cpp)
