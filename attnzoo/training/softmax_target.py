"""Softmax attention as the target of attention transfer: the output, and the weights of some keys.

Letters: B batch, H heads, Hkv key heads, T queries and keys, D key size, E value size, n keys whose
weights are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.backend import AttentionBackend
from attnzoo.ops.window.blockwise_cpu import LocalOptions
from attnzoo.ops.window.cpu.band import band_attention_cpp, band_cpp_reasons
from attnzoo.ops.window.pattern import Band
from attnzoo.runtime.autocast import autocast_disabled

RESTRICTIONS = ("shard", "bias", "softcap", "sinks")  # options that the kernel does not support


def key_stride(length: int, count: int) -> int:
    """Return n such that ``count`` columns cover every n-th of ``length`` keys."""
    return -(-length // count)


def compared_keys(length: int, count: int, step: int) -> Tensor:
    """Return the keys ``step % n``, ``step % n + n``, ... with n = :func:`key_stride`.

    Args:
        length: S.
        count: The largest number of keys.
        step: Selects the keys.
    """
    stride = key_stride(length, count)
    return torch.arange(step % stride, length, stride)


def key_indicators(length: int, count: int, step: int) -> Tensor:
    """Return value columns for which an attention's output is the weight of one key per column.

    Args:
        length: S.
        count: Number of columns; unused ones are zero.
        step: As in :func:`compared_keys`.

    Returns:
        ``[S, count]``, one at each column's key and zero elsewhere.
    """
    keys = compared_keys(length, count, step)
    columns = torch.zeros(length, count)
    columns[keys, torch.arange(len(keys))] = 1
    return columns


@torch.no_grad()
def softmax_target(
    teacher: AttentionBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Mapping[str, Any],
    columns: Tensor | None = None,
    step: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return softmax's output, and its weights of the keys that ``columns`` indicate.

    On CPUs a call without padding runs in C++, with all keys in the window: 512 tokens take half
    the time of PyTorch's kernel, and the log-sum-exp normalises the weights of any key. Other calls
    run softmax once for the output and once for the weights.

    Args:
        teacher: Softmax attention of the layer.
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        options: Options of the call.
        columns: :func:`key_indicators` in place of the values, ``[B, Hkv, T, E]``; ``None``
            without weights.
        step: As in :func:`key_indicators`.

    Returns:
        The output in the dtype of ``v``, ``[B, H, T, E]``, and the weights, the same shape.
    """
    mask = options.get("mask")
    causal = teacher.geometry.causal if mask is None else mask.causal
    ids = None if mask is None else mask.segment_ids
    plain = mask is None or (
        replace(mask, segment_ids=None).is_plain
        and isinstance(mask.q_offset, int)
        and not mask.q_offset
    )
    restricted = any(options.get(name) is not None for name in RESTRICTIONS)
    same_length = 0 < q.shape[2] == k.shape[2]
    if restricted or not plain or not same_length or q.device.type != "cpu" or band_cpp_reasons():
        weights = None if columns is None else teacher(q, k, columns, **options).out
        return teacher(q, k, v, **options).out, weights
    scale = options.get("scale")
    scale = teacher.geometry.scale if scale is None else scale
    assert scale is not None
    length, count = v.shape[2:]
    band = Band(length, 0 if causal else length, 1)
    every_key = LocalOptions(band, causal, scale, segment_ids=ids)
    out, lse = band_attention_cpp(q, k, v, every_key)
    if columns is None:
        return out.to(v.dtype), None
    keys = compared_keys(length, count, step)
    weights = _weights_of_keys(q, k, lse, keys, scale)
    if causal:
        weights.masked_fill_(keys > torch.arange(length)[:, None], 0)
    if ids is not None:
        weights.masked_fill_((ids[:, :, None] != ids[:, None, keys]).unsqueeze(1), 0)
    return out.to(v.dtype), F.pad(weights, (0, count - len(keys)))


def _weights_of_keys(q: Tensor, k: Tensor, lse: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return softmax's weights of some keys, ``[B, H, T, n]``, as if every query saw them.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        lse: Log-sum-exp of each query's scores, ``[B, H, T, 1]``.
        keys: Positions, ``[n]``.
        scale: Multiplies the products.
    """
    grouped = q.to(lse.dtype).unflatten(1, (k.shape[1], -1))
    selected = k[:, :, keys].to(lse.dtype).mul_(scale).unsqueeze(2)
    with autocast_disabled(q.device):
        weights: Tensor = (grouped @ selected.mT).flatten(1, 2).sub_(lse).exp_()
    return weights
