"""What a call returns and what a layer keeps between decoding steps: plain tensors in named tuples.

Letters: B batch, H heads, Hkv key heads, T queries, S keys, D key size, E value size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class LinearState(NamedTuple):
    """Sums over the tokens seen so far; its size does not depend on how many they were."""

    kv: Tensor  # [B, Hkv, D, E], float32 or float64: the decayed sum of k v^T
    k: Tensor  # [B, Hkv, D]: the decayed sum of k, which normalises


class CountedLinearState(NamedTuple):
    """The sums, and how many real tokens they are over, for features that depend on positions."""

    kv: Tensor  # [B, Hkv, D, E], float32 or float64
    k: Tensor  # [B, Hkv, D]
    tokens: Tensor  # [B], integers


class StabilizedState(NamedTuple):
    """Sums of weights that are exponentials, divided by the largest of them so far (mLSTM)."""

    kv: Tensor  # [B, Hkv, D, E], float32 or float64: the sum of k v^T, times exp(-m)
    k: Tensor  # [B, Hkv, D]: the sum of k, times exp(-m)
    m: Tensor  # [B, Hkv]: the logarithm of what they were divided by


class MatrixState(NamedTuple):
    """Sums under a decay of their own for every pair of a key and a value channel."""

    kv: Tensor  # [B, Hkv, D, E], float32 or float64: the decayed sum of k v^T
    k: Tensor  # [B, Hkv, D, E]: the decayed sum of k, for every value channel


class KVState(NamedTuple):
    """The keys and values seen so far, or the last of them when a window lets the others go."""

    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    real: Tensor  # [B, S], bool: false where a key is padding


class AttentionOutput(NamedTuple):
    """Result of one call; ``state`` and ``weights`` only when they were asked for."""

    out: Tensor  # [B, H, T, E], in the dtype of the values
    state: Any | None = None  # a named tuple of tensors, batch first
    weights: Tensor | None = None  # [B, H, T, S]: the effective attention matrix
