r"""Gates: how much of the state each step of a gated linear attention keeps, as natural logarithms.

At token t the state becomes :math:`S_t = \exp(g_t)\, S_{t-1} + k_t v_t^T`; these functions give g:
zero keeps everything, and the more negative, the sooner a token is forgotten.
Letters: B batch, Hkv key heads, S tokens, D features of a key, M hidden size, R rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.feature_maps import widen

# Learned gates take the 16th root of a sigmoid, so that a token is forgotten over hundreds of steps
# while the sigmoid stays where its gradient is not small (arXiv:2312.06635; arXiv:2405.05254).
TEMPERATURE = 16.0

# Largest exponent of a rate of decay: exp(-exp(8)) is zero in every type, and exp(89) infinite
STRONGEST = 8.0


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
    return F.logsigmoid(low_rank(hidden_states, down, up, bias)) / TEMPERATURE


def mamba2_gate(
    hidden_states: Tensor, weight: Tensor, bias: Tensor, log_rate: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`-e^a \Delta` and the step :math:`\Delta = \mathrm{softplus}(x w + b)`.

    The step decides at once how much is forgotten and how much a token writes: its key (or, what
    is the same without a normaliser, its value) is multiplied with it.
    Source: Mamba-2, Dao and Gu, 2024, arXiv:2405.21060.

    Args:
        hidden_states: x, ``[B, S, M]``.
        weight: w of each head, ``[Hkv, M]``.
        bias: b, ``[Hkv]``.
        log_rate: a, ``[Hkv]``: the logarithm of the decay per unit of step.

    Returns:
        Log decay and step, ``[B, Hkv, S]`` each, float32 or wider.
    """
    x = widen(hidden_states)
    step = F.softplus(F.linear(x, weight.to(x.dtype), bias.to(x.dtype))).transpose(1, 2)
    return -log_rate.to(x.dtype).exp()[:, None] * step, step


def hgrn2_gate(
    hidden_states: Tensor, down: Tensor, up: Tensor, bias: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\log f` and :math:`1 - f` for :math:`f = l + (1 - l) \sigma(x W_1 W_2 + b)`.

    What is forgotten is what is written: 1 - f stands for the key. The lower bound
    :math:`l = \sigma(c)` keeps a part of the state whatever the token says.
    Source: HGRN-2, Qin et al., 2024, arXiv:2404.07904, whose bound rises from layer to layer.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, head by head, ``[Hkv * D, R]``.
        bias: b, head by head, ``[Hkv, D]``.
        bound: c, head by head, ``[Hkv, D]``.

    Returns:
        Log decay and 1 - f, ``[B, Hkv, S, D]`` each, float32 or wider.
    """
    logits = low_rank(hidden_states, down, up, bias)
    room = torch.sigmoid(-bound.to(logits.dtype)).unsqueeze(1)
    # 1 - f straight from the sigmoids of the negatives: nothing cancels where f is nearly 1. At 1
    # its logarithm would have no gradient.
    write = (room * torch.sigmoid(-logits)).clamp(max=1 - torch.finfo(logits.dtype).eps)
    return torch.log1p(-write), write


def rwkv6_log_decay(hidden_states: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    r"""Return :math:`-\exp(\tanh(x W_1) W_2 + b)`, one number per token, head and feature.

    Source: RWKV-6, Peng et al., 2024, arXiv:2404.05892.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, head by head, ``[Hkv * D, R]``.
        bias: b, head by head, ``[Hkv, D]``.

    Returns:
        ``[B, Hkv, S, D]``, float32 or wider.
    """
    logits = low_rank(hidden_states, down, up, bias, bend=torch.tanh)
    return -logits.clamp(max=STRONGEST).exp()


def low_rank(
    hidden_states: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor,
    *,
    bend: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return :math:`x W_1 W_2 + b`, head by head, ``[B, Hkv, S, D]``, float32 or wider.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, head by head, ``[Hkv * D, R]``.
        bias: b, head by head, ``[Hkv, D]``.
        bend: Applied between the two maps.
    """
    x = widen(hidden_states)
    inner = F.linear(x, down.to(x.dtype))
    inner = inner if bend is None else bend(inner)
    logits = F.linear(inner, up.to(x.dtype), bias.flatten().to(x.dtype))
    return logits.view(*x.shape[:2], *bias.shape).transpose(1, 2)


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
