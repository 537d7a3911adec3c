"""Context parallelism of the full-matrix gate: the state before a rank's tokens.

Letters: B batch, Hkv key heads, T tokens of a rank, D key size, E value size.
"""

from __future__ import annotations

import torch

from attnzoo.contract.context_parallel import (
    SequenceShard,
    fold_earlier_states,
    log_decay_across_shard,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import MatrixState
from attnzoo.ops.matrix_gate.torch import MatrixGateInputs, state_of_tokens, total_log_decay


def state_from_earlier_ranks(
    x: MatrixGateInputs, shard: SequenceShard, sequences: Sequences | None
) -> MatrixState:
    """Return the states before this rank's tokens, one for each of its sequences.

    Args:
        x: This rank's tokens, one row a sequence, from empty states.
        shard: This rank's part of the sequences.
        sequences: Those of the tokens, if they are one row; the rows are in ``shard.layout``.
    """
    last, log_decay = state_of_tokens(x), total_log_decay(x)
    if shard.layout is not None and sequences is not None:
        last, log_decay = (
            MatrixState(*shard.layout.state_to_rows(last, sequences.count)),
            shard.layout.state_to_rows(MatrixState(log_decay, log_decay), sequences.count).kv,
        )
    decay = log_decay_across_shard(log_decay, shard).exp()
    total = fold_earlier_states(torch.cat(list(last), 3), torch.cat([decay, decay], 3), shard)
    states = shard.states(MatrixState(*total.chunk(2, 3)), sequences)
    return MatrixState(*(y.to(x.state.kv.dtype) for y in states))
