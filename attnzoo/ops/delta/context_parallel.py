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
    size, width = x.k.shape[3], x.v.shape[3]
    eye = torch.eye(size, dtype=x.state.kv.dtype, device=x.k.device)
    first = torch.cat([x.state.kv, eye.expand(*x.k.shape[:2], -1, -1)], 3)
    _, after = run_chunks(x._replace(q=x.k, v=pad(x.v, (0, size)), state=DeltaState(first)))
    last, transition = after.kv.split([width, size], 3)
    if (starts := shard.segment_starts()) is not None:
        ended = starts[0][:, shard.rank] | starts[1][:, shard.rank]
        transition = transition.masked_fill(ended[:, None, None, None], 0)
    total = x.state.kv
    for other, other_transition in gather_from_earlier_ranks([last, transition], shard):
        total = other_transition @ total + other
    return DeltaState(reset_new_sequences(total, shard))
