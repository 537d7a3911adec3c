"""Scheduled window dropout: heads of a hybrid that attend without their window in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnzoo.backends.parts.recurrent import RecurrentBackend
from attnzoo.contract.config import Geometry
from attnzoo.errors import SpecError
from attnzoo.training.transfer import swapped_layers


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


def decay_window_dropout(
    model: nn.Module, share: float, seed: int, steps: int
) -> Callable[[int], None]:
    """Return a ``before_step`` that decays the dropout of windows linearly to 0 over the steps.

    Source: scheduled sliding-window dropout, arXiv:2510.05901.

    Args:
        model: The model, whose hybrids have it.
        share: The share of heads at the start.
        seed: That of the run.
        steps: Number of steps.

    Raises:
        SpecError: ``share`` is not 0, but no layer has a window and a linear branch.
    """
    hybrids = [
        backend
        for backend in swapped_layers(model).values()
        if isinstance(backend, RecurrentBackend) and backend.far_log_weight is not None
    ]
    if share and not hybrids:
        raise SpecError(
            "window_dropout needs a layer with a window and a linear branch, such as "
            "gated_linear or delta with window=32; leave it out"
        )

    def before_step(step: int) -> None:
        now = share * (1 - step / steps)
        for backend in hybrids:
            heads = draw_heads(now, 100_000 * seed + step, backend.geometry)
            backend.linear_only_heads = heads

    return before_step
