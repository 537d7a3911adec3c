"""Packed rows taken apart into one sequence per row, and put together again.

For backends without a packed form of their own: each segment becomes a row of a padded batch, so
nothing can leak between segments, and the cost is that of the separate sequences. Needs the lengths
on the host, so it cannot be traced by ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.backends.inputs import AttentionInputs
from attnzoo.errors import UnsupportedError
from attnzoo.state import AttentionOutput


def attend_apart(
    attend: Callable[[AttentionInputs], AttentionOutput], inputs: AttentionInputs
) -> AttentionOutput:
    """Run ``attend`` on every packed segment as a sequence of its own.

    The state is that of each row's last segment.
    """
    mask = inputs.mask
    assert mask.segment_ids is not None
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "packed rows cannot be taken apart under torch.compile; do not compile, or pass "
            "attention_mask (all ones when nothing is padded) so that position_ids are not read as "
            "packing"
        )
    if inputs.bias is not None or inputs.q.shape[2] != inputs.k.shape[2]:
        raise UnsupportedError(
            "packed rows cannot be taken apart when a bias is given or the queries are fewer than "
            "the keys; run the sequences as rows of a batch"
        )
    index, real = segment_index(mask.segment_ids)
    tokens = real.nonzero(as_tuple=True)

    def apart(x: Tensor) -> Tensor:  # [B, H, S, D] -> [N, H, L, D]
        return x.transpose(1, 2).flatten(0, 1)[index].transpose(1, 2)

    padding = real if mask.padding is None else real & mask.padding.flatten()[index]
    hidden = None if inputs.hidden_states is None else inputs.hidden_states.flatten(0, 1)[index]
    output = attend(
        inputs._replace(
            q=apart(inputs.q),
            k=apart(inputs.k),
            v=apart(inputs.v),
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
    return AttentionOutput(flat.view(batch, length, heads, -1).transpose(1, 2), state)


def segment_index(segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each segment's tokens stand in the flattened rows ``[N, L]``; which exist."""
    batch, length = segment_ids.shape
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([batch * length])])
    lengths = ends - starts
    steps = torch.arange(int(lengths.max()), device=segment_ids.device)
    real = steps < lengths[:, None]
    return torch.where(real, starts[:, None] + steps, starts[:, None]), real
