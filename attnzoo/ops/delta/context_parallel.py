r"""Context parallelism of the delta rule: the state before a rank's tokens.

Over a shard, the recurrence is the affine map :math:`S \mapsto P S + Q`: P is the product of the
tokens' transition matrices, and Q the state from zero. A rank computes both in one pass, as the
state of D + E value channels, of which D start at the identity and are written nothing. It sends
D (D + E) numbers per key head, whatever T is.
Letters: B batch, Hkv key heads, T tokens of a rank, D key size, E value size.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from attnzoo.contract.context_parallel import (
    SequenceShard,
    clear_finished_sequences,
    gather_from_earlier_ranks,
    reset_new_sequences,
)
from attnzoo.contract.states import DeltaState
from attnzoo.ops.delta.chunk import run_chunks
from attnzoo.ops.delta.common import DeltaInputs


def state_from_earlier_ranks(x: DeltaInputs, shard: SequenceShard) -> DeltaState:
    """Return the state over the tokens of all earlier ranks, from this rank's inputs.

    Gradients flow back to the ranks that the tokens are on.
    """
    k, v, beta, log_decay = x.k, x.v, x.beta, x.log_decay
    if shard.layout is not None and log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(k.shape[:3])  # none at padding
    log_decay = log_decay if log_decay is None or log_decay.dim() == 1 else shard.rows(log_decay)
    k, v, beta = (shard.rows(y) for y in (k, v, beta))
    k = clear_finished_sequences(k, shard, 0)
    size, width = k.shape[3], v.shape[3]
    eye = torch.eye(size, dtype=x.state_dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    first = DeltaState(pad(eye, (width, 0)))
    _, after = run_chunks(
        DeltaInputs(k, k, pad(v, (0, size)), beta, log_decay, first, x.scale, x.chunk_size)
    )
    assert after is not None
    last, transition = after.kv.split([width, size], 3)
    if (starts := shard.segment_starts()) is not None:
        ended = starts[0][:, shard.rank] | starts[1][:, shard.rank]
        transition = transition.masked_fill(ended[:, None, None, None], 0)
    total = torch.zeros_like(last)
    for other, other_transition in gather_from_earlier_ranks([last, transition], shard):
        total = other_transition @ total + other
    return shard.states(DeltaState(reset_new_sequences(total, shard)), x.sequences)
