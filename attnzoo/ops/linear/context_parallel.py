"""Context parallelism of linear attention: the state before a rank's tokens.

Other letters: N = B Hkv, T tokens of a rank, C tokens of a block, F decays per token (1 or D).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.contract.context_parallel import (
    SequenceShard,
    clear_finished_sequences,
    fold_earlier_states,
    gather_from_earlier_ranks,
    log_decay_across_shard,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.common import log_decay_per_token
from attnzoo.ops.linear.torch import LOWEST_LOG_DECAY, exp_flush_denormals
from attnzoo.runtime.kernel_calls import state_dtype


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
    k, v = (shard.rows(x).to(state_dtype(k, k, v)) for x in (k, v))
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
    :math:`\ell = \sum_t g_t`, where :math:`l_t` is the sum of the log decays g after token t,
    summed from the end, so that the largest weights come from short sums.

    Args:
        k: Keys after the feature map, ``[B, Hkv, T, D]``, float32 or wider.
        v: Values, ``[B, Hkv, T, E]``, of the same dtype.
        log_decay: At most 0, ``[B, Hkv, T, F]``.

    Returns:
        S as ``[B, Hkv, D, E]``, z as ``[B, Hkv, D]``, and the sum of log decays as ``[B, Hkv, F]``.
    """
    log_decay = log_decay.to(k.dtype).clamp(min=LOWEST_LOG_DECAY)
    reverse_sums = log_decay.flip(2).cumsum(2).flip(2)
    k = k * exp_flush_denormals(pad(reverse_sums[:, :, 1:], (0, 0, 0, 1)))
    return k.mT @ v, k.sum(2), reverse_sums[:, :, 0]
