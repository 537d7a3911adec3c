"""The first tokens of each sequence, to which queries attend outside their window too.

Causal models give them much weight, which a window alone would spread over other keys; see Xiao et
al., 2023, arXiv:2309.17453 (StreamingLLM). Keys keep the positions that the model gave them: they
are not rotated again. Other letters: G first tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.window.pattern import GlobalIndices, global_indices


class SinkKeys(NamedTuple):
    """The first real keys of each row, and the others."""

    indices: GlobalIndices  # of the first keys, in increasing order
    others: Tensor  # [1 or B, S] bool: real keys that are not among the first

    def columns(self, batch: int) -> Tensor:
        """Return the positions of the first keys, ``[B, G]``."""
        return self.indices.positions.expand(batch, -1)

    def seen(self, queries: int, *, causal: bool, offset: int = 0) -> Tensor:
        """Return which of the first keys each query attends to, ``[1 or B, T, G]`` bool.

        Args:
            queries: T.
            causal: Whether later keys are masked.
            offset: Position of query 0 among the keys.
        """
        positions, valid = (x[:, None, :] for x in self.indices)
        if not causal:
            return valid.expand(-1, queries, -1)
        query = torch.arange(queries, device=positions.device)[:, None] + offset
        return valid & (positions <= query)


def split_sinks(mask: AttentionMask, keys: int, device: torch.device) -> SinkKeys:
    """Return the first ``mask.num_sinks`` real keys of each row, which has one sequence.

    Args:
        mask: Padding and the number of first keys; no segments.
        keys: S.
        device: Device of the keys.
    """
    assert mask.segment_ids is None
    is_sink = mask.sinks(keys, device)
    indices = global_indices(is_sink, mask.num_sinks)
    assert indices is not None
    real = torch.ones_like(is_sink) if mask.padding is None else mask.padding
    return SinkKeys(indices, real & ~is_sink)
