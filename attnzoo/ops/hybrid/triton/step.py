"""Triton kernels of one decoding step of the window hybrid, which overwrite the state.

The first kernel computes the output and the sums of values, several programs per head. All of them
read the rest of the state, which the second kernel therefore writes.

With slots, the state is a pool, of which each token reads and writes one row; -1: none of them.

Other letters: W window, N first tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.ops.linear.triton.decay import LOG_ZERO
from attnzoo.ops.linear.triton.launch import gate_and_strides
from attnzoo.ops.linear.triton.parts import mask_if
from attnzoo.runtime.triton_products import block_size, contiguous_rows, device_context

TILE = 4096  # elements of the sums per program
WINDOW_TILE = 8192  # elements of the window's keys that a program reads at once
WARPS = 4


@triton.jit
def load_token(x, token, column, COLUMNS: tl.constexpr):
    """Load one row in float32; padding columns are zeros."""
    return tl.load(x + token + column, mask=column < COLUMNS, other=0.0).to(tl.float32)


@triton.jit
def load_slot(slots, b, SLOTS: tl.constexpr):
    """Return the row of a token in the pool of states, or a negative number for no token."""
    if SLOTS:
        return tl.load(slots + b).to(tl.int64)
    return b


@triton.jit
def load_channel_decay(log_decay, token, f, F: tl.constexpr, DECAY: tl.constexpr):
    """Return the decay of each feature, or one decay for all features."""
    if DECAY == "vector":
        gates = load_token(log_decay, token, f, F)
    else:
        gates = tl.load(log_decay + token).to(tl.float32)
    return tl.exp(tl.maximum(gates, LOG_ZERO))


# One token: key n - W leaves the window and is added to the sums S and z of earlier keys, and the
# new key enters the window. With s_j = scale q k_j over the window, their log-sum-exp lse, and the
# logit f of the sums,
#     o = (sum_j e^(s_j - lse + near) v_j + e^(f - m) q_f S) / (e^near + e^(f - m) q_f z),
# where m is the larger of lse and f + log(q_f z), and near is lse - m. RELATIVE: lse is 0 in both.
#
# grid     (B * Hkv * tiles): one program updates one tile [F, BE] of one head's sums
# reads    tokens: q, k, v and features, with stride 1 in the last dimension; with SLOTS: slots [B];
#          the state, contiguous: keys [N + W, D], values [N + W, E], features [W, F],
#          kv [F, E + 1], whose last column equals z [F], and seen, of each head or row
# writes   out [B, H, E]; the columns of values in kv; seen_before [B], which the next kernel reads
# limits   D, E, F <= 256
# oracle   hybrid_attention(impl="reference"), on a GPU and with TRITON_INTERPRET=1
@triton.jit
def hybrid_step_kernel(
    q, k, v, q_features, k_features, log_decay, log_weight, slots,
    keys, values, features, kv, z, seen, out, seen_before,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, fq_batch, fq_head, gate_batch, gate_head,
    weight_batch, weight_head, key_heads, scale, min_weight,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
    G: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, BW: tl.constexpr,
    TILES: tl.constexpr, DECAY: tl.constexpr, SLOTS: tl.constexpr, RELATIVE: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of one head, and update a tile of its sums; see above."""
    tile, bh = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    d, f, e = tl.arange(0, BD), tl.arange(0, BF), tile * BE + tl.arange(0, BE)
    slot = load_slot(slots, b, SLOTS)
    valid, slot = slot >= 0, tl.maximum(slot, 0)
    sh, count = slot * key_heads + h, tl.load(seen + slot)
    oldest = count % W
    first_row, mask = sh * (N + W), (f < F)[:, None] & (e < E)[None, :]
    leaving = load_token(features, (sh * W + oldest) * F, f, F)
    leaving = tl.where(count >= N + W, leaving, 0.0)
    sums = kv + sh * F * (E + 1) + f[:, None] * (E + 1) + e[None, :]
    state = tl.load(sums, mask=mask, other=0.0)
    z_sums = load_token(z, sh * F, f, F)
    if DECAY != "none":
        decay = load_channel_decay(log_decay, b * gate_batch + h * gate_head, f, F, DECAY)
        z_sums *= decay
        state *= decay[:, None] if DECAY == "vector" else decay
    state += leaving[:, None] * load_token(values, (first_row + N + oldest) * E, e, E)[None, :]
    z_sums += leaving
    tl.store(sums, state, mask=mask_if(mask, valid))
    if (h == 0) & (tile == 0):
        tl.store(seen_before + b, count)
    new_key = load_token(k, b * k_batch + h * k_head, d, D)
    new_value = load_token(v, b * v_batch + h * v_head, e, E)
    outside = count + 1 - W  # tokens before the window, if any
    for g in range(G):
        head = h * G + g
        query = load_token(q, b * q_batch + head * q_head, d, D) * scale
        row_max, total = tl.sum(query * new_key, 0), tl.full((), 1.0, tl.float32)
        near = new_value
        for start in range(0, N + W, BW):
            place = start + tl.arange(0, BW)
            row = place - N
            visible = tl.where(row < 0, place < outside, (row < count) & (row != oldest))
            visible = visible & (row < W)
            offsets = (first_row + place).to(tl.int64)[:, None]
            of_key = visible[:, None] & (d < D)[None, :]
            of_value = visible[:, None] & (e < E)[None, :]
            old_keys = tl.load(keys + offsets * D + d[None, :], mask=of_key, other=0.0)
            scores = tl.sum(old_keys.to(tl.float32) * query[None, :], 1)
            scores = tl.where(visible, scores, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 0))
            weights, factor = tl.exp(scores - new_max), tl.exp(row_max - new_max)
            old_values = tl.load(values + offsets * E + e[None, :], mask=of_value, other=0.0)
            near = near * factor + tl.sum(weights[:, None] * old_values, 0)
            total = total * factor + tl.sum(weights, 0)
            row_max = new_max
        query = load_token(q_features, b * fq_batch + head * fq_head, f, F)
        far, far_total = tl.sum(query[:, None] * state, 0), tl.sum(query * z_sums, 0)
        logit = tl.load(log_weight + b * weight_batch + head * weight_head)
        if MEAN:
            logit -= tl.log(tl.maximum(outside - N, 1).to(tl.float32))
        lse = tl.zeros_like(row_max) if RELATIVE else row_max + tl.log(total)
        has_linear = far_total > min_weight
        largest = tl.maximum(lse, logit + tl.log(tl.maximum(far_total, min_weight)))
        largest = tl.where(has_linear, largest, lse)
        near_weight = tl.exp(lse - largest)
        far_weight = tl.where(has_linear, tl.exp(logit - largest), 0.0)
        result = near_weight / total * near + far_weight * far
        result = tl.where(valid, result / (near_weight + far_weight * far_total), 0.0)
        tl.store(out + (bh * G + g) * E + e, result.to(out.dtype.element_ty), mask=e < E)


# The rest of the next state: the new token in the window, the sums of weights, and the count.
#
# grid     (B * Hkv): one program writes one head
# reads    the token and the state as above, and seen_before
# writes   the rows of the new token in keys, values and features; z, the last column of kv; seen
@triton.jit
def hybrid_store_kernel(
    k, v, k_features, log_decay, slots, keys, values, features, kv, z, seen, seen_before,
    k_batch, k_head, v_batch, v_head, fk_batch, fk_head, gate_batch, gate_head, key_heads,
    D: tl.constexpr, E: tl.constexpr, F: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr, DECAY: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the tensors that several programs of :func:`hybrid_step_kernel` read; see above."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // key_heads, bh % key_heads
    d, e, f = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BF)
    slot = load_slot(slots, b, SLOTS)
    valid, slot = slot >= 0, tl.maximum(slot, 0)
    sh, count = slot * key_heads + h, tl.load(seen_before + b)
    oldest = count % W
    of_features = features + (sh * W + oldest) * F + f
    leaving = tl.load(of_features, mask=f < F, other=0.0).to(tl.float32)
    z_sums = load_token(z, sh * F, f, F)
    if DECAY != "none":
        z_sums *= load_channel_decay(log_decay, b * gate_batch + h * gate_head, f, F, DECAY)
    z_sums += tl.where(count >= N + W, leaving, 0.0)
    key = tl.load(k + b * k_batch + h * k_head + d, mask=d < D)
    value = load_token(v, b * v_batch + h * v_head, e, E)
    feature = tl.load(k_features + b * fk_batch + h * fk_head + f, mask=f < F)
    tl.debug_barrier()  # other threads have read the features that this one overwrites
    of_token = mask_if(f < F, valid)
    tl.store(of_features, feature, mask=of_token)
    tl.store(z + sh * F + f, z_sums, mask=of_token)
    tl.store(kv + (sh * F + f) * (E + 1) + E, z_sums, mask=of_token)
    row = sh * (N + W) + N + oldest
    tl.store(keys + row * D + d, key, mask=mask_if(d < D, valid))
    tl.store(values + row * E + e, value, mask=mask_if(e < E, valid))
    if N > 0:
        is_first, row = valid & (count < N), sh * (N + W) + count
        tl.store(keys + row * D + d, key, mask=mask_if(d < D, is_first))
        tl.store(values + row * E + e, value, mask=mask_if(e < E, is_first))
    if h == 0:
        tl.store(seen + slot, count + 1, mask=valid)


def launch_hybrid_step(
    q: Tensor, k: Tensor, v: Tensor, q_features: Tensor, k_features: Tensor,
    log_decay: Tensor | None, log_weight: Tensor, slots: Tensor | None,
    keys: Tensor, values: Tensor, features: Tensor, kv: Tensor,
    z: Tensor, seen: Tensor, scale: float, relative: bool, mean: bool, min_weight: float,
) -> Tensor:  # fmt: skip
    """Launch both kernels; see :func:`hybrid_triton_step_`."""
    q, k, v, q_features, k_features = map(contiguous_rows, (q, k, v, q_features, k_features))
    (batch, heads, _, d), key_heads, e = q.shape, k.shape[1], v.shape[3]
    window, size = features.shape[2:]
    out, seen_before = v.new_empty(batch, heads, 1, e), seen.new_empty(batch)
    gate, decay, (gate_batch, gate_head, _) = gate_and_strides(log_decay, k_features)
    bd, bf = block_size(d), block_size(size)
    be = min(block_size(e), max(16, TILE // bf))
    bw = min(64, max(16, WINDOW_TILE // bd), block_size(keys.shape[2]))
    tiles = -(-e // be)
    rows = z if slots is None else slots.contiguous()
    shared = {
        "D": d, "E": e, "F": size, "W": window, "N": keys.shape[2] - window, "BD": bd, "BF": bf,
        "DECAY": decay, "SLOTS": slots is not None,
    }  # fmt: skip
    with device_context(q.device):
        hybrid_step_kernel[(batch * key_heads * tiles,)](
            q, k, v, q_features, k_features, gate, log_weight, rows, keys, values,
            features, kv, z, seen, out, seen_before, *q.stride()[:2], *k.stride()[:2],
            *v.stride()[:2], *q_features.stride()[:2], gate_batch, gate_head,
            *log_weight.stride()[:2], key_heads, scale, min_weight, G=heads // key_heads, BE=be,
            BW=bw, TILES=tiles, RELATIVE=relative, MEAN=mean,
            num_warps=WARPS, **shared,
        )  # fmt: skip
        hybrid_store_kernel[(batch * key_heads,)](
            k, v, k_features, gate, rows, keys, values, features, kv, z, seen, seen_before,
            *k.stride()[:2], *v.stride()[:2], *k_features.stride()[:2], gate_batch, gate_head,
            key_heads, BE=block_size(e), num_warps=1, **shared,
        )  # fmt: skip
    return out


@torch.library.custom_op(
    "attnzoo::hybrid_triton_step_",
    mutates_args=("keys", "values", "features", "kv", "z", "seen"),
)
def hybrid_triton_step_(
    q: Tensor, k: Tensor, v: Tensor, q_features: Tensor, k_features: Tensor,
    log_decay: Tensor | None, log_weight: Tensor, slots: Tensor | None,
    keys: Tensor, values: Tensor, features: Tensor, kv: Tensor,
    z: Tensor, seen: Tensor, scale: float, relative: bool, mean: bool, min_weight: float,
) -> Tensor:  # fmt: skip
    """Return the output ``[B, H, 1, E]`` of one token, and overwrite the state; no gradients.

    The launches do not synchronise and shapes are fixed, so CUDA graphs can capture them.

    Args:
        q: Query, ``[B, H, 1, D]``.
        k: Key, ``[B, Hkv, 1, D]``.
        v: Value, ``[B, Hkv, 1, E]``.
        q_features: ``[B, H, 1, F]``.
        k_features: ``[B, Hkv, 1, F]``.
        log_decay: As in ``linear_attention``.
        log_weight: Logit of the linear branch, ``[B, H, 1, 1]``, float32.
        slots: ``[B]``, the row of each token in the state, which is a pool; -1 for no token, which
            leaves the state as it is and gives zeros. ``None``: token b is in row b.
        keys: This tensor and the five after it are those of a ``HybridState``, contiguous.
        values: See ``keys``.
        features: See ``keys``.
        kv: See ``keys``.
        z: See ``keys``.
        seen: See ``keys``.
        scale: Multiplies the products of query and keys in the window.
        relative: As in ``LinearBranch``.
        mean: As in ``LinearBranch``.
        min_weight: A smaller sum of linear weights counts as 0.
    """
    return launch_hybrid_step(
        q, k, v, q_features, k_features, log_decay, log_weight, slots, keys,
        values, features, kv, z, seen, scale, relative, mean, min_weight,
    )  # fmt: skip


@hybrid_triton_step_.register_fake
def _hybrid_triton_step_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])
