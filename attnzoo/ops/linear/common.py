"""Inputs and feature maps that all implementations of linear attention share.

Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T queries, S keys, D key size, E value size,
N rows of a matrix, F decays per token (1 or D) or features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.padding import fill_padding
from attnzoo.contract.states import LinearState
from attnzoo.contract.validation import check_shape
from attnzoo.errors import UnsupportedError, did_you_mean
from attnzoo.ops.features.functional import FIXED, LEARNED, widen

CHUNK_SIZE = 64  # tokens per chunk, unless the call sets it

Result = tuple[Tensor, LinearState]  # the output, and the state after the last token


class MapWeights(NamedTuple):
    """Weights of a learned map: matrices ``[H, N, D]`` or residuals ``[H, D, D]``, and biases."""

    q: Tensor
    k: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None


class LinearInputs(NamedTuple):
    """Inputs of :func:`attnzoo.ops.linear.api.linear_attention`, checked and complete."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    log_decay: Tensor | None  # [Hkv], [B, Hkv, S] or [B, Hkv, S, D]
    state: LinearState  # before the first token; its dtype is that of all sums
    padding_mask: Tensor | None  # [B, S] bool, true at real keys
    segment_ids: Tensor | None  # [B, S]
    causal: bool
    normalize: bool
    scale: float
    eps: float
    chunk_size: int | None
    feature_map: str  # still to be applied to q and k
    feature_scale: float
    map_weights: MapWeights | None = None  # of a learned map
    reuse_state: bool = False  # whether the tensors of the state may be overwritten

    def tokens(self, start: int, stop: int) -> LinearInputs:
        """Return the inputs of tokens ``start`` to ``stop`` of a causal call."""
        log_decay, ids = self.log_decay, self.segment_ids
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = log_decay[:, :, start:stop]
        q, k, v = (x[:, :, start:stop] for x in (self.q, self.k, self.v))
        ids = None if ids is None else ids[:, start:stop]
        return self._replace(q=q, k=k, v=v, log_decay=log_decay, segment_ids=ids)


class StepGate(NamedTuple):
    """Inputs of one token of mLSTM or RWKV-6 besides its decay, in the dtype of the state."""

    bonus: Tensor | None = None  # RWKV-6, [Hkv, D]: multiplies the key that its own query reads
    log_input: Tensor | None = None  # mLSTM, [B, Hkv]: logarithm of the weight of the key
    m: Tensor | None = None  # mLSTM, [B, Hkv]: logarithm of the largest weight so far


def log_decay_per_token(log_decay: Tensor, k: Tensor) -> Tensor:
    """Return log decays of any accepted shape as ``[B, Hkv, S, F]``."""
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(k.shape[:3])
    return log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(3)


def decay_of_real_tokens(log_decay: Tensor, k: Tensor, padding: Tensor | None) -> Tensor:
    """Return log decays of any accepted shape with zeros at padding, which decays nothing.

    Those per head are at least float32, because their gradient is a sum over all tokens.
    """
    if log_decay.dim() == 1:
        log_decay = widen(log_decay)
        if padding is not None:
            log_decay = log_decay[None, :, None].expand(k.shape[:3])
    return fill_padding(log_decay, padding)


def empty_state(q: Tensor, k: Tensor, v: Tensor) -> LinearState:
    """Return the state before the first token: zeros."""
    dtype = state_dtype(q, k, v)
    kv = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=dtype, device=v.device)
    return LinearState(kv, kv.new_zeros(kv.shape[:3]))


def state_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """Return the dtype of the sums: float64 if any input is float64, else float32."""
    return torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32


def empty_output(x: LinearInputs) -> Tensor:
    """Return an output without elements, ``[B, H, T, E]``, whose gradients are zeros."""
    total = x.q.sum() + x.k.sum() + x.v.sum()
    if x.log_decay is not None:
        total = total + x.log_decay.sum()
    return total.to(x.v.dtype).expand(*x.q.shape[:3], x.v.shape[3])


# -- feature maps that implementations apply -------------------------------------------------------


NAMES = (*FIXED, *LEARNED)
SCALED = {name for name, fixed in FIXED.items() if fixed.takes_scale}  # kernels take its root


def check_feature_map(name: str, weights: MapWeights | None, q: Tensor, k: Tensor) -> None:
    """Raise ``UnsupportedError`` if the map is unknown, or its weights do not fit q and k."""
    if name not in NAMES:
        raise UnsupportedError(
            f"linear_attention has no feature map {name!r}.{did_you_mean(name, NAMES)} "
            f"It has {', '.join(NAMES)}; apply others to q and k before the call."
        )
    if (weights is None) == (name in LEARNED):
        raise UnsupportedError(
            f"feature_map={name!r} needs map_weights."
            if weights is None
            else f"feature_map={name!r} has no weights; leave map_weights out, or take one "
            f"of {', '.join(LEARNED)}."
        )
    if weights is None:
        return
    size, learned = q.shape[3], LEARNED[name]
    rows = size if learned.is_residual or weights.k.dim() != 3 else weights.k.shape[1]
    heads, key_heads, device = q.shape[1], k.shape[1], q.device
    check_shape("map_weights.q", weights.q, (heads, rows, size), "H, N, D", device)
    check_shape("map_weights.k", weights.k, (key_heads, rows, size), "Hkv, N, D", device)
    for field, bias, shape in (
        ("map_weights.q_bias", weights.q_bias, (heads, rows)),
        ("map_weights.k_bias", weights.k_bias, (key_heads, rows)),
    ):
        if (bias is not None) != learned.has_bias:
            raise UnsupportedError(
                f"feature_map={name!r} {'has a' if learned.has_bias else 'has no'} bias, and "
                f"{field} is {'missing' if bias is None else 'given'}."
            )
        if bias is not None:
            check_shape(field, bias, shape, "heads, N", device)


def num_features(k: Tensor, name: str, weights: MapWeights | None) -> int:
    """Return the number of features of a key."""
    return k.shape[3] if weights is None else weights.k.shape[1] * LEARNED[name].features


def like_features(k: Tensor, name: str, weights: MapWeights | None) -> Tensor:
    """Return a tensor with the shape and dtype of the features of keys; its values are not used."""
    if weights is None:
        return k
    return k.new_zeros(()).expand(*k.shape[:3], num_features(k, name, weights))


def map_features(
    x: Tensor, name: str, scale: float, weights: MapWeights | None, *, of_keys: bool
) -> Tensor:
    """Return the features of queries or keys, ``[B, H, T, F]``, in torch."""
    if weights is not None:
        matrix, bias = (weights.k, weights.k_bias) if of_keys else (weights.q, weights.q_bias)
        function = LEARNED[name].function
        return function(x, matrix) if bias is None else function(x, matrix, bias)
    fixed = FIXED[name]
    function = fixed.keys if of_keys else fixed.queries
    return function(x, scale) if name in SCALED else function(x)


def map_inputs(x: LinearInputs) -> LinearInputs:
    """Apply the feature map, and set the features and values of padding keys to 0."""
    options = (x.feature_map, x.feature_scale, x.map_weights)
    q = map_features(x.q, *options, of_keys=False)
    k, v = (fill_padding(each, x.padding_mask) for each in (x.k, x.v))
    if x.feature_map != "identity":  # the features of a zero key are not zero
        k = fill_padding(map_features(k, *options, of_keys=True), x.padding_mask)
    return x._replace(q=q, k=k, v=v, feature_map="identity", map_weights=None, padding_mask=None)


def matrices(name: str, weights: MapWeights, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Return the matrices ``[H, N, D]`` of queries and keys, and their biases ``[H, N]``."""

    def matrix(x: Tensor) -> Tensor:
        x = x.to(dtype)
        if LEARNED[name].is_residual:
            x = x + torch.eye(x.shape[1], dtype=dtype, device=x.device)
        return x.contiguous()

    biases = (None if x is None else x.to(dtype).contiguous() for x in weights[2:])
    return matrix(weights.q), matrix(weights.k), *biases
