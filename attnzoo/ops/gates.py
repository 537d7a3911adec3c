r"""Gates: how much of the state each step of a gated linear attention keeps, as natural logarithms.

At token t the state becomes :math:`S_t = \exp(g_t)\, S_{t-1} + k_t v_t^T`; these functions give g:
zero keeps everything, and the more negative, the sooner a token is forgotten.
Letters: B batch, Hkv key heads, S tokens, D features of a key, M hidden size, R rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.feature_maps import widen

# Learned gates take the 16th root of a sigmoid, so that a token is forgotten over hundreds of steps
# while the sigmoid stays where its gradient is not small (arXiv:2312.06635; arXiv:2405.05254).
TEMPERATURE = 16.0


def retnet_log_decay(
    heads: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    r"""Return :math:`\log(1 - 2^{-5-h})` for heads h from 0: 1/e remains after 2^(5+h) tokens.

    Source: Sun et al., 2023, arXiv:2307.08621.

    Args:
        heads: Hkv.
        device: Where the result lies.
        dtype: Its dtype.

    Returns:
        ``[Hkv]``.
    """
    head = torch.arange(heads, device=device, dtype=dtype)
    return torch.log1p(-torch.exp2(-5 - head))


def alibi_log_decay(
    heads: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    r"""Return :math:`-2^{-8h/H}` for heads h from 1 to H: ALiBi's slopes.

    ALiBi adds a slope times the distance to a score, negative; to the exponential of a score that
    is a constant decay per token. Source: Press et al., 2022, arXiv:2108.12409; the plain sequence
    for every number of heads (its code takes another where that is no power of two).

    Args:
        heads: Hkv.
        device: Where the result lies.
        dtype: Its dtype.

    Returns:
        ``[Hkv]``.
    """
    head = torch.arange(1, heads + 1, device=device, dtype=dtype)
    return -torch.exp2(-8 * head / heads)


def token_log_decay(hidden_states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Return :math:`\log \sigma(x w + b) / 16`, one number per token and head.

    Source: gated retention, Sun et al., 2024, arXiv:2405.05254.

    Args:
        hidden_states: x, ``[B, S, M]``.
        weight: w of each head, ``[Hkv, M]``.
        bias: b, ``[Hkv]``.

    Returns:
        ``[B, Hkv, S]``, float32 or wider.
    """
    x = widen(hidden_states)
    logits = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
    return F.logsigmoid(logits).transpose(1, 2) / TEMPERATURE


def channel_log_decay(hidden_states: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    r"""Return :math:`\log \sigma(x W_1 W_2 + b) / 16`, one number per token, head and feature.

    Source: gated linear attention, Yang et al., 2024, arXiv:2312.06635.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, head by head, ``[Hkv * D, R]``.
        bias: b, head by head, ``[Hkv, D]``.

    Returns:
        ``[B, Hkv, S, D]``, float32 or wider.
    """
    x = widen(hidden_states)
    rank = F.linear(x, down.to(x.dtype))
    logits = F.linear(rank, up.to(x.dtype), bias.flatten().to(x.dtype))
    return F.logsigmoid(logits).view(*x.shape[:2], *bias.shape).transpose(1, 2) / TEMPERATURE


def keep_at_padding(log_decay: Tensor, real: Tensor) -> Tensor:
    """Return the decays with zero where a token is padding, so that it leaves the state alone.

    Args:
        log_decay: ``[Hkv]``, ``[B, Hkv, S]`` or ``[B, Hkv, S, D]``.
        real: ``[B, S]`` bool, true where a token is real.

    Returns:
        ``[B, Hkv, S]`` or ``[B, Hkv, S, D]``.
    """
    gone = ~real[:, None, :]
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(gone.shape[0], -1, gone.shape[2])
    if log_decay.ndim == 4:
        gone = gone[..., None]
    return log_decay.masked_fill(gone, 0)
