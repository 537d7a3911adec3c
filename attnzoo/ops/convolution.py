"""Causal depthwise convolution over tokens, with earlier tokens and packed sequences.

Letters: B batch, T tokens, X channels, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    before: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    r"""Compute :math:`y_t = \sum_j w_{W-1-j} x_{t-j}` for each channel, with j from 0 to W - 1.

    Time and memory O(T X W).

    Args:
        x: ``[B, T, X]``.
        weight: ``[X, W]``; the last column multiplies the token itself, as in ``nn.Conv1d``.
        before: The W - 1 tokens before the first one, ``[B, W - 1, X]``; ``None`` means zeros.
        segment_ids: ``[B, T]``, of packed sequences, which do not see each other; the tokens in
            ``before`` belong to the first one.

    Returns:
        ``[B, T, X]``, in the dtype of ``x``.
    """
    tokens, reach = x.shape[1], weight.shape[1] - 1
    padded = F.pad(x, (0, 0, reach, 0)) if before is None else torch.cat([before, x], 1)
    ids = segment_ids
    if ids is not None:
        ids = torch.cat([ids[:, :1].expand(-1, reach), ids], 1)
    weight = weight.to(x.dtype)
    out = x * weight[:, -1]
    for shift in range(1, reach + 1):
        shifted = padded[:, reach - shift : reach - shift + tokens]
        if ids is not None:
            same = ids[:, reach:] == ids[:, reach - shift : reach - shift + tokens]
            shifted = shifted * same[..., None]
        out = torch.addcmul(out, shifted, weight[:, -1 - shift])
    return out
