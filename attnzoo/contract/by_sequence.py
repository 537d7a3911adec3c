"""Run a backend on the sequences of padded or packed rows: in one row, or in rows of their own.

Backends with the capability ``sequences`` get one row of all sequences
(:mod:`attnzoo.contract.sequences`). For those with neither that nor ``packing``, each segment
becomes a row of a padded batch, so no information passes between segments, and the cost is that of
the separate sequences. The lengths are needed on the host, so a compiled graph supports rows of one
segment only, which it asserts when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.padding import values_are_known
from attnzoo.contract.sequences import (
    PACKED_IN_GRAPH,
    sequences_of_mask,
    sequences_of_rows,
    without_needless_padding,
)
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import UnsupportedError


def attend_to_sequences(
    attend: Callable[[AttentionInputs], AttentionOutput],
    inputs: AttentionInputs,
    *,
    crossed: bool = False,
) -> AttentionOutput:
    """Run ``attend`` on one row of sequences instead of padded or packed rows.

    Args:
        attend: Gets inputs with ``sequences``, or ``slots`` of one token, and a mask without
            padding and segments.
        inputs: The inputs of the rows.
        crossed: Whether queries are other tokens than keys; the mask is of keys.
    """
    q, hidden, state = inputs.q, inputs.hidden_states, inputs.state
    mask = without_needless_padding(inputs.mask)
    batch, tokens, padding = inputs.k.shape[0], inputs.k.shape[2], mask.padding
    plain = replace(mask, padding=None, segment_ids=None)
    if mask.segment_ids is None and padding is None:
        return attend(inputs._replace(mask=plain))
    if mask.segment_ids is None and padding is not None and tokens == 1 and state is not None:
        return _attend_to_real_tokens(attend, inputs._replace(mask=plain), padding[:, 0])
    needs_count = state is not None or inputs.return_state
    if mask.segment_ids is not None and needs_count and not values_are_known(mask.segment_ids):
        assert_one_segment(mask.segment_ids)
        inputs = inputs._replace(mask=replace(mask, segment_ids=None))
        return attend_to_sequences(attend, inputs)
    sequences, layout = sequences_of_mask(mask, (batch, tokens), q.device)
    query_sequences, query_layout = None, layout
    if crossed:
        query_sequences, query_layout = sequences_of_rows((batch, q.shape[2]), q.device)
    if state is not None:
        state = layout.state_to_sequences(state, sequences.count)
    shard = inputs.shard
    output = attend(
        inputs._replace(
            q=query_layout.to_row(q),
            k=layout.to_row(inputs.k),
            v=layout.to_row(inputs.v),
            hidden_states=None if hidden is None else layout.to_row(hidden, 1),
            mask=plain,
            shard=None if shard is None else replace(shard, layout=layout),
            sequences=sequences,
            query_sequences=query_sequences,
            state=state,
            reuse_state=False,
        )
    )
    last = output.state
    if last is not None:
        last = layout.state_to_rows(last, sequences.count)
    return output._replace(out=query_layout.to_rows(output.out), state=last)


def _attend_to_real_tokens(
    attend: Callable[[AttentionInputs], AttentionOutput], inputs: AttentionInputs, real: Tensor
) -> AttentionOutput:
    """Run one token of each row whose token is real, ``[B]`` bool; other states stay."""
    state = inputs.state
    assert state is not None
    if not inputs.reuse_state:
        state = type(state)(*(x.clone() for x in state))
    slots = torch.where(real, torch.arange(real.shape[0], device=real.device), -1)
    is_real = real[:, None, None, None]
    q, k, v = (torch.where(is_real, x, 0) for x in (inputs.q, inputs.k, inputs.v))
    hidden = inputs.hidden_states
    hidden = None if hidden is None else torch.where(real[:, None, None], hidden, 0)
    return attend(inputs._replace(q=q, k=k, v=v, hidden_states=hidden, state=state, slots=slots))


def assert_one_segment(segment_ids: Tensor) -> None:
    """Assert, when a compiled graph runs, that no row has several packed segments."""
    torch._assert_async((segment_ids == segment_ids[:, :1]).all(), PACKED_IN_GRAPH)


def unpack_and_attend(
    attend: Callable[[AttentionInputs], AttentionOutput], inputs: AttentionInputs
) -> AttentionOutput:
    """Run ``attend`` on each packed segment as a separate sequence.

    The returned state is that of the last segment of each row.
    """
    mask = inputs.mask
    assert mask.segment_ids is not None
    if torch.compiler.is_compiling():
        assert_one_segment(mask.segment_ids)
        return attend(inputs._replace(mask=replace(mask, segment_ids=None)))
    if inputs.bias is not None or inputs.q.shape[2] != inputs.k.shape[2]:
        raise UnsupportedError(
            "packed rows cannot be unpacked when a bias is given or the queries are fewer than "
            "the keys; run the sequences as rows of a batch"
        )
    index, exists = segment_index(mask.segment_ids)
    tokens = exists.nonzero(as_tuple=True)

    def unpack(x: Tensor) -> Tensor:  # [B, H, S, D] -> [N, H, L, D]
        return x.transpose(1, 2).flatten(0, 1)[index].mul(exists[..., None, None]).transpose(1, 2)

    padding = exists if mask.padding is None else exists & mask.padding.flatten()[index]
    hidden = inputs.hidden_states
    if hidden is not None:
        hidden = hidden.flatten(0, 1)[index].mul(exists.unsqueeze(2))
    output = attend(
        inputs._replace(
            q=unpack(inputs.q),
            k=unpack(inputs.k),
            v=unpack(inputs.v),
            hidden_states=hidden,
            mask=replace(mask, padding=padding, segment_ids=None),
        )
    )
    batch, heads, length, _ = inputs.q.shape
    flat = output.out.new_zeros(batch * length, heads, output.out.shape[-1])
    flat = flat.index_put((index[tokens],), output.out.transpose(1, 2)[tokens])
    state = output.state
    if state is not None:
        last = torch.cat(
            [index[1:, 0] % length == 0, index.new_ones(1, dtype=torch.bool)]
        ).nonzero()[:, 0]
        state = type(state)(*(x.index_select(0, last) for x in state))
    out = flat.view(batch, length, heads, -1).transpose(1, 2)
    return AttentionOutput(out, state, impl=output.impl)


def segment_index(segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each segment's tokens in the flattened rows, and which exist, [N, L]."""
    batch, length = segment_ids.shape
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([batch * length])])
    lengths = ends - starts
    steps = torch.arange(int(lengths.max()), device=segment_ids.device)
    exists = steps < lengths[:, None]
    return torch.where(exists, starts[:, None] + steps, starts[:, None]), exists
