r"""Gates: the natural logarithm of the decay of the state at each token.

At token t the state becomes :math:`S_t = \exp(g_t)\, S_{t-1} + k_t v_t^T`. These functions return
g, at most 0: 0 keeps the whole state, and minus infinity clears it.
Letters: B batch, Hkv key heads, S tokens, D features of a key, M hidden size, R rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.features.functional import softplus_of_heads, widen

# Learned gates are the 16th root of a sigmoid, so that the memory is hundreds of tokens long while
# the gradient of the sigmoid is not small (arXiv:2312.06635; arXiv:2405.05254).
TEMPERATURE = 16.0

# Largest log of a decay rate: exp(-exp(8)) is 0 in every dtype, and exp(89) is infinite
MAX_LOG_RATE = 8.0


def retnet_log_decay(
    heads: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    r"""Return the fixed decays of RetNet: :math:`\log(1 - 2^{-5-h})` for heads h from 0.

    After 2^(5+h) tokens, 1/e of the state remains.
    Source: Sun et al., 2023, arXiv:2307.08621.

    Args:
        heads: Hkv.
        device: Device of the result.
        dtype: Dtype of the result.

    Returns:
        ``[Hkv]``.
    """
    head = torch.arange(heads, device=device, dtype=dtype)
    return torch.log1p(-torch.exp2(-5 - head))


def alibi_log_decay(
    heads: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    r"""Return the slopes of ALiBi as decays: :math:`-2^{-8h/H}` for heads h from 1 to H.

    ALiBi subtracts a slope times the distance from a score. Under the exponential, this is a
    constant decay per token.
    Source: Press et al., 2022, arXiv:2108.12409. The geometric sequence is used for every number of
    heads; the paper's code uses another one if it is not a power of two.

    Args:
        heads: Hkv.
        device: Device of the result.
        dtype: Dtype of the result.

    Returns:
        ``[Hkv]``.
    """
    head = torch.arange(1, heads + 1, device=device, dtype=dtype)
    return -torch.exp2(-8 * head / heads)


def token_log_decay(hidden_states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""Return the decays of gated retention, :math:`\log \sigma(x w + b) / 16`.

    Source: Sun et al., 2024, arXiv:2405.05254.

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
    r"""Return the decays of gated linear attention, :math:`\log \sigma(x W_1 W_2 + b) / 16`.

    Source: GLA, Yang et al., 2024, arXiv:2312.06635.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, one block per head, ``[Hkv * D, R]``.
        bias: b of each head, ``[Hkv, D]``.

    Returns:
        ``[B, Hkv, S, D]``, float32 or wider.
    """
    return F.logsigmoid(low_rank_projection(hidden_states, down, up, bias)) / TEMPERATURE


def mamba2_gate(
    hidden_states: Tensor, weight: Tensor, bias: Tensor, log_rate: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return the decays :math:`-e^a \Delta` and steps :math:`\Delta` of Mamba-2.

    The step :math:`\Delta = \mathrm{softplus}(x w + b)` sets both the decay of the state and the
    weight of the token, whose key is multiplied by it (in the paper the value, which is the same
    without a normaliser).
    Source: Mamba-2, Dao and Gu, 2024, arXiv:2405.21060.

    Args:
        hidden_states: x, ``[B, S, M]``.
        weight: w of each head, ``[Hkv, M]``.
        bias: b, ``[Hkv]``.
        log_rate: a, ``[Hkv]``: the logarithm of the decay rate, per unit of step.

    Returns:
        Log decay and step, ``[B, Hkv, S]`` each, float32 or wider.
    """
    x = widen(hidden_states)
    logits = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
    step = softplus_of_heads(logits.unsqueeze(-1)).squeeze(-1)
    return -log_rate.to(x.dtype).exp()[:, None] * step, step


def hgrn2_gate(
    hidden_states: Tensor, down: Tensor, up: Tensor, bias: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\log f` and :math:`1 - f` of HGRN-2's forget gate f.

    Computes :math:`f = l + (1 - l) \sigma(x W_1 W_2 + b)` with the lower bound
    :math:`l = \sigma(c)`; 1 - f is the key.
    Source: HGRN-2, Qin et al., 2024, arXiv:2404.07904, in which the bound rises from layer to
    layer.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, one block per head, ``[Hkv * D, R]``.
        bias: b of each head, ``[Hkv, D]``.
        bound: c of each head, ``[Hkv, D]``.

    Returns:
        Log decay and 1 - f, ``[B, Hkv, S, D]`` each, float32 or wider.
    """
    logits = low_rank_projection(hidden_states, down, up, bias)
    one_minus_bound = torch.sigmoid(-bound.to(logits.dtype)).unsqueeze(1)
    # 1 - f as a product of sigmoids does not cancel where f is nearly 1. The clamp keeps the
    # gradient of the logarithm finite.
    key = (one_minus_bound * torch.sigmoid(-logits)).clamp(max=1 - torch.finfo(logits.dtype).eps)
    return torch.log1p(-key), key


def rwkv6_log_decay(hidden_states: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    r"""Return the decays of RWKV-6, :math:`-\exp(\tanh(x W_1) W_2 + b)`.

    Source: RWKV-6, Peng et al., 2024, arXiv:2404.05892.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, one block per head, ``[Hkv * D, R]``.
        bias: b of each head, ``[Hkv, D]``.

    Returns:
        ``[B, Hkv, S, D]``, float32 or wider.
    """
    logits = low_rank_projection(hidden_states, down, up, bias, activation=torch.tanh)
    return -logits.clamp(max=MAX_LOG_RATE).exp()


def low_rank_projection(
    hidden_states: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor,
    *,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return :math:`x W_1 W_2 + b` of each head, ``[B, Hkv, S, D]``, float32 or wider.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, one block per head, ``[Hkv * D, R]``.
        bias: b of each head, ``[Hkv, D]``.
        activation: Applied to :math:`x W_1`.
    """
    x = widen(hidden_states)
    inner = F.linear(x, down.to(x.dtype))
    inner = inner if activation is None else activation(inner)
    logits = F.linear(inner, up.to(x.dtype), bias.flatten().to(x.dtype))
    return logits.view(*x.shape[:2], *bias.shape).transpose(1, 2)


def mask_log_decay(log_decay: Tensor, padding_mask: Tensor) -> Tensor:
    """Return the log decays with 0 at padding, so that padding does not change the state.

    Args:
        log_decay: ``[Hkv]``, ``[B, Hkv, S]`` or ``[B, Hkv, S, D]``.
        padding_mask: ``[B, S]`` bool, true at real tokens.

    Returns:
        ``[B, Hkv, S]`` or ``[B, Hkv, S, D]``.
    """
    is_padding = ~padding_mask[:, None, :]
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(is_padding.shape[0], -1, is_padding.shape[2])
    if log_decay.ndim == 4:
        is_padding = is_padding[..., None]
    return log_decay.masked_fill(is_padding, 0)
