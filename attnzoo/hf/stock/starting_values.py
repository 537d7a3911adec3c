"""Parts of the starting values that recurrent layers of all stock classes share.

Letters: H query heads, D their size, M hidden size, N tokens, X channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError
from attnzoo.hf.configs import read_field
from attnzoo.hf.stock.layer_inputs import LayerInputs

RECURRENT = "linear_attention"  # transformers' name in layer_types
SILU_ONE = 1.2784645427610738  # SiLU of it is 1
SIGNS = 2  # recurrent heads for each query head


def layer_kinds(source: Any, recurrent: Sequence[int]) -> list[str]:
    """Return ``layer_types`` of a student.

    Args:
        source: The config of its source.
        recurrent: Numbers of the layers that become recurrent.
    """
    numbers = range(int(source.num_hidden_layers))
    return [RECURRENT if n in recurrent else "full_attention" for n in numbers]


def refuse_recurrent(source: Any, family: str, recurrent: Sequence[int]) -> None:
    """Raise if layers of a model cannot become recurrent.

    Args:
        source: The config of the model.
        family: The family of the student.
        recurrent: Numbers of the layers that become recurrent.

    Raises:
        UnsupportedError: The model has biases, or an activation that is not SiLU.
    """
    if recurrent and read_field(source, "attention_bias", False):
        raise UnsupportedError(
            f"This {source.model_type} has attention_bias, which recurrent layers of {family} have "
            "not; convert it without recurrent layers"
        )
    if recurrent and source.hidden_act != "silu":
        raise UnsupportedError(
            f"This {source.model_type} has hidden_act={source.hidden_act!r}, which {family} would "
            "use in its recurrent layers too, where engines compute silu; convert it without "
            "recurrent layers"
        )


def unit_heads(weights: Tensor, hidden: Tensor) -> Tensor:
    """Return the projections of heads, scaled so that their outputs have root mean square 1.

    Args:
        weights: ``[H, D, M]``.
        hidden: The inputs, ``[N, M]``.
    """
    return weights / (weights @ hidden.T).square().mean((1, 2)).sqrt()[:, None, None]


def with_signs(weights: Tensor) -> Tensor:
    """Return w and -w of each head, one after the other, ``[2 * H, D, M]``."""
    return torch.stack([weights, -weights], 1).flatten(0, 1)


def head_sizes(measured: LayerInputs, heads: int) -> Tensor:
    """Return the root mean square of the outputs of each head of a softmax layer, ``[H, 1]``."""
    outputs = measured.heads.float().unflatten(-1, (heads, -1))
    sizes: Tensor = outputs.square().mean((0, 2)).sqrt()
    return sizes[:, None]


def spread_rates(slowest: float, fastest: float, heads: int) -> Tensor:
    """Return decay rates per token that are spread over the heads in a geometric series."""
    return torch.logspace(math.log2(slowest), math.log2(fastest), heads, base=2)


def last_tap(channels: int, taps: int) -> Tensor:
    """Return ``[X, 1, taps]``: a causal convolution that returns the token itself."""
    weights = torch.zeros(channels, 1, taps)
    weights[..., -1] = 1
    return weights


def constant_projection(hidden: Tensor, value: float) -> Tensor:
    """Return the projection whose outputs are closest to a constant, ``[1, M]`` (ridge)."""
    x = hidden.double()
    ridge = 1e-3 * len(x) * x.square().mean()
    gram = x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights: Tensor = torch.linalg.solve(gram, x.sum(0) * value)
    return weights[None].float()
