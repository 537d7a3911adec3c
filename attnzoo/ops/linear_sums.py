r"""What a stretch of tokens leaves in the state of linear attention, without any output.

Computes :math:`S = \sum_t e^{l_t} k_t v_t^T`, :math:`z = \sum_t e^{l_t} k_t` and
:math:`\ell = \sum_t g_t`, with :math:`l_t` the log decays g summed over the tokens after t. Walks
over blocks of tokens that fit into the cache, from the last to the first, so that the weights which
count come from short sums; the backward pass makes the weights again, from the first to the last.
Time O(T D E), memory beyond the results O(T D / C).
Letters: N batch times key heads, T tokens, C tokens of a block, D key size, E value size, F decays
per token (1 or D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnzoo.ops.linear_decay import FORGOTTEN, fade
from attnzoo.ops.room import room

BLOCK = {"cpu": 128}  # C: 64 to 256 measured alike; elsewhere a launch costs more than the cache
LARGEST = 4096


def decayed_sums(k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum up keys and values under decay.

    Args:
        k: Keys after the feature map, ``[B, Hkv, T, D]``, float32 or wider.
        v: Values, ``[B, Hkv, T, E]``, of the same dtype.
        log_decay: At most 0, ``[B, Hkv, T, F]``.

    Returns:
        S as ``[B, Hkv, D, E]``, z as ``[B, Hkv, D]``, and the sum of log decays, ``[B, Hkv, F]``.
    """
    shape = k.shape[:2]
    flat = (x.to(k.dtype).flatten(0, 1) for x in (k, v, log_decay))
    kv, z, total = _Sums.apply(*flat)  # type: ignore[no-untyped-call]
    return kv.unflatten(0, shape), z.unflatten(0, shape), total.unflatten(0, shape)


class _Sums(torch.autograd.Function):
    """k ``[N, T, D]``, v ``[N, T, E]`` and log decays ``[N, T, F]``; kept, and what lies behind."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
        """Walk from the last block to the first."""
        kv = k.new_zeros(len(k), k.shape[2], v.shape[2])
        z, behind = k.new_zeros(len(k), k.shape[2]), log_decay.new_zeros(len(k), log_decay.shape[2])
        borders = []
        for block in reversed(_blocks(k)):
            borders.append(behind)
            weights, behind = _weights(log_decay[:, block], behind)
            writing = k[:, block] * weights
            kv.baddbmm_(writing.mT, v[:, block])
            z.add_(writing.sum(1))
        ctx.save_for_backward(k, v, log_decay, *reversed(borders))
        return kv, z, behind

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_kv: Tensor, d_z: Tensor, d_total: Tensor) -> tuple[Tensor, ...]:
        """Walk from the first block to the last: a log decay counts for all tokens before it."""
        k, v, log_decay, *borders = ctx.saved_tensors
        dk, dv, dg = (room(x, x.shape) for x in (k, v, log_decay))
        before = d_total.unsqueeze(1)
        for block, behind in zip(_blocks(k), borders, strict=True):
            weights, _ = _weights(log_decay[:, block], behind)
            d_writing = torch.baddbmm(d_z.unsqueeze(1), v[:, block], d_kv.mT)
            here = torch.mul(d_writing, weights, out=dk[:, block])
            torch.bmm(k[:, block] * weights, d_kv, out=dv[:, block])
            of_weights = here * k[:, block]
            if log_decay.shape[2] == 1:
                of_weights = of_weights.sum(2, keepdim=True)
            up_to = of_weights.cumsum(1).add_(before)
            dg[:, block] = torch.cat([before.expand_as(up_to[:, :1]), up_to[:, :-1]], 1)
            before = up_to[:, -1:]
        return dk, dv, dg.masked_fill_(log_decay < FORGOTTEN, 0)


def _blocks(k: Tensor) -> list[slice]:
    size = BLOCK.get(k.device.type, LARGEST)
    return [slice(start, start + size) for start in range(0, k.shape[1], size)]


def _weights(log_decay: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is left of a block's tokens at the end, ``[N, C, F]``, and the sum before it."""
    onwards = log_decay.clamp(min=FORGOTTEN).flip(1).cumsum(1).flip(1).add_(behind.unsqueeze(1))
    later = torch.cat([onwards[:, 1:], behind.unsqueeze(1)], 1)
    return fade(later), onwards[:, 0]
