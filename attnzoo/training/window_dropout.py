"""Scheduled window dropout: heads of a hybrid that attend without their window in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.config import Geometry


def draw_heads(share: float, seed: int, geometry: Geometry) -> Tensor | None:
    """Return which heads of a layer attend without their window, ``[H]`` bool, or ``None``.

    A hybrid otherwise learns to rely on its window only (arXiv:2510.05901). All rows and ranks draw
    the same heads, and so does a forward pass that gradient checkpointing repeats.

    Args:
        share: The expected share of the heads.
        seed: A different one for every step.
        geometry: Shape of the layer.
    """
    if not share:
        return None
    generator = torch.Generator("cpu").manual_seed(1000 * seed + geometry.layer)
    drawn = torch.rand(geometry.num_heads, generator=generator, dtype=torch.float32, device="cpu")
    return drawn < share
