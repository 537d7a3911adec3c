"""Which keys a query may see, as one value: causal, padding, packing, window, or any function.

A mask is described, not built: nothing quadratic exists until an exact backend asks for
:meth:`AttentionMask.dense`.
Letters: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Window = tuple[int, int]  # keys visible before and after the query's own position


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """What limits attention in one call.

    Attributes:
        causal: A query sees no key after its own position.
        padding: ``[B, S]`` bool, true where a key is real; ``None`` when all are.
        segment_ids: ``[B, S]`` integers, non-decreasing; tokens see their own segment only
            (packed rows).
        window: ``(before, after)``: a query sees key positions from ``before`` back to ``after``
            ahead.
        q_offset: Keys that stand before the first query: position of query 0 minus position of
            key 0.
        function: For masks that the fields above do not describe: returns the whole mask,
            ``[B, 1 or H, T, S]`` bool, all of the above included. Only backends that can take an
            arbitrary mask accept it.
        function_name: What that mask is called, for messages.
    """

    causal: bool = False
    padding: Tensor | None = None
    segment_ids: Tensor | None = None
    window: Window | None = None
    q_offset: int | Tensor = 0
    function: Callable[[], Tensor] | None = None
    function_name: str = ""

    def dense(self, q_length: int, kv_length: int, device: torch.device) -> Tensor | None:
        """Build the mask, ``[1 or B, 1 or H, T, S]`` bool, true where seen.

        ``None`` if all keys are seen. Quadratic in memory: for exact backends and oracles.
        """
        if self.function is not None:
            return self.function()
        seen: list[Tensor] = []
        if self.causal or self.window is not None:
            queries = torch.arange(q_length, device=device)[:, None] + self.q_offset
            distance = torch.arange(kv_length, device=device) - queries
            before, after = self.window if self.window is not None else (None, None)
            if self.causal:
                seen.append(distance <= 0)
            if before is not None:
                seen.append(distance >= -before)
            if after is not None and not self.causal:
                seen.append(distance <= after)
            seen = [part[None, None] for part in seen]
        if self.padding is not None:
            seen.append(self.padding[:, None, None, :])
        if self.segment_ids is not None:
            query_ids = self.segment_ids[:, kv_length - q_length :]
            seen.append((query_ids[:, :, None] == self.segment_ids[:, None, :])[:, None])
        if not seen:
            return None
        whole = seen[0]
        for part in seen[1:]:
            whole = whole & part
        return whole

    def query_padding(self, q_length: int, kv_length: int) -> Tensor | None:
        """Return which queries are real, ``[B, T]`` bool.

        ``None`` when all are, or when the queries are not known to be the last of the keys.
        """
        if (
            self.padding is None
            or not isinstance(self.q_offset, int)
            or self.q_offset != kv_length - q_length
        ):
            return None
        return self.padding[:, kv_length - q_length :]

    def with_window(self, window: Window, q_length: int, kv_length: int) -> AttentionMask:
        """Return this mask, narrowed to ``window``."""
        if self.function is not None:
            whole, band = (
                self.function,
                replace(self, function=None, padding=None, segment_ids=None),
            )

            def narrowed() -> Tensor:
                mask = whole()
                within = replace(band, window=window).dense(q_length, kv_length, mask.device)
                assert within is not None
                return mask & within

            return replace(self, function=narrowed)
        if self.window is not None:
            window = (min(window[0], self.window[0]), min(window[1], self.window[1]))
        return replace(self, window=window)

    def of_new_tokens(self, q_length: int) -> AttentionMask:
        """Return the mask among the T newest tokens; the layer's state stands for all earlier."""
        padding = self.padding
        if padding is not None:
            if isinstance(self.q_offset, int):
                padding = padding[:, self.q_offset : self.q_offset + q_length]
            else:
                now = torch.arange(q_length, device=padding.device) + self.q_offset
                padding = padding.index_select(1, now)
        return replace(self, padding=padding, q_offset=0)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but causality limits attention."""
        return (
            self.padding is None
            and self.segment_ids is None
            and self.window is None
            and self.function is None
        )
