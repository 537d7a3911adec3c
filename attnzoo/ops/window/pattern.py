"""The keys that the heads of sliding-window attention see: windows, dilations and global tokens.

Source: Beltagy et al., 2020, arXiv:2004.05150. Other letters: w window, d dilation, G global
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from attnzoo.contract.config import MAX_SIZE
from attnzoo.contract.masks import AttentionMask, Window
from attnzoo.errors import ConfigError, short_repr

PerHead = int | Sequence[int]  # one number for all heads, or a list with one for each


class Band(NamedTuple):
    """The window of one head: ``before`` keys back, the query's own, and ``after`` keys ahead."""

    before: int
    after: int
    dilation: int  # d, tokens between two neighbouring keys of the window


@dataclass(frozen=True)
class Pattern:
    """The band of each query head, and whether attention is causal."""

    bands: tuple[Band, ...]
    causal: bool

    @classmethod
    def of(
        cls,
        window: PerHead,
        dilation: PerHead,
        *,
        heads: int,
        causal: bool,
        limit: Window | None = None,
    ) -> Self:
        """Return the pattern of the given window sizes and dilations.

        Args:
            window: w. A causal query sees its own key and the w - 1 keys before it, every d-th
                token as far back as (w - 1) d. Otherwise it sees w keys on either side, as far as
                w d.
            dilation: d.
            heads: H.
            causal: Whether a query sees no later key.
            limit: Largest distance in tokens, before and after the query, of every head.

        Raises:
            ConfigError: A size is not positive, or a list does not have one number for each head.
        """
        windows = per_head("window", window, heads)
        dilations = per_head("dilation", dilation, heads)
        bands = []
        for size, step in zip(windows, dilations, strict=True):
            before, after = (size - 1, 0) if causal else (size, size)
            if limit is not None:
                before, after = min(before, limit[0] // step), min(after, limit[1] // step)
            bands.append(Band(before, after, step))
        return cls(tuple(bands), causal)

    @property
    def tokens_before(self) -> int:
        """Largest distance in tokens from a query to an earlier key, over all heads."""
        return max(band.before * band.dilation for band in self.bands)

    @property
    def tokens_after(self) -> int:
        """Largest distance in tokens from a query to a later key, over all heads."""
        return max(band.after * band.dilation for band in self.bands)

    def heads_by_band(self) -> dict[Band, list[int]]:
        """Return the heads of each band."""
        found: dict[Band, list[int]] = {}
        for head, band in enumerate(self.bands):
            found.setdefault(band, []).append(head)
        return found

    def mask(self, distance: Tensor) -> Tensor:
        """Return the mask of all bands for the given distances.

        Args:
            distance: Position of the query minus that of the key, ``[B, 1, T, S]``.

        Returns:
            ``[B, H, T, S]`` bool, or ``[B, 1, T, S]`` when all heads have the same band.
        """
        masks = []
        for before, after, dilation in self.bands[:1] if len(set(self.bands)) == 1 else self.bands:
            in_band = (distance <= before * dilation) & (distance >= -after * dilation)
            masks.append(in_band if dilation == 1 else in_band & (distance % dilation == 0))
        return masks[0] if len(masks) == 1 else torch.cat(masks, 1)


def per_head(name: str, value: PerHead, heads: int) -> tuple[int, ...]:
    """Return one positive number for each head.

    Raises:
        ConfigError: A number is not positive, or a list does not have one number for each head.
    """
    check_positive(name, value)
    if isinstance(value, int):
        return (value,) * heads
    if len(value) != heads:
        raise ConfigError(
            f"{name} is a list of {len(value)} numbers ({short_repr(list(value))}), but the layer "
            f"has {heads} heads; give one number for each head, or one for all"
        )
    return tuple(value)


def check_positive(name: str, value: PerHead) -> None:
    """Raise ``ConfigError`` if a number is out of range, or if a list of numbers is empty."""
    numbers = list(value) if isinstance(value, Sequence) else [value]
    if not numbers or not all(isinstance(n, int) and 1 <= n <= MAX_SIZE for n in numbers):
        raise ConfigError(
            f"{name} must be at least 1 and at most {MAX_SIZE}, for all heads or in a "
            "list with one number for each head, got "
            f"{short_repr(numbers if isinstance(value, Sequence) else value)}"
        )


class GlobalIndices(NamedTuple):
    """The positions of the global tokens."""

    positions: Tensor  # [B, G], unique within a row
    valid: Tensor  # [B, G] bool: false in a row with fewer than G, where it is another token's


def global_indices(is_global: Tensor, max_count: int | None = None) -> GlobalIndices | None:
    """Return the positions of the global tokens, or ``None`` when there can be none.

    Args:
        is_global: ``[B, S]`` bool.
        max_count: Upper bound on the number in each row; ``None`` reads it from the device.
    """
    count = int(is_global.sum(1).max()) if max_count is None else min(max_count, is_global.shape[1])
    if count == 0:
        return None
    positions = torch.argsort(is_global.int(), dim=1, descending=True, stable=True)[:, :count]
    return GlobalIndices(positions, is_global.gather(1, positions))


def expand_bias(bias: Tensor, heads: int, keys: int) -> Tensor:
    """View a bias that broadcasts to ``[B, H, T, S]`` as ``[1 or B, H, 1 or T, S]``."""
    bias = bias[(None,) * (4 - bias.ndim)]
    return bias.expand(-1, heads, -1, keys)


def gather_bias(bias: Tensor, queries: Tensor | None, keys: Tensor | None) -> Tensor:
    """Gather rows and columns at ``[B, N]`` from ``[1 or B, H, T, S]``; ``None`` keeps all."""
    if queries is not None:
        bias = torch.take_along_dim(bias, queries[:, None, :, None], 2)
    return bias if keys is None else torch.take_along_dim(bias, keys[:, None, None, :], 3)


# -- the first tokens of each sequence, to which queries attend outside their window too -----------
#
# Causal models give them much weight, which a window alone would spread over other keys; see Xiao
# et al., 2023, arXiv:2309.17453 (StreamingLLM). They are not rotated again. G is their number.


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
