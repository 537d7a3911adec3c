"""Attention masks: causality, padding, packing, a sliding window, or any function.

:meth:`AttentionMask.dense` builds the mask as a tensor; before that, it takes no quadratic memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.runtime.kernel_calls import is_mapped

Window = tuple[int, int]  # keys before and after the position of the query
MAX_DISTANCE = 2**62  # of a window's end; no sequence is longer


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """Mask of one attention call.

    Attributes:
        causal: Whether a query attends to keys up to its own position only.
        padding: ``[B, S]`` bool, false at padding; ``None`` without padding. What keys
            and values hold there has no effect. The exceptions are NaN and infinity in softmax,
            flash and longformer attention: their weight is 0, and 0 times NaN is NaN. Queries at
            padding must be finite in training, for the same reason.
        segment_ids: ``[B, S]`` integers, non-decreasing; tokens attend within their segment
            (packed sequences).
        window: ``(before, after)``: a query at position i attends to positions ``i - before`` to
            ``i + after``.
        num_sinks: With a window: the first real keys of each sequence, to which queries outside
            their window attend too.
        q_offset: Position of query 0 minus position of key 0.
        function: For masks that the other fields cannot describe: returns the dense mask,
            ``[B, 1 or H, T, S]`` bool, with the other fields applied. Only backends with
            ``arbitrary_mask`` support it.
        function_name: Name of that mask, for error messages.
    """

    causal: bool = False
    padding: Tensor | None = None
    segment_ids: Tensor | None = None
    window: Window | None = None
    num_sinks: int = 0
    q_offset: int | Tensor = 0
    function: Callable[[], Tensor] | None = None
    function_name: str = ""

    def dense(self, q_length: int, kv_length: int, device: torch.device) -> Tensor | None:
        """Return the dense mask, ``[1 or B, 1 or H, T, S]`` bool, true where a query attends.

        ``None`` if every query attends to all keys. Takes quadratic memory.
        """
        if self.function is not None:
            return self.function()
        parts: list[Tensor] = []
        if self.causal or self.window is not None:
            queries = torch.arange(q_length, device=device)[:, None] + self.q_offset
            distance = torch.arange(kv_length, device=device) - queries
            before, after = self.window if self.window is not None else (None, None)
            if self.window is not None:  # also a window that int64 does not contain
                before, after = self.window
                before, after = min(before, MAX_DISTANCE), min(after, MAX_DISTANCE)
            if before is not None:
                parts.append(distance >= -before)
            if after is not None and not self.causal:
                parts.append(distance <= after)
            parts = [part[None, None] for part in parts]
            if self.window is not None and self.num_sinks:
                is_sink = self.sinks(kv_length, device)[:, None, None, :]
                parts = [part | is_sink for part in parts]
            if self.causal:
                parts.append((distance <= 0)[None, None])
        if self.padding is not None:
            parts.append(self.padding[:, None, None, :])
        if self.segment_ids is not None:
            query_ids = self.segment_ids[:, kv_length - q_length :]
            parts.append((query_ids[:, :, None] == self.segment_ids[:, None, :])[:, None])
        if not parts:
            return None
        mask = parts[0]
        for part in parts[1:]:
            mask = mask & part
        return mask

    def sinks(self, kv_length: int, device: torch.device) -> Tensor:
        """Return which keys are among the first real ones of their sequence, ``[1 or B, S]``."""
        real = torch.ones(1, kv_length, dtype=torch.bool, device=device)
        real = real if self.padding is None else self.padding
        rank = real.cumsum(1)
        if self.segment_ids is not None:
            begins = self.segment_ids[:, 1:] != self.segment_ids[:, :-1]
            before = torch.where(begins, rank[:, :-1], 0)
            rank = rank - F.pad(before, (1, 0)).cummax(1).values
        return real & (rank <= self.num_sinks)

    def query_padding(self, q_length: int, kv_length: int) -> Tensor | None:
        """Return the padding mask of the queries, ``[B, T]`` bool.

        ``None`` without padding, or if the queries are not known to be the last T keys.
        """
        if (
            self.padding is None
            or not isinstance(self.q_offset, int)
            or self.q_offset != kv_length - q_length
        ):
            return None
        return self.padding[:, kv_length - q_length :]

    def with_window(
        self, window: Window, q_length: int, kv_length: int, num_sinks: int = 0
    ) -> AttentionMask:
        """Return the intersection of this mask and a sliding window.

        The first ``num_sinks`` keys belong to that window, and to one that the mask has already.
        """
        if self.function is not None:
            dense = self.function
            band = replace(self, function=None, window=window, num_sinks=num_sinks)
            if not num_sinks:
                band = replace(band, padding=None, segment_ids=None)

            def intersection() -> Tensor:
                mask = dense()
                within = band.dense(q_length, kv_length, mask.device)
                assert within is not None
                return mask & within

            return replace(self, function=intersection)
        if self.window is not None:
            window = (min(window[0], self.window[0]), min(window[1], self.window[1]))
        return replace(self, window=window, num_sinks=num_sinks)

    def mapped_fields(self) -> str:
        """Return which of its tensors ``torch.vmap`` maps, as errors name them; ``""`` if none."""
        fields = ("padding", "segment_ids")
        tensors = ((name, getattr(self, name)) for name in fields)
        return " and ".join(name for name, x in tensors if x is not None and is_mapped(x))

    def of_new_tokens(self, q_length: int) -> AttentionMask:
        """Return the mask of the T newest tokens, for backends whose state holds earlier ones.

        Layers that share a mask get the same one, which counts its tokens once.
        """
        if torch.compiler.is_compiling():
            return self._of_new_tokens(q_length)
        kept: dict[int, AttentionMask] = vars(self).setdefault("masks_of_new_tokens", {})
        if q_length not in kept:
            kept[q_length] = self._of_new_tokens(q_length)
        return kept[q_length]

    def _of_new_tokens(self, q_length: int) -> AttentionMask:
        padding = self.padding
        if padding is not None:
            if isinstance(self.q_offset, int):
                padding = padding[:, self.q_offset : self.q_offset + q_length]
            else:
                new = torch.arange(q_length, device=padding.device) + self.q_offset
                padding = padding.index_select(1, new)
        return replace(self, padding=padding, q_offset=0)

    @property
    def is_plain(self) -> bool:
        """Whether causality is the only restriction, if there is any."""
        return (
            self.padding is None
            and self.segment_ids is None
            and self.window is None
            and self.function is None
        )


PLAIN = {causal: AttentionMask(causal=causal) for causal in (False, True)}
