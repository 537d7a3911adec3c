"""Linear attention in C++, for CPUs: both passes.

The forward pass keeps the state before every 512th token for the backward pass, which computes the
states in between again. Tensors are read and written in their own dtypes; sums have the dtype of
the state.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size, F decays per token
(0, 1 or D).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.linear.impl.common import LinearInputs, Result, log_decay_per_token
from attnzoo.backends.linear.impl.step import step
from attnzoo.kernels import cpp
from attnzoo.kernels.derivatives import check_reverse_mode, refuse_derivative
from attnzoo.kernels.memory import empty_huge_pages
from attnzoo.state import LinearState

CPP_CHUNK = 32  # the largest chunk size that a call may ask for, in tokens
KERNEL_CHUNK = 16  # the largest chunk; CHUNK of linear.cpp
SPAN = 512  # tokens between the states that the forward pass keeps; SPAN of linear.cpp
TYPE_NAMES = {torch.float32: "float", torch.float64: "double"}
LINEAR = cpp.Source(
    Path(__file__).parents[1] / "kernels" / "linear.cpp",
    tuple(f"linear_{x}_{y}" for x in ("forward", "backward") for y in TYPE_NAMES.values()),
)


class _Task(ctypes.Structure):
    """The arguments of both C++ functions; ``linear.cpp`` has the same struct."""

    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads batch heads groups tokens key_size value_size normalize chunk decays",
        ),
        *cpp.fields(ctypes.c_double, "scale eps"),
        *cpp.fields(cpp.Rows, "q k v log_decay out"),
        *cpp.fields(ctypes.c_void_p, "kv z last_kv last_z kept ids"),
    ]


class _Gradients(ctypes.Structure):
    """The further arguments of the backward pass; ``linear.cpp`` has the same struct."""

    _fields_ = [
        *cpp.fields(cpp.Rows, "d_out dq dk dv d_log_decay"),
        *cpp.fields(ctypes.c_void_p, "d_last_kv d_last_z d_kv d_z"),
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
    tensors = (x.q, x.k, x.v, x.log_decay, *x.state)
    check_reverse_mode("linear_attention", *tensors)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    chunk_size = KERNEL_CHUNK if x.chunk_size is None else x.chunk_size
    options = (x.scale, x.normalize, x.eps, chunk_size, needs_grad)
    out, kv, z, _ = linear_cpp(*tensors, x.segment_ids, *options)
    return out, LinearState(kv, z)


class _Arguments:
    """The tensors of a call as the kernels read them, and the struct that refers to them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        segment_ids: Tensor | None,
        scale: float,
        normalize: bool,
        eps: float,
        chunk_size: int,
    ) -> None:
        decays = k.new_empty(*k.shape[:3], 0)
        if log_decay is not None:
            decays = log_decay_per_token(log_decay, k)
        read = tuple(cpp.with_contiguous_rows(x) for x in (q, k, v, decays))
        ids = None if segment_ids is None else segment_ids.to(torch.int64).contiguous()
        self.read = (*read, ids)  # kept alive, because the struct refers to them
        batch, heads, tokens, size = k.shape
        self.task = _Task(
            *(torch.get_num_threads(), batch, heads, q.shape[1] // heads, tokens, size, v.shape[3]),
            *(normalize, min(chunk_size, KERNEL_CHUNK), decays.shape[3], scale, eps),
            *map(cpp.rows, read),
            ids=None if ids is None else ids.data_ptr(),
        )

    def run(self, direction: str, dtype: torch.dtype, *structs: ctypes.Structure) -> None:
        """Call the kernel of one direction, whose sums have this dtype."""
        function = getattr(cpp.load(LINEAR), f"linear_{direction}_{TYPE_NAMES[dtype]}")
        function(*(ctypes.byref(x) for x in (self.task, *structs)))


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
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output, both sums of the state after the last token, and the states kept.

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
        chunk_size: C, in tokens; chunks have at most :data:`KERNEL_CHUNK`.
        keep: Whether to keep the states before every :data:`SPAN` th token for the backward pass,
            ``[B, Hkv, T / SPAN, D (E + 1)]``; otherwise without elements.
    """
    x = _Arguments(q, k, v, log_decay, segment_ids, scale, normalize, eps, chunk_size)
    kv, z = kv.contiguous(), z.contiguous()
    out = empty_huge_pages(v, (*q.shape[:3], v.shape[3]))
    last_kv, last_z = torch.empty_like(kv), torch.empty_like(z)
    kept = empty_huge_pages(kv, _kept_shape(k, v, keep))
    x.task.out, x.task.kept = cpp.rows(out), kept.data_ptr() if keep else None
    x.task.kv, x.task.z = kv.data_ptr(), z.data_ptr()
    x.task.last_kv, x.task.last_z = last_kv.data_ptr(), last_z.data_ptr()
    x.run("forward", kv.dtype)
    return out, last_kv, last_z, kept


@torch.library.custom_op("attnzoo::linear_cpp_backward", mutates_args=())
def linear_cpp_backward(
    d_out: Tensor | None,
    d_last_kv: Tensor | None,
    d_last_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    segment_ids: Tensor | None,
    kept: Tensor,
    scale: float,
    normalize: bool,
    eps: float,
    chunk_size: int,
    want_decay: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay (empty without ``want_decay``), kv and z."""
    x = _Arguments(q, k, v, log_decay, segment_ids, scale, normalize, eps, chunk_size)
    x.task.kept = kept.data_ptr()
    if d_out is None:
        d_out = v.new_zeros(v.shape[3]).expand(*q.shape[:3], v.shape[3])
    d_out = cpp.with_contiguous_rows(d_out)
    d_kv, d_z = _new_state(k, v, kept)
    d_last_kv = torch.zeros_like(d_kv) if d_last_kv is None else d_last_kv.contiguous()
    d_last_z = torch.zeros_like(d_z) if d_last_z is None else d_last_z.contiguous()
    dq, dk, dv = (empty_huge_pages(t, t.shape) for t in (q, k, v))
    gradients = _Gradients(*map(cpp.rows, (d_out, dq, dk, dv)))
    gradients.d_last_kv, gradients.d_last_z = d_last_kv.data_ptr(), d_last_z.data_ptr()
    gradients.d_kv, gradients.d_z = d_kv.data_ptr(), d_z.data_ptr()
    d_log = _new_decay_gradient(k, log_decay if want_decay else None, kept.dtype)
    if d_log.numel():
        gradients.d_log_decay = cpp.rows(d_log)
    x.run("backward", kept.dtype, gradients)
    if want_decay and log_decay is not None:
        d_log = d_log.sum((0, 2, 3)) if log_decay.dim() == 1 else d_log
        d_log = d_log.view(log_decay.shape).to(log_decay.dtype)
    return dq, dk, dv, d_log, d_kv, d_z


def _new_decay_gradient(k: Tensor, log_decay: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor for the gradients of the log decays, ``[B, Hkv, T, F]``."""
    if log_decay is None:
        return k.new_empty(0, dtype=dtype)
    channels = k.shape[3] if log_decay.dim() == 4 else 1
    dtype = dtype if log_decay.dim() == 1 else log_decay.dtype  # its elements are added later
    return empty_huge_pages(k, (*k.shape[:3], channels), dtype)


def _new_state(k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the two sums of a state."""
    kv = kept.new_empty(*k.shape[:2], k.shape[3], v.shape[3])
    return kv, kv.new_empty(kv.shape[:3])


def _kept_shape(k: Tensor, v: Tensor, keep: bool) -> tuple[int, ...]:
    """Return the shape of the states that the forward pass keeps."""
    spans = (k.shape[2] + SPAN - 1) // SPAN if keep else 0
    return (*k.shape[:2], spans, k.shape[3] * (v.shape[3] + 1))


@linear_cpp.register_fake
def _linear_cpp_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, kv: Tensor, z: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    kept = kv.new_empty(_kept_shape(k, v, rest[-1]))
    return out, kv.new_empty(kv.shape), z.new_empty(z.shape), kept


@linear_cpp_backward.register_fake
def _linear_cpp_backward_fake(
    d_out: Any, d_last_kv: Any, d_last_z: Any, *inputs: Any
) -> tuple[Tensor, ...]:
    q, k, v, log_decay, _, kept = inputs[:6]
    log_decay = log_decay if inputs[-1] and log_decay is not None else kept.new_empty(0)
    like = (q, k, v, log_decay, *_new_state(k, v, kept))
    return tuple(x.new_empty(x.shape) for x in like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, log_decay, _, _, segment_ids, *options = inputs
    ctx.save_for_backward(q, k, v, log_decay, segment_ids, output[3])
    ctx.options = options[:-1]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Any, d_kv: Any, d_z: Any, d_kept: Any) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    options = (*ctx.options, needed[3])
    grads = linear_cpp_backward(d_out, d_kv, d_z, *ctx.saved_tensors, *options)
    return *(g if need else None for g, need in zip(grads, needed, strict=False)), *(None,) * 6


linear_cpp.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(linear_cpp_backward, "linear_attention")
