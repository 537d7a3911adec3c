"""Feature maps that implementations of linear attention compute themselves, and their weights.

Letters: B batch, H heads, Hkv key heads, T tokens, D head size, N rows of a matrix, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.backends.linear.feature_maps.functional import (
    elu_plus_one,
    exp_keys,
    exp_queries,
    hedgehog,
    hedgehog_joint,
    identity,
    learned_exp,
    learned_linear,
    learned_relu,
    relu,
)


class MapWeights(NamedTuple):
    """Weights of a learned map: matrices ``[H, N, D]`` or residuals ``[H, D, D]``, and biases."""

    q: Tensor
    k: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None


class LearnedMap(NamedTuple):
    """A learned map: its function of inputs, weights and, if it has one, the bias."""

    function: Callable[..., Tensor]
    is_residual: bool  # whether the matrix is the identity plus the weights
    features: int = 1  # per row of the matrix


FIXED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "identity": (identity, identity),
    "elu+1": (elu_plus_one, elu_plus_one),
    "relu": (relu, relu),
    "exp": (exp_queries, exp_keys),  # these take the scale
}
LEARNED = {
    "learned_linear": LearnedMap(learned_linear, True),
    "hedgehog": LearnedMap(hedgehog, True, 2),
    "hedgehog_joint": LearnedMap(hedgehog_joint, True, 2),
    "t2r": LearnedMap(learned_relu, True),
    "hedgehog_exp": LearnedMap(learned_exp, False),
}
NAMES = (*FIXED, *LEARNED)


def feature_size(name: str, size: int, weights: MapWeights | None) -> int:
    """Return F for inputs of a size."""
    return size if weights is None else weights.k.shape[1] * LEARNED[name].features


def map_features(
    x: Tensor, name: str, scale: float, weights: MapWeights | None, *, of_keys: bool
) -> Tensor:
    """Return the features of queries or keys, ``[B, H, T, F]``, in torch."""
    if weights is not None:
        matrix, bias = (weights.k, weights.k_bias) if of_keys else (weights.q, weights.q_bias)
        function = LEARNED[name].function
        return function(x, matrix) if bias is None else function(x, matrix, bias)
    fixed = FIXED[name][of_keys]
    return fixed(x, scale) if name == "exp" else fixed(x)


def matrices(name: str, weights: MapWeights, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Return the matrices ``[H, N, D]`` of queries and keys, and their biases ``[H, N]``."""

    def matrix(x: Tensor) -> Tensor:
        x = x.to(dtype)
        if LEARNED[name].is_residual:
            x = x + torch.eye(x.shape[1], dtype=dtype, device=x.device)
        return x.contiguous()

    biases = (None if x is None else x.to(dtype).contiguous() for x in weights[2:])
    return matrix(weights.q), matrix(weights.k), *biases
