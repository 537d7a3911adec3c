"""What the heads of sliding-window attention see: windows, dilations, global tokens.

Source: Beltagy et al., 2020, arXiv:2004.05150.
Letters: B batch, H query heads, T queries, S keys, w window, d dilation, G global tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from attnzoo.errors import ConfigError
from attnzoo.masks import Window

PerHead = int | Sequence[int]  # one number for all heads, or a list with one for each


class Band(NamedTuple):
    """What a head sees around a query: keys at whole steps away, its own position included."""

    before: int  # steps back
    after: int  # steps ahead
    dilation: int  # d, tokens in a step


@dataclass(frozen=True)
class Pattern:
    """The band of each query head, and whether nothing later than the query is seen."""

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
        """Make the pattern of given window sizes.

        Args:
            window: w. A causal query sees its own key and the w - 1 before it at steps of d tokens,
                as far back as (w - 1) d; otherwise it sees w keys to either side, as far as w d.
            dilation: d.
            heads: H.
            causal: Whether nothing later than the query is seen.
            limit: Tokens before and after the query beyond which no head sees.

        Raises:
            ConfigError: A size is not positive, or a list has not one for each head.
        """
        sizes = per_head("window", window, heads)
        steps = per_head("dilation", dilation, heads)
        bands = []
        for size, step in zip(sizes, steps, strict=True):
            before, after = (size - 1, 0) if causal else (size, size)
            if limit is not None:
                before, after = min(before, limit[0] // step), min(after, limit[1] // step)
            bands.append(Band(before, after, step))
        return cls(tuple(bands), causal)

    @property
    def reach(self) -> int:
        """How many tokens back the farthest key of any band lies."""
        return max(band.before * band.dilation for band in self.bands)

    def groups(self) -> dict[Band, list[int]]:
        """Return which heads have which band."""
        found: dict[Band, list[int]] = {}
        for head, band in enumerate(self.bands):
            found.setdefault(band, []).append(head)
        return found

    def within(self, distance: Tensor) -> Tensor:
        """Say which distances lie in the band of each head.

        Args:
            distance: Position of the query minus that of the key, ``[B, 1, T, S]``.

        Returns:
            ``[B, H, T, S]`` bool, or ``[B, 1, T, S]`` when all heads have the same band.
        """
        masks = []
        for before, after, dilation in self.bands[:1] if len(set(self.bands)) == 1 else self.bands:
            near = (distance <= before * dilation) & (distance >= -after * dilation)
            masks.append(near if dilation == 1 else near & (distance % dilation == 0))
        return masks[0] if len(masks) == 1 else torch.cat(masks, 1)


def per_head(name: str, value: PerHead, heads: int) -> tuple[int, ...]:
    """Return one positive number for each head.

    Raises:
        ConfigError: A number is not positive, or a list has not one for each head.
    """
    check_positive(name, value)
    if isinstance(value, int):
        return (value,) * heads
    if len(value) != heads:
        raise ConfigError(
            f"{name} is a list of {len(value)} numbers ({list(value)}), but the layer has {heads} "
            "heads; give one number for each head, or one for all"
        )
    return tuple(value)


def check_positive(name: str, value: PerHead) -> None:
    """Refuse sizes that are not positive, and an empty list of them.

    Raises:
        ConfigError: A number is not positive, or there is none.
    """
    numbers = [value] if isinstance(value, int) else list(value)
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"{name} must be at least 1, for all heads or in a list with one number for each head, "
            f"got {value if isinstance(value, int) else list(value)}"
        )


class Globals(NamedTuple):
    """Where the global tokens stand."""

    place: Tensor  # [B, G], places in the sequence, no place twice in a row
    valid: Tensor  # [B, G], bool: false where a row has fewer than G; its place is some other's


def find_globals(is_global: Tensor, most: int | None = None) -> Globals | None:
    """Return the places of the global tokens, or ``None`` when there can be none.

    Args:
        is_global: ``[B, S]`` bool.
        most: A bound on the number in each row; without it the device is asked.
    """
    count = int(is_global.sum(1).max()) if most is None else min(most, is_global.shape[1])
    if count == 0:
        return None
    place = torch.argsort(is_global.int(), dim=1, descending=True, stable=True)[:, :count]
    return Globals(place, is_global.gather(1, place))


def take(x: Tensor, index: Tensor) -> Tensor:
    """Take the tokens at ``[B, N]`` out of ``[B, H, S, D]``."""
    return torch.take_along_dim(x, index[:, None, :, None], 2)


def whole_bias(bias: Tensor, heads: int, keys: int) -> Tensor:
    """View a bias that can be broadcast to ``[B, H, T, S]`` as ``[1 or B, H, 1 or T, S]``."""
    bias = bias[(None,) * (4 - bias.ndim)]
    return bias.expand(-1, heads, -1, keys)


def bias_at(bias: Tensor, queries: Tensor | None, keys: Tensor | None) -> Tensor:
    """Take the rows and columns ``[B, N]`` out of ``[1 or B, H, T, S]``; ``None`` takes all."""
    if queries is not None:
        bias = torch.take_along_dim(bias, queries[:, None, :, None], 2)
    return bias if keys is None else torch.take_along_dim(bias, keys[:, None, None, :], 3)
