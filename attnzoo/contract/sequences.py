"""Unpack packed rows to one sequence per row, attend, and pack the outputs again.

For backends without ``packing``: each segment becomes a row of a padded batch, so no information
passes between segments, and the cost is that of the separate sequences. The lengths are needed on
the host, so a compiled graph supports rows of one segment only, which it asserts when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import UnsupportedError

PACKED_IN_GRAPH = (
    "packed rows cannot be unpacked under torch.compile; do not compile, or pass attention_mask "
    "(all ones without padding), with which position_ids do not mean packing"
)


def unpack_and_attend(
    attend: Callable[[AttentionInputs], AttentionOutput], inputs: AttentionInputs
) -> AttentionOutput:
    """Run ``attend`` on each packed segment as a separate sequence.

    The returned state is that of the last segment of each row.
    """
    mask = inputs.mask
    assert mask.segment_ids is not None
    if torch.compiler.is_compiling():
        ids = mask.segment_ids
        torch._assert_async((ids == ids[:, :1]).all(), PACKED_IN_GRAPH)
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
