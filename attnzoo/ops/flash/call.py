"""The inputs of one call of fused softmax attention."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.window.band import LocalOptions
from attnzoo.ops.window.pattern import Band, split_sinks


class FlashCall(NamedTuple):
    """The inputs of one call, as in :func:`attnzoo.ops.flash.api.flash_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask
    scale: float
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    def region_reasons(self) -> list[str]:
        """Return why kernels that compute the plain softmax of a window do not support the call."""
        mask, queries, keys = self.mask, self.q.shape[2], self.k.shape[2]
        reasons = []
        if mask.function is not None:
            reasons.append("the mask is a function")
        if self.bias is not None or self.sinks is not None:
            reasons.append("a bias or sinks are given")
        if self.dropout > 0:
            reasons.append(f"attention dropout of {self.dropout} is given")
        if not isinstance(mask.q_offset, int):
            if mask.segment_ids is not None:
                reasons.append("the position of the first query is a tensor, beside segments")
        elif not 0 <= mask.q_offset <= keys - queries:
            reasons.append(
                f"{queries} queries from position {mask.q_offset} on are not among the {keys} keys"
            )
        elif mask.segment_ids is not None and mask.q_offset != keys - queries:
            reasons.append("segments are given, and the queries are not the last of the keys")
        return reasons

    def band_kernel_reasons(self) -> list[str]:
        """Return :meth:`region_reasons`, and that a kernel takes the position of query 0 as int."""
        reasons = self.region_reasons()
        if not isinstance(self.mask.q_offset, int):
            reasons.append("the position of the first query is a tensor")
        return reasons

    def band_options(self) -> LocalOptions:
        """Return the window, or all keys as one, with the masks and the first tokens."""
        mask, keys = self.mask, self.k.shape[2]
        before, after = (min(side, keys) for side in mask.window or (keys, keys))
        band = Band(before, 0 if mask.causal else after, 1)
        options = LocalOptions(
            band, mask.causal, self.scale, mask.padding, segment_ids=mask.segment_ids
        )
        if mask.num_sinks:
            sinks = split_sinks(mask, keys, self.k.device)
            options = replace(options, key_mask=sinks.others, global_indices=sinks.indices)
        return options
