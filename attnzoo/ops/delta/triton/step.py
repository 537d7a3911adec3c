"""Triton kernel of one decoding step of the delta rule; reads and writes the state once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.ops.linear.triton.decay import LOG_ZERO
from attnzoo.ops.linear.triton.launch import gate_and_strides
from attnzoo.runtime.triton_products import block_size, contiguous_rows, device_context

TILE = 4096  # elements of the state per program
WARPS = 4


# Step: S' = decay * S, u = beta (v - k S'), S = S' + k u^T, o = scale q S      (arXiv:2412.06464)
#
# grid     (B * Hkv * tiles): one program updates one tile [D, BE] of one key head's state
# reads    q [B, H, 1, D], k [B, Hkv, 1, D], v [B, Hkv, 1, E], beta [B, Hkv, 1], log decay
#          [B, Hkv, 1, F]; any strides; state [B, Hkv, D, E], float32, contiguous; with SLOTS, a
#          pool [P, Hkv, D, E], of which sequence b has row slots[b]
# writes   out [B, H, 1, E]; state_next, shaped like state, or state itself. Of a sequence in slot
#          -1, nothing but out is written, and nothing is read
# memory   8 * D * E bytes per key head for the state, and each other tensor once
# limits   D, E <= 256
# oracle   delta_attention(impl="reference"), on a GPU and with TRITON_INTERPRET=1
@triton.jit
def delta_step_kernel(
    q, k, v, beta, log_decay, slots, state, state_next, out,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, beta_batch, beta_head, gate_batch, gate_head,
    key_heads, scale,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    TILES: tl.constexpr, DECAY: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Update one tile of the state with one token; see above."""
    tile, bh = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    d, e = tl.arange(0, BD), tile * BE + tl.arange(0, BE)
    index = bh  # of the state
    if SLOTS:
        slot = tl.load(slots + b).to(tl.int64)
        if slot < 0:
            for g in range(G):
                none = tl.zeros((BE,), out.dtype.element_ty)
                tl.store(out + (bh * G + g) * E + e, none, mask=e < E)
            return
        index = slot * key_heads + h
    offsets = index * D * E + d[:, None] * E + e[None, :]
    mask = (d < D)[:, None] & (e < E)[None, :]
    kv = tl.load(state + offsets, mask=mask, other=0.0)
    key = tl.load(k + b * k_batch + h * k_head + d, mask=d < D, other=0.0).to(tl.float32)
    value = tl.load(v + b * v_batch + h * v_head + e, mask=e < E, other=0.0).to(tl.float32)
    strength = tl.load(beta + b * beta_batch + h * beta_head).to(tl.float32)
    if DECAY == "vector":
        gates = tl.load(log_decay + b * gate_batch + h * gate_head + d, mask=d < D, other=0.0)
        kv *= tl.exp(tl.maximum(gates.to(tl.float32), LOG_ZERO))[:, None]
    if DECAY == "scalar":
        gate = tl.load(log_decay + b * gate_batch + h * gate_head).to(tl.float32)
        kv *= tl.exp(tl.maximum(gate, LOG_ZERO))
    update = strength * (value - tl.sum(key[:, None] * kv, 0))
    kv += key[:, None] * update[None, :]
    tl.store(state_next + offsets, kv, mask=mask)
    for g in range(G):
        query = tl.load(q + b * q_batch + (h * G + g) * q_head + d, mask=d < D, other=0.0)
        row = tl.sum(query.to(tl.float32)[:, None] * kv, 0) * scale
        tl.store(out + (bh * G + g) * E + e, row.to(out.dtype.element_ty), mask=e < E)


@torch.library.custom_op("attnzoo::delta_triton_step", mutates_args=())
def delta_triton_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, 1, E]`` and the state after one token; has no gradients.

    The arguments are those of ``delta_triton``, for one token. With ``slots``, ``[B]`` integers,
    the state is a pool, and row ``slots[b]`` is that of sequence b; -1 for none, whose output is 0.
    The launch does not synchronise and shapes are fixed, so CUDA graphs can capture it.
    """
    state = state.contiguous()
    state_next = torch.empty_like(state) if slots is None else state.clone()
    return _launch(q, k, v, beta, log_decay, state, slots, scale, state_next), state_next


@torch.library.custom_op("attnzoo::delta_triton_step_", mutates_args=("state",))
def delta_triton_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the output of :func:`delta_triton_step`, and overwrite a contiguous state."""
    return _launch(q, k, v, beta, log_decay, state, slots, scale, state)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    scale: float,
    state_next: Tensor,
) -> Tensor:
    """Launch the kernel, and return the output."""
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    (batch, heads, _, d), key_heads, e = q.shape, k.shape[1], v.shape[3]
    out = v.new_empty(batch, heads, 1, e)
    gate, decay, (gate_batch, gate_head, _) = gate_and_strides(log_decay, k)
    bd = block_size(d)
    be = min(block_size(e), max(16, TILE // bd))
    tiles = -(-e // be)
    with device_context(q.device):
        delta_step_kernel[(batch * key_heads * tiles,)](
            q, k, v, beta, gate, state if slots is None else slots.contiguous(), state, state_next,
            out, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *beta.stride()[:2], gate_batch,
            gate_head, key_heads, scale, D=d, E=e, G=heads // key_heads, BD=bd, BE=be, TILES=tiles,
            DECAY=decay, SLOTS=slots is not None, num_warps=WARPS,
        )  # fmt: skip
    return out


@delta_triton_step.register_fake
def _delta_triton_step_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(*q.shape[:3], v.shape[3]), state.new_empty(state.shape)


@delta_triton_step_.register_fake
def _delta_triton_step_in_place_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])
