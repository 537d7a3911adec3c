"""Ops with a softmax window, for ``ops.py``: longformer, flash, and window hybrids."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.evaluation.timing import BenchmarkCase
from attnzoo.ops.flash.api import flash_attention
from attnzoo.ops.hybrid.api import LinearBranch, hybrid_attention
from attnzoo.ops.longformer.api import longformer_attention
from attnzoo.registry import build_backend


def longformer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to 256 tokens on either side."""
    return longformer_attention(q, k, v, window=256).out


def flash(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int] | None = None) -> Tensor:
    """Attend to all earlier tokens, or to a window."""
    return flash_attention(q, k, v, mask=AttentionMask(causal=True, window=window)).out


@cache
def hedgehog_layer(heads: int, key_heads: int, size: int) -> Any:
    """Return a layer with learned features and a window of 32."""
    place = Geometry(num_heads=heads, num_key_heads=key_heads, head_dim=size, causal=True)
    return build_backend("linear", {"feature_map": "hedgehog", "window": 32}, place)


def window_hedgehog(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Map to learned features, and run the window hybrid."""
    out: Tensor = hedgehog_layer(q.shape[1], k.shape[1], q.shape[3]).to(q)(q, k, v).out
    return out


def window_features(
    q: Tensor, k: Tensor, v: Tensor, q_features: Tensor, k_features: Tensor
) -> Tensor:
    """Run the window hybrid on precomputed features."""
    weight = q.new_zeros(1, q.shape[1], 1, 1)
    branch = LinearBranch(q_features, k_features, weight, mean=True)
    return hybrid_attention(q, k, v, branch, window=32, scale=q.shape[3] ** -0.5).out


def features(case: BenchmarkCase) -> tuple[Tensor, ...]:
    """Return features of queries and keys, twice their size, like those of hedgehog."""
    size = 2 * case.D
    return tuple(torch.rand(case.B, n, case.T, size) / size for n in (case.H, case.Hkv))


def window_gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Run the window hybrid with queries and keys as features."""
    branch = LinearBranch(q, k, q.new_zeros(1, q.shape[1], 1, 1), log_decay)
    return hybrid_attention(q, k, v, branch, window=32, scale=q.shape[3] ** -0.5).out
