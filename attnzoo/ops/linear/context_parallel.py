"""Context parallelism of linear attention: the state before a rank's tokens.

Other letters: N = B Hkv, T tokens of a rank, C tokens of a block, F decays per token (1 or D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import (
    SequenceShard,
    accumulation_dtype,
    clear_finished_sequences,
    fold_earlier_states,
    gather_from_earlier_ranks,
    log_decay_across_shard,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.common import log_decay_per_token
from attnzoo.ops.linear.decay import LOWEST_LOG_DECAY, exp_flush_denormals
from attnzoo.runtime.derivatives import check_reverse_mode, first_derivative_only
from attnzoo.runtime.memory import empty_huge_pages

CPU_BLOCK = 128  # C; 64 to 256 take equal time
BLOCK = 4096  # on other devices, where a kernel launch costs more than a cache miss


def state_from_earlier_ranks(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    shard: SequenceShard,
    sequences: Sequences | None = None,
    *,
    causal: bool = True,
) -> LinearState:
    """Return the state over the tokens of all earlier ranks.

    Args:
        k: This rank's keys after the feature map, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: As in :func:`attnzoo.ops.linear.api.linear_attention`.
        shard: This rank's part of the sequences.
        sequences: Those of the tokens, if they are one row; the rows are in ``shard.layout``.
        causal: Whether the sums run over earlier ranks only. If not, they run over all other ranks,
            and rows must not be packed.

    Returns:
        The sums in float32 or wider; gradients flow back to the ranks that the tokens are on.
    """
    assert causal or (log_decay is None and shard.segment_ids is None)
    if log_decay is not None:
        log_decay = log_decay_per_token(log_decay, k)
        log_decay = shard.rows(log_decay)
    k, v = (shard.rows(x).to(accumulation_dtype(k, v)) for x in (k, v))
    k = clear_finished_sequences(k, shard, 0)
    if log_decay is None:
        kv, z, state_decay = k.mT @ v, k.sum(2), k.new_zeros(*k.shape[:2], 1)
    else:
        kv, z, state_decay = decayed_sums(k, v, log_decay)
    sums = torch.cat([kv, z.unsqueeze(3)], 3)
    if log_decay is None and shard.segment_ids is None:
        total = torch.zeros_like(sums)
        for (other,) in gather_from_earlier_ranks([sums], shard, from_later=not causal):
            total = total + other
    else:
        total = fold_earlier_states(
            sums, log_decay_across_shard(state_decay, shard).exp().unsqueeze(3), shard
        )
    return shard.states(LinearState(total[..., :-1], total[..., -1]), sequences)


def decayed_sums(k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the sums of keys and values under decay, without any output.

    Computes :math:`S = \sum_t e^{l_t} k_t v_t^T`, :math:`z = \sum_t e^{l_t} k_t` and
    :math:`\ell = \sum_t g_t`, where :math:`l_t` is the sum of the log decays g after token t. It
    iterates over blocks of tokens that fit into the cache, from the last to the first, so that the
    largest weights come from short sums. The backward pass recomputes the weights, from the first
    block to the last. Time O(T D E), memory beyond the results O(T D / C).

    Args:
        k: Keys after the feature map, ``[B, Hkv, T, D]``, float32 or wider.
        v: Values, ``[B, Hkv, T, E]``, of the same dtype.
        log_decay: At most 0, ``[B, Hkv, T, F]``.

    Returns:
        S as ``[B, Hkv, D, E]``, z as ``[B, Hkv, D]``, and the sum of log decays as ``[B, Hkv, F]``.
    """
    check_reverse_mode("context parallelism", k, v, log_decay, instead="one rank")
    shape = k.shape[:2]
    flat = (x.to(k.dtype).flatten(0, 1) for x in (k, v, log_decay))
    kv, z, total = _Sums.apply(*flat)  # type: ignore[no-untyped-call]
    return kv.unflatten(0, shape), z.unflatten(0, shape), total.unflatten(0, shape)


class _Sums(torch.autograd.Function):
    """The sums over k ``[N, T, D]``, v ``[N, T, E]`` and log decays ``[N, T, F]``."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
        """Iterate from the last block to the first."""
        kv = k.new_zeros(k.shape[0], k.shape[2], v.shape[2])
        z, after = (
            k.new_zeros(k.shape[0], k.shape[2]),
            log_decay.new_zeros(k.shape[0], log_decay.shape[2]),
        )
        totals = []
        for block in reversed(_blocks(k)):
            totals.append(after)
            weights, after = _weights(log_decay[:, block], after)
            k_decayed = k[:, block] * weights
            kv.baddbmm_(k_decayed.mT, v[:, block])
            z.add_(k_decayed.sum(1))
        ctx.save_for_backward(k, v, log_decay, *reversed(totals))
        return kv, z, after

    @staticmethod
    @first_derivative_only("context parallelism", "one rank")
    def backward(ctx: Any, d_kv: Tensor, d_z: Tensor, d_total: Tensor) -> tuple[Tensor, ...]:
        """Iterate from the first block to the last: a log decay acts on all tokens before it."""
        k, v, log_decay, *totals = ctx.saved_tensors
        dk, dv, dg = (empty_huge_pages(x, x.shape) for x in (k, v, log_decay))
        before = d_total.unsqueeze(1)
        for block, after in zip(_blocks(k), totals, strict=True):
            weights, _ = _weights(log_decay[:, block], after)
            d_k_decayed = torch.baddbmm(d_z.unsqueeze(1), v[:, block], d_kv.mT)
            here = torch.mul(d_k_decayed, weights, out=dk[:, block])
            torch.bmm(k[:, block] * weights, d_kv, out=dv[:, block])
            of_weights = here * k[:, block]
            if log_decay.shape[2] == 1:
                of_weights = of_weights.sum(2, keepdim=True)
            up_to = of_weights.cumsum(1).add_(before)
            dg[:, block] = torch.cat([before.expand_as(up_to[:, :1]), up_to[:, :-1]], 1)
            before = up_to[:, -1:]
        return dk, dv, dg.masked_fill_(log_decay < LOWEST_LOG_DECAY, 0)


def _blocks(k: Tensor) -> list[slice]:
    size = CPU_BLOCK if k.device.type == "cpu" else BLOCK
    return [slice(start, start + size) for start in range(0, k.shape[1], size)]


def _weights(log_decay: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of a block's tokens, ``[N, C, F]``, and the log decay from its start on.

    ``after`` is the sum of the log decays after the block, ``[N, F]``.
    """
    reverse_sums = log_decay.clamp(min=LOWEST_LOG_DECAY).flip(1).cumsum(1).flip(1)
    reverse_sums = reverse_sums.add_(after.unsqueeze(1))
    later = torch.cat([reverse_sums[:, 1:], after.unsqueeze(1)], 1)
    return exp_flush_denormals(later), reverse_sums[:, 0]
