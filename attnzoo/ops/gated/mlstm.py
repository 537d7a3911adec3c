r"""The stabiliser of mLSTM, for all tokens at once.

Source: xLSTM, Beck et al., 2024, arXiv:2405.04517.
Letters: B batch, Hkv key heads, T tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LOWEST_STABILIZER = -87.0  # exp(87) is finite in float32


@torch.no_grad()
def stabilizer(
    log_forget: Tensor, log_input: Tensor, initial: Tensor, starts: Tensor | None
) -> Tensor:
    r"""Return :math:`m_t = \max(\log f_t + m_{t-1}, i_t)`, ``[B, Hkv, T]``, as an associative scan.

    The output of mLSTM does not depend on m, so it has no gradient. Each step is a function
    :math:`m \mapsto \max(a + m, b)`. Two such functions compose to one of the same kind, so log2(T)
    rounds compute all tokens, without a difference of two long sums.

    Args:
        log_forget: log f, ``[B, Hkv, T]``.
        log_input: i, ``[B, Hkv, T]``.
        initial: m before the first token, ``[B, Hkv]``.
        starts: Where a packed segment starts, with m = 0 before it, ``[B, 1, T]`` bool.

    Returns:
        m in the dtype of ``log_forget``.
    """
    a, b = log_forget.double(), log_input.double()
    if starts is not None:
        b = torch.where(starts, torch.maximum(a, b), b)
        a = a.masked_fill(starts, -torch.inf)
    offset = 1
    while offset < a.shape[2]:
        earlier_a = F.pad(a[:, :, :-offset], (offset, 0))
        earlier_b = F.pad(b[:, :, :-offset], (offset, 0), value=-torch.inf)
        a, b = earlier_a + a, torch.maximum(earlier_b + a, b)
        offset *= 2
    return torch.maximum(initial.double().unsqueeze(2) + a, b).to(log_forget.dtype)


def segment_starts(segment_ids: Tensor) -> Tensor:
    """Return the tokens at which another segment starts, ``[B, T]`` bool; false at the first."""
    return F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
