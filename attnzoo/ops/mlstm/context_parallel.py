"""Context parallelism of mLSTM: the state before a rank's tokens.

Letters: B batch, Hkv key heads, T tokens of a rank, D key size, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.contract.context_parallel import (
    LOG_ZERO,
    SequenceShard,
    accumulation_dtype,
    clear_finished_sequences,
    gather_from_earlier_ranks,
    log_decay_across_shard,
    reset_new_sequences,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import StabilizedState
from attnzoo.ops.linear.decay import LOWEST_LOG_DECAY


def state_from_earlier_ranks(
    k: Tensor,
    v: Tensor,
    log_forget: Tensor,
    log_input: Tensor,
    shard: SequenceShard,
    sequences: Sequences | None,
) -> StabilizedState:
    """Return the state of mLSTM over the tokens of all earlier ranks.

    Args:
        k: This rank's keys after the feature map, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        log_forget: ``[B, Hkv, T]``, at most 0.
        log_input: ``[B, Hkv, T]``, of any size.
        shard: This rank's part of the sequences.
        sequences: Those of the tokens, if they are one row; the rows are in ``shard.layout``.

    Returns:
        The sums in float32 or wider, divided by ``exp(m)``.
    """
    log_weight = log_input.unsqueeze(3)
    if shard.layout is not None:  # padding has weight 0 and decays nothing
        is_real = shard.rows(torch.ones_like(log_weight)) > 0
        log_weight = shard.rows(log_weight).masked_fill(~is_real, LOG_ZERO)
        k, v, log_forget = (shard.rows(x) for x in (k, v, log_forget.unsqueeze(3)))
        log_forget = log_forget.squeeze(3)
    k, v = (x.to(accumulation_dtype(k, v)) for x in (k, v))
    # Summed from the end, so that the largest weights come from short sums
    log_decay = log_forget.to(k.dtype).clamp(min=LOWEST_LOG_DECAY)
    reverse_sums = log_decay.flip(2).cumsum(2).flip(2).unsqueeze(3)
    later = pad(reverse_sums[:, :, 1:], (0, 0, 0, 1))
    log_state_decay = log_decay_across_shard(reverse_sums[:, :, 0], shard)
    log_weight = (later + log_weight.to(k.dtype)).clamp(min=LOG_ZERO)
    log_weight = clear_finished_sequences(log_weight, shard, LOG_ZERO)
    maximum = log_weight.detach().amax(2)  # [B, Hkv, 1]
    k = k * (log_weight - maximum.unsqueeze(2)).exp()
    sums = torch.cat([k.mT @ v, k.sum(2).unsqueeze(3)], 3)
    total, m = torch.zeros_like(sums), torch.zeros_like(maximum)
    for other, other_decay, other_m in gather_from_earlier_ranks(
        [sums, log_state_decay, maximum], shard
    ):
        new_m = torch.maximum(other_decay.detach() + m, other_m)
        decay, weight = (other_decay + m - new_m).exp(), (other_m - new_m).exp()
        total, m = total * decay.unsqueeze(3) + other * weight.unsqueeze(3), new_m
    total, m = (reset_new_sequences(x, shard) for x in (total, m.squeeze(2).detach()))
    return shard.states(StabilizedState(total[..., :-1], total[..., -1], m), sequences)
