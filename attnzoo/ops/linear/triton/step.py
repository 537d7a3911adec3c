"""Triton kernel of one decoding step of linear attention; reads and writes the state once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.ops.linear.triton.decay import LOG_ZERO
from attnzoo.ops.linear.triton.launch import gate_and_strides
from attnzoo.ops.linear.triton.parts import apply_feature_map, row_max_and_ties
from attnzoo.runtime.triton_products import block_size, contiguous_rows, device_context

TILE = 4096  # elements of the state per program
WARPS = 4
LOWEST_STABILIZER: tl.constexpr = tl.constexpr(-87.0)  # of mLSTM: exp(87) is finite in float32


# Step: S = decay * S + k v^T, z = decay * z + k, o = q S / (q z + eps)         (arXiv:2006.16236)
# GATE "rwkv6" has a bonus u: the query reads S and z before the update, and (q . u k) (v, 1) is
#      added                                                                    (arXiv:2404.05892)
# GATE "mlstm" has an input gate i: m' = max(log decay + m, i), the decay is
#      exp(log decay + m - m'), k is multiplied by exp(i - m'), and the denominator is
#      max(|q z|, exp(-m'))                                                     (arXiv:2405.04517)
#
# grid     (B * Hkv * tiles): one program updates one tile [D, BE] of one key head's state
# reads    q [B, H, 1, D], k [B, Hkv, 1, D], v [B, Hkv, 1, E], log decay [B, Hkv, 1, F];
#          any strides; kv [B, Hkv, D, E], z [B, Hkv, D], float32, contiguous
#          bonus [Hkv, D]; log_input [B, Hkv] and m [B, Hkv], float32, contiguous;
#          with SLOTS, kv, z and m are pools, [P, ...], and sequence b has row slots[b] of them
# writes   out [B, H, 1, E]; kv_next and z_next, shaped like kv and z; m_next. Of a sequence in slot
#          -1, nothing but out is written, and nothing is read
# memory   2 * 4 * (D * E + D) bytes per key head for the state, and each other tensor once
# limits   D, E <= 256
# oracle   linear_attention(impl="reference"), on a GPU and with TRITON_INTERPRET=1
@triton.jit
def step_kernel(
    q, k, v, out, log_decay, slots, kv, z, kv_next, z_next, bonus, log_input, m, m_next,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, gate_batch, gate_head,
    key_heads, scale, map_scale, eps,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    TILES: tl.constexpr, MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    SLOTS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Update one tile of the state with one token; see above."""
    tile, bh = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    d, e = tl.arange(0, BD), tile * BE + tl.arange(0, BE)
    offsets = d[:, None] * E + e[None, :]
    mask = (d < D)[:, None] & (e < E)[None, :]
    index = bh  # of the state
    if SLOTS:
        slot = tl.load(slots + b).to(tl.int64)
        if slot < 0:
            for g in range(G):
                none = tl.zeros((BE,), out.dtype.element_ty)
                tl.store(out + (bh * G + g) * E + e, none, mask=e < E)
            return
        index = slot * key_heads + h
    state = tl.load(kv + index * D * E + offsets, mask=mask, other=0.0)
    z_sums = tl.load(z + index * D + d, mask=d < D, other=0.0)
    zeros = tl.zeros((1,), tl.float32)
    keys = tl.load(k + b * k_batch + h * k_head + d, mask=d < D, other=0.0).to(tl.float32)
    values = tl.load(v + b * v_batch + h * v_head + e, mask=e < E, other=0.0).to(tl.float32)
    keys = apply_feature_map(keys[None, :], zeros, d, map_scale, MAP, "keys", D)
    keys = tl.reshape(keys, (BD,))
    state_before, z_before = state, z_sums
    if DECAY == "vector":
        gates = tl.load(log_decay + b * gate_batch + h * gate_head + d, mask=d < D, other=0.0)
        channel_decay = tl.exp(tl.maximum(gates.to(tl.float32), LOG_ZERO))
        state *= channel_decay[:, None]
        z_sums *= channel_decay
    if DECAY == "scalar":
        gate = tl.load(log_decay + b * gate_batch + h * gate_head).to(tl.float32)
        if GATE == "mlstm":
            kept, weight = gate + tl.load(m + index), tl.load(log_input + bh)
            largest = tl.maximum(kept, weight)
            gate = kept - largest
            keys *= tl.exp(weight - largest)
            lowest = tl.exp(-tl.maximum(largest, LOWEST_STABILIZER))
            if tile == 0:
                tl.store(m_next + index, largest)
        token_decay = tl.exp(tl.maximum(gate, LOG_ZERO))
        state *= token_decay
        z_sums *= token_decay
    state += keys[:, None] * values[None, :]
    z_sums += keys
    tl.store(kv_next + index * D * E + offsets, state, mask=mask)
    if tile == 0:
        tl.store(z_next + index * D + d, z_sums, mask=d < D)
    for g in range(G):
        raw = tl.load(q + b * q_batch + (h * G + g) * q_head + d, mask=d < D, other=0.0)
        raw = raw.to(tl.float32)[None, :]
        row_max, ties = row_max_and_ties(raw, d, map_scale, D) if MAP == "exp" else (zeros, zeros)
        query = (
            tl.reshape(apply_feature_map(raw, row_max, d, map_scale, MAP, "queries", D), (BD,))
            * scale
        )
        if GATE == "rwkv6":
            own = tl.load(bonus + h * D + d, mask=d < D, other=0.0) * keys
            weight = tl.sum(query * own, 0)
            row = tl.sum(query[:, None] * state_before, 0) + weight * values
            total = tl.sum(query * z_before, 0) + weight
        else:
            row = tl.sum(query[:, None] * state, 0)
            total = tl.sum(query * z_sums, 0)
        if GATE == "mlstm":
            row /= tl.maximum(tl.abs(total), lowest)
        elif NORMALIZE:
            row /= total + eps
        tl.store(out + (bh * G + g) * E + e, row.to(out.dtype.element_ty), mask=e < E)


def launch_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    slots: Tensor | None,
    feature_map: str,
    map_scale: float,
    scale: float,
    normalize: bool,
    eps: float,
    bonus: Tensor | None = None,
    log_input: Tensor | None = None,
    m: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch :func:`step_kernel`; see :func:`linear_triton_step`.

    ``in_place``: each program of a head overwrites the tile of kv that it reads. All programs of
    the head read z and m, so they read copies.
    """
    q, k, v, kv, z = (
        contiguous_rows(q),
        contiguous_rows(k),
        contiguous_rows(v),
        kv.contiguous(),
        z.contiguous(),
    )
    (batch, heads, _, d), key_heads, e = q.shape, k.shape[1], v.shape[3]
    out = v.new_empty(batch, heads, 1, e)
    kv_next, z_next, m_next = kv, z, m
    if in_place:
        z, m = z.clone(), None if m is None else m.clone()
    else:  # with slots, the other rows of the pool stay
        copied = torch.empty_like if slots is None else torch.clone
        kv_next, z_next = copied(kv), copied(z)
        m_next = None if m is None else copied(m)
    kind = "mlstm" if m is not None else "rwkv6" if bonus is not None else ""
    gate, decay, (gate_batch, gate_head, _) = gate_and_strides(log_decay, k)
    bd = block_size(d)
    be = min(block_size(e), max(16, TILE // bd))
    tiles = -(-e // be)
    with device_context(q.device):
        step_kernel[(batch * key_heads * tiles,)](
            q, k, v, out, gate, z if slots is None else slots.contiguous(), kv, z, kv_next, z_next,
            *(z if x is None else x for x in (bonus, log_input, m, m_next)), *q.stride()[:2],
            *k.stride()[:2], *v.stride()[:2], gate_batch, gate_head, key_heads, scale, map_scale,
            eps, D=d, E=e, G=heads // key_heads, BD=bd, BE=be, TILES=tiles, MAP=feature_map,
            DECAY=decay, NORMALIZE=normalize, SLOTS=slots is not None, GATE=kind, num_warps=WARPS,
        )  # fmt: skip
    return out, kv_next, z_next


@torch.library.custom_op("attnzoo::linear_triton_step", mutates_args=())
def linear_triton_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    slots: Tensor | None,
    feature_map: str,
    map_scale: float,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, 1, E]`` and the state after one token; has no gradients.

    The arguments are those of ``linear_triton``, for one token. With ``slots``, ``[B]`` integers,
    kv and z are pools, and row ``slots[b]`` is the state of sequence b; -1 for none, whose output
    is 0. The launch does not synchronise and shapes are fixed, so CUDA graphs can capture it.
    """
    return launch_step(
        q, k, v, log_decay, kv, z, slots, feature_map, map_scale, scale, normalize, eps
    )


@linear_triton_step.register_fake
def _linear_triton_step_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, kv: Tensor, z: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    out = v.new_empty(*q.shape[:3], v.shape[3])
    return out, kv.new_empty(kv.shape), z.new_empty(z.shape)


@torch.library.custom_op("attnzoo::linear_triton_step_", mutates_args=("kv", "z", "m"))
def linear_triton_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    slots: Tensor | None,
    feature_map: str,
    map_scale: float,
    scale: float,
    normalize: bool,
    eps: float,
    bonus: Tensor | None = None,
    log_input: Tensor | None = None,
    m: Tensor | None = None,
) -> Tensor:
    """Return the output of :func:`linear_triton_step`; overwrite ``kv`` and ``z``, contiguous.

    With the tensors of a :class:`attnzoo.ops.linear.common.StepGate`, compute RWKV-6, or
    mLSTM, which overwrites ``m`` too.
    """
    options = (feature_map, map_scale, scale, normalize, eps, bonus, log_input, m)
    return launch_step(q, k, v, log_decay, kv, z, slots, *options, in_place=True)[0]


@linear_triton_step_.register_fake
def _linear_triton_step_in_place_fake(
    q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object
) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])
