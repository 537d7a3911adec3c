"""Causal depthwise convolution over tokens, with earlier tokens, of rows or of sequences.

Other letters: X channels, W width, S sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.sequences import Sequences


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    before: Tensor | None = None,
    sequences: Sequences | None = None,
) -> Tensor:
    r"""Compute :math:`y_t = \sum_j w_{W-1-j} x_{t-j}` for each channel, with j from 0 to W - 1.

    Time and memory O(T X W).

    Args:
        x: ``[B, T, X]``.
        weight: ``[X, W]``; the last column multiplies the token itself, as in ``nn.Conv1d``.
        before: The W - 1 tokens before the first one of each sequence, ``[S, W - 1, X]``; ``None``
            means zeros.
        sequences: The sequences of one row, B = 1, which do not see each other; ``None``: each row
            is a sequence.

    Returns:
        ``[B, T, X]``, in the dtype of ``x``.
    """
    tokens, reach = x.shape[1], weight.shape[1] - 1
    weight, place = weight.to(x.dtype), None
    if sequences is not None:
        place = sequences.positions(tokens)[:, None]
        inside = sequences.inside(tokens)
        if inside is not None:
            place = torch.where(inside[:, None], place, 0)
            x = torch.where(inside[:, None], x, 0)
    if before is None or sequences is not None:
        padded = F.pad(x, (0, 0, reach, 0))
    else:
        padded = torch.cat([before, x], 1)
    out = x * weight[:, -1]
    for shift in range(1, reach + 1):
        shifted = padded[:, reach - shift : reach - shift + tokens]
        if place is not None:
            shifted = shifted * (place >= shift)
        out = torch.addcmul(out, shifted, weight[:, -1 - shift])
    if sequences is None or before is None or not reach:
        return out
    # What the tokens before a sequence add to its first ones
    first = causal_convolution(F.pad(before.to(x.dtype), (0, 0, 0, reach)), weight)[:, reach:]
    token = torch.arange(reach, device=x.device)
    is_one = token < sequences.lengths[:, None]
    index = torch.where(is_one, sequences.starts[:, None] + token, 0)
    first = torch.where(is_one[..., None], first, 0)
    return out.index_add(1, index.flatten(), first.flatten(0, 1)[None])


def last_tokens(
    x: Tensor, count: int, *, before: Tensor | None = None, sequences: Sequences | None = None
) -> Tensor:
    """Return the last tokens of each sequence, ``[S, count, X]``, the newest last.

    Args:
        x: ``[B, T, X]``.
        count: Number of tokens.
        before: The ``count`` tokens before the first one, ``[S, count, X]``; ``None`` means zeros.
        sequences: As in :func:`causal_convolution`.
    """
    if sequences is None:
        before = x.new_zeros(x.shape[0], count, x.shape[2]) if before is None else before
        return torch.cat([before, x], 1)[:, x.shape[1] :].clone()
    place = sequences.lengths[:, None] + torch.arange(-count, 0, device=x.device)
    is_here = (place >= 0)[..., None]
    index = torch.where(place >= 0, sequences.starts[:, None] + place, 0)
    if before is None:
        return torch.where(is_here, x[0, index], 0)
    index_before = (place + count).clamp(max=count - 1)[..., None].expand(before.shape)
    return torch.where(is_here, x[0, index], before.gather(1, index_before))
