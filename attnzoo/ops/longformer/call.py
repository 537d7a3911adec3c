"""The inputs of one call of Longformer attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.contract.masks import Window
from attnzoo.ops.window.pattern import Pattern


class GlobalTokens(NamedTuple):
    """The global tokens of a call, and the tensors that their rows are computed from."""

    is_global: Tensor  # [B, S] bool
    max_count: int | None = None  # bound on their number in a row; None reads it from the device
    q: Tensor | None = None  # [B, H, S, D]: read at global tokens only; None means the call's q
    k: Tensor | None = None  # [B, Hkv, S, D]: the keys that global tokens attend to
    v: Tensor | None = None  # [B, Hkv, S, E]


class LongformerCall(NamedTuple):
    """The inputs of one call, checked."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    pattern: Pattern
    scale: float
    padding_mask: Tensor | None  # [B, S] bool: false at padding
    segment_ids: Tensor | None  # [B, S] integers
    q_offset: int | Tensor  # position of the first query
    global_tokens: GlobalTokens | None
    bias: Tensor | None  # [1 or B, H, 1 or T, S]
    dropout: float
    # The mask's window if padding lies in it: it counts tokens, and the pattern real ones
    window: Window | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the mask is no band, so that it is computed whole for each block of queries."""
        return self.has_fewer_queries or self.window is not None

    @property
    def has_fewer_queries(self) -> bool:
        """Whether there are fewer queries than keys."""
        return self.q.shape[2] != self.k.shape[2]

    @property
    def global_qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values for the rows of global tokens."""
        assert self.global_tokens is not None
        _, _, q, k, v = self.global_tokens
        return self.q if q is None else q, self.k if k is None else k, self.v if v is None else v
