"""The output of the window hybrid, from the window and the linear sums over one denominator."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.linear.window_state import LinearBranch

MIN_WEIGHT = 1e-30  # a smaller sum of linear weights, before scaling, counts as 0


def combine(
    near: Tensor, lse: Tensor, values: Tensor, total: Tensor, logit: Tensor, branch: LinearBranch
) -> Tensor:
    """Return the window and the linear sums over one denominator.

    Args:
        near: Softmax attention inside the window, ``[B, H, T, E]``.
        lse: Log-sum-exp of its scores, ``[B, H, T, 1]``.
        values: Linear sums of values, ``[B, H, T, E]``.
        total: Linear sums of weights, ``[B, H, T, 1]``.
        logit: Logit of the linear sums, broadcastable to ``[B, H, T, 1]``.
        branch: Options of the linear branch.
    """
    if branch.relative:
        lse = torch.zeros_like(lse)  # the window's sum is a factor of both terms and cancels
    has_linear = total > MIN_WEIGHT
    if branch.linear_only_heads is not None:
        heads = branch.linear_only_heads.view(1, -1, 1, 1)
        lse = lse.masked_fill(has_linear & heads, -torch.inf)
    log_total = total.clamp(min=MIN_WEIGHT).log()
    maximum = torch.where(has_linear, torch.maximum(lse, logit + log_total), lse).detach()
    linear_weight = (logit - maximum).masked_fill(~has_linear, -torch.inf).exp()
    window_weight = (lse - maximum).exp()
    numerator = window_weight * near + linear_weight * values
    return numerator / (window_weight + linear_weight * total)
