"""One token of linear attention, for decoding: reads the state once, writes it once.

Letters: B batch, H heads, Hkv key heads, G = H / Hkv, D key size, E value size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.triton.linear_decays import FORGOTTEN
from attnzoo.kernels.triton.linear_launch import _dense, _gates, _on, _padded
from attnzoo.kernels.triton.linear_parts import features, largest

TILE = 4096  # numbers of the state that a program holds
WARPS = 4


# Step: S = decay * S + k v^T, z = decay * z + k, o = q S / (q z + eps)         (arXiv:2006.16236)
#
# grid     (B * Hkv * tiles): one program keeps a tile [D, BE] of one key head's state
# reads    q [B, H, 1, D], k [B, Hkv, 1, D], v [B, Hkv, 1, E], log decay [B, Hkv, 1, F] by strides;
#          kv [B, Hkv, D, E], z [B, Hkv, D], float32
# writes   out [B, 1, H, E], kv_next, z_next
# memory   2 * 4 * (D * E + D) bytes for each key head, and little else: nothing is read twice
# limits   D, E <= 256
# oracle   ops.linear_reference.step
@triton.jit
def step_kernel(
    q, k, v, out, log_decay, real, kv, z, kv_next, z_next,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, gate_batch, gate_head,
    key_heads, scale, map_scale, eps,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    TILES: tl.constexpr, MAP: tl.constexpr, DECAY: tl.constexpr, NORMALIZE: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Take one token; see above."""
    tile, bh = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    d, e = tl.arange(0, BD), tile * BE + tl.arange(0, BE)
    at = d[:, None] * E + e[None, :]
    mask = (d < D)[:, None] & (e < E)[None, :]
    state = tl.load(kv + bh * D * E + at, mask=mask, other=0.0)
    sums = tl.load(z + bh * D + d, mask=d < D, other=0.0)
    nothing = tl.zeros((1,), tl.float32)
    keys = tl.load(k + b * k_batch + h * k_head + d, mask=d < D, other=0.0).to(tl.float32)
    values = tl.load(v + b * v_batch + h * v_head + e, mask=e < E, other=0.0).to(tl.float32)
    keys = features(keys[None, :], nothing, d, map_scale, MAP, "keys", D)
    keys = tl.reshape(keys, (BD,))
    if PADDED:
        there = tl.load(real + b) != 0
        keys = tl.where(there, keys, 0.0)
        values = tl.where(there, values, 0.0)
    if DECAY == "vector":
        gates = tl.load(log_decay + b * gate_batch + h * gate_head + d, mask=d < D, other=0.0)
        kept = tl.exp(tl.maximum(gates.to(tl.float32), FORGOTTEN))
        state *= kept[:, None]
        sums *= kept
    if DECAY == "scalar":
        gate = tl.load(log_decay + b * gate_batch + h * gate_head).to(tl.float32)
        left = tl.exp(tl.maximum(gate, FORGOTTEN))
        state *= left
        sums *= left
    state += keys[:, None] * values[None, :]
    sums += keys
    tl.store(kv_next + bh * D * E + at, state, mask=mask)
    if tile == 0:
        tl.store(z_next + bh * D + d, sums, mask=d < D)
    for g in range(G):
        raw = tl.load(q + b * q_batch + (h * G + g) * q_head + d, mask=d < D, other=0.0)
        raw = raw.to(tl.float32)[None, :]
        top, ties = largest(raw, d, map_scale, D) if MAP == "exp" else (nothing, nothing)
        query = tl.reshape(features(raw, top, d, map_scale, MAP, "queries", D), (BD,)) * scale
        row = tl.sum(query[:, None] * state, 0)
        if NORMALIZE:
            row /= tl.sum(query * sums, 0) + eps
        tl.store(out + (bh * G + g) * E + e, row.to(out.dtype.element_ty), mask=e < E)


def take_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    kv: Tensor,
    z: Tensor,
    real: Tensor | None,
    feature_map: str,
    map_scale: float,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; see :func:`linear_triton_step`."""
    q, k, v, kv, z = _dense(q), _dense(k), _dense(v), kv.contiguous(), z.contiguous()
    (batch, heads, _, d), key_heads, e = q.shape, k.shape[1], v.shape[3]
    out = v.new_empty(batch, heads, 1, e)
    kv_next, z_next = torch.empty_like(kv), torch.empty_like(z)
    gate, decay, (gate_batch, gate_head, _) = _gates(log_decay, k)
    bd = _padded(d)
    be = min(_padded(e), max(16, TILE // bd))
    tiles = -(-e // be)
    here = z if real is None else real.reshape(-1).to(torch.int8).expand(batch).contiguous()
    with _on(q.device):
        step_kernel[(batch * key_heads * tiles,)](
            q, k, v, out, gate, here, kv, z, kv_next, z_next, *q.stride()[:2], *k.stride()[:2],
            *v.stride()[:2], gate_batch, gate_head, key_heads, scale, map_scale, eps,
            D=d, E=e, G=heads // key_heads, BD=bd, BE=be, TILES=tiles, MAP=feature_map,
            DECAY=decay, NORMALIZE=normalize, PADDED=real is not None, num_warps=WARPS,
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
    real: Tensor | None,
    feature_map: str,
    map_scale: float,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, 1, E]`` and the state after the token; without gradients.

    Arguments are those of ``linear_triton``, of one token. Nothing waits for the device, and shapes
    are fixed, so a CUDA graph can hold it.
    """
    return take_step(q, k, v, log_decay, kv, z, real, feature_map, map_scale, scale, normalize, eps)


@linear_triton_step.register_fake
def _linear_triton_step_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, kv: Tensor, z: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    out = v.new_empty(*q.shape[:3], v.shape[3])
    return out, kv.new_empty(kv.shape), z.new_empty(z.shape)
